"""PagePool: pages move between requests and the free list, and a refused call changes nothing."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compiled_dsa import DSAConfig, LayerPools, OutOfPagesError, PagePool
from compiled_dsa.cache import supports_fp8
from compiled_dsa.custom_ops.layout import FP8, PAGE
from tests.huggingface.tiny_models import tiny_config

CONFIG = DSAConfig.from_hf(tiny_config("deepseek_v32"))
REAL_SIZES = DSAConfig.from_hf(tiny_config("deepseek_v32", kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128))
PAGES, REQUESTS, MAX_LEN = 9, 4, 250


def make_pool(configs=(CONFIG,), latent_dtype=torch.float32, index_dtype=torch.float32, **sizes) -> PagePool:
    sizes = {"num_pages": PAGES, "max_requests": REQUESTS, "max_len": MAX_LEN, **sizes}
    return PagePool(list(configs), latent_dtype=latent_dtype, index_dtype=index_dtype, device="cpu", **sizes)


def snapshot(pool: PagePool) -> tuple:
    held = [pool.pages_of(r) for r in range(pool.page_table.shape[0])]
    return held, pool.free_pages, pool.page_table.tolist()


class Pages(RuleBasedStateMachine):
    """Against a model that knows only how many pages each request holds."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool()
        self.counts = dict.fromkeys(range(REQUESTS), 0)

    requests, lengths = st.integers(-1, REQUESTS), st.integers(-1, MAX_LEN + 2)

    def expect(self, call, request: int, length: int, pages: int) -> None:
        before = snapshot(self.pool)
        kept = self.pool.pages_of(request) if 0 <= request < REQUESTS else ()
        if not 0 <= request < REQUESTS:
            error, message = ValueError, f"request={request}; the pool has requests 0 to 3"
        elif not 0 <= length <= MAX_LEN:
            error, message = ValueError, f"kv_len={length}; it must be between 0 and max_len=250"
        elif pages - len(kept) > self.pool.free_pages:
            error, message = OutOfPagesError, f"request {request} needs {pages - len(kept)} more pages"
        else:
            call()
            after = self.pool.pages_of(request)
            assert after[: len(kept)] == kept[: len(after)]  # pages that stay keep their order
            self.counts[request] = pages
            return
        with pytest.raises(error, match=message):
            call()
        assert snapshot(self.pool) == before

    @rule(request=requests, length=lengths)
    def reserve(self, request, length):
        pages = max(self.counts.get(request, 0), -(-length // PAGE))
        self.expect(lambda: self.pool.reserve(request, length), request, length, pages)

    @rule(request=requests, length=lengths)
    def crop(self, request, length):
        pages = min(self.counts.get(request, 0), -(-length // PAGE))
        self.expect(lambda: self.pool.crop(request, length), request, length, pages)

    @rule(request=requests)
    def free(self, request):
        self.expect(lambda: self.pool.free(request), request, 0, 0)

    @invariant()
    def every_page_is_free_or_held_once(self):
        held = [self.pool.pages_of(r) for r in range(REQUESTS)]
        assert [len(pages) for pages in held] == list(self.counts.values())
        assert self.pool.free_pages == PAGES - sum(self.counts.values())
        everything = [page for pages in held for page in pages]
        assert len(set(everything)) == len(everything) and all(0 <= page < PAGES for page in everything)
        for pages, row in zip(held, self.pool.page_table.tolist()):
            assert row == list(pages) + [-1] * (len(row) - len(pages))


Pages.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestPages = Pages.TestCase


def fill(pool: PagePool) -> None:
    """Every byte different from those of the tokens around it, codes and scales alike."""
    for layer in pool.layers:
        for tensor in layer.tensors():
            flat = tensor.view(torch.uint8).flatten()
            flat.copy_(torch.arange(flat.numel()).remainder(251).to(torch.uint8))


def rows(pool: PagePool, request: int, length: int) -> list[torch.Tensor]:
    """The bytes of a request's first tokens, page by page, in every pool."""
    pages = list(pool.pages_of(request))[: -(-length // PAGE)]
    return [t.view(torch.uint8)[pages].clone() for layer in pool.layers for t in layer.tensors()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("sources", [[1, 0, 2], [2, 2, 2], [0, 1, 2], [1, 2, 0]])
def test_reorder_moves_codes_and_scales(dtype, sources):
    pool = make_pool([REAL_SIZES], dtype, dtype, num_pages=12)
    for request in (2, 0, 1):
        pool.reserve(request, 150)
    fill(pool)
    table = pool.page_table.clone()
    before = {request: rows(pool, request, 128) for request in range(3)}
    third_pages = [t.view(torch.uint8)[pool.pages_of(0)[2]].clone() for layer in pool.layers for t in layer.tensors()]
    pool.reorder(torch.tensor(sources), 2)
    for request, source in enumerate(sources):
        assert all(map(torch.equal, rows(pool, request, 128), before[source]))
    assert torch.equal(pool.page_table, table)
    after = [t.view(torch.uint8)[pool.pages_of(0)[2]] for layer in pool.layers for t in layer.tensors()]
    assert all(map(torch.equal, after, third_pages))  # a page past num_pages stays


def test_reorder_of_fewer_rows_and_of_no_page():
    pool = make_pool(num_pages=8)
    for request in range(4):
        pool.reserve(request, 128)
    fill(pool)
    before = {request: rows(pool, request, 128) for request in range(4)}
    pool.reorder(torch.tensor([3, 2]), 0)
    assert all(all(map(torch.equal, rows(pool, r, 128), before[r])) for r in range(4))
    pool.reorder(torch.tensor([3, 2]), 2)
    for request, source in enumerate([3, 2, 2, 3]):
        assert all(map(torch.equal, rows(pool, request, 128), before[source]))


def test_512_pages_of_fp8_latents():
    pools = LayerPools.allocate(REAL_SIZES, 512, FP8, FP8, "cpu")
    assert pools.latents.numel() * pools.latents.element_size() == 21_495_808
    assert pools.latents.shape == (512, 64, 656)
    assert pools.index_keys.shape == (512, 8448)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shapes_in_model_dtypes(dtype):
    pools = LayerPools.allocate(REAL_SIZES, 3, dtype, dtype, "cpu")
    assert (pools.latents.shape, pools.latents.dtype) == ((3, 64, 576), dtype)
    assert (pools.index_keys.shape, pools.index_keys.dtype) == ((3, 64, 128), dtype)


def test_a_shared_layer_has_no_index_keys():
    hf = tiny_config("glm_moe_dsa")
    pool = make_pool([DSAConfig.from_hf(hf, i) for i in range(3)])
    assert [layer.index_keys is None for layer in pool.layers] == [False, True, False]
    assert [len(layer.tensors()) for layer in pool.layers] == [2, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": 0}, "num_pages=0; it must be at least 1"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"max_len": 0}, "max_len=0"),
        ({"num_pages": 2**25}, "num_pages=33554432; physical slots are int32"),
        ({"latent_dtype": torch.int32}, "latent_dtype=torch.int32; it must be a model dtype or torch.float8_e4m3fn"),
        ({"index_dtype": torch.float8_e5m2}, "index_dtype=torch.float8_e5m2"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_pool(**sizes)


def test_fp8_sizes_that_have_no_layout():
    odd = DSAConfig.from_hf(tiny_config("deepseek_v32", kv_lora_rank=30))
    with pytest.raises(ValueError, match="kv_lora_rank=30, .* needs multiples of 4 and 2"):
        make_pool([odd], FP8)


def test_a_cpu_has_no_fp8_units():
    assert not supports_fp8("cpu")
