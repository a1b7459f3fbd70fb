"""PagePool: pages move between requests and the free list, and a refused call changes nothing."""

import dataclasses
from collections.abc import Callable

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
    sizes = {"num_pages": PAGES, "max_requests": REQUESTS, "max_len": MAX_LEN, "device": "cpu", **sizes}
    return PagePool(list(configs), latent_dtype=latent_dtype, index_dtype=index_dtype, **sizes)


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

    def expect(self, call: Callable[..., None], arguments: tuple[int, ...], pages: int) -> None:
        request, length = (*arguments, 0)[:2]
        before = snapshot(self.pool)
        kept = self.pool.pages_of(request) if 0 <= request < REQUESTS else ()
        if not 0 <= request < REQUESTS:
            error, message = ValueError, f"request={request}; the pool has requests 0 to 3"
        elif not 0 <= length <= MAX_LEN:
            error, message = ValueError, f"kv_len={length}; it must be an integer between 0 and max_len=250"
        elif pages - len(kept) > self.pool.free_pages:
            error, message = OutOfPagesError, f"request {request} needs {pages - len(kept)} more pages"
        elif call == self.pool.free and not kept:
            error, message = ValueError, f"request={request} holds no pages"
        else:
            call(*arguments)
            after = self.pool.pages_of(request)
            assert after[: len(kept)] == kept[: len(after)]  # pages that stay keep their order
            self.counts[request] = pages
            return
        with pytest.raises(error, match=message):
            call(*arguments)
        assert snapshot(self.pool) == before

    @rule(request=requests, length=lengths)
    def reserve(self, request, length):
        pages = max(self.counts.get(request, 0), -(-length // PAGE))
        self.expect(self.pool.reserve, (request, length), pages)

    @rule(request=requests, length=lengths)
    def crop(self, request, length):
        pages = min(self.counts.get(request, 0), -(-length // PAGE))
        self.expect(self.pool.crop, (request, length), pages)

    @rule(request=requests)
    def free(self, request):
        self.expect(self.pool.free, (request,), 0)

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


def numbered(pool: PagePool) -> list[torch.Tensor]:
    """Writes the number of each token into its first bytes and into its scale, if it has one; returns all bytes."""
    fill(pool)
    for layer in pool.layers:
        for tensor in layer.tensors():
            raw = tensor.view(torch.uint8)
            D = raw.shape[-1] // PAGE - 4
            tokens = raw if raw.dim() == 3 else raw[:, : PAGE * D].unflatten(1, (PAGE, D))
            numbers = torch.arange(tokens.shape[0] * PAGE, dtype=torch.int32, device=raw.device).view(-1, PAGE, 1)
            tokens[..., :4] = numbers.view(torch.uint8)
            if raw.dim() == 2:
                raw.view(torch.float32)[:, -PAGE:] = numbers[..., 0].float()
    return token_bytes(pool)


def token_bytes(pool: PagePool) -> list[torch.Tensor]:
    """[P, 64, bytes] of each pool."""
    found = []
    for layer in pool.layers:
        for tensor in layer.tensors():
            raw = tensor.view(torch.uint8)
            if raw.dim() == 2:  # index keys in fp8: 64 rows of codes, then 64 scales
                D = raw.shape[1] // PAGE - 4
                codes, scales = raw[:, : PAGE * D].unflatten(1, (PAGE, D)), raw[:, PAGE * D :].unflatten(1, (PAGE, 4))
                raw = torch.cat([codes, scales], 2)
            found.append(raw.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_tokens_move_with_codes_and_scales(dtype, device):
    pool = make_pool([REAL_SIZES], dtype, dtype, device=device)
    pool.reserve(1, 70)
    pool.reserve(0, 192)
    before = numbered(pool)
    assert all(len(tokens.flatten(0, 1).unique(dim=0)) == PAGES * PAGE for tokens in before)
    table, addresses = pool.page_table.clone(), [t.data_ptr() for t in (pool.page_table, *pool.layers[0].tensors())]

    pool.move_tokens(0, [63, 64, 65], [0, 127, 128])
    first, second, third = pool.pages_of(0)
    expected = [tokens.clone() for tokens in before]
    for tokens, old in zip(expected, before):
        tokens[first, 0], tokens[second, 63], tokens[third, 0] = old[first, 63], old[second, 0], old[second, 1]
    assert all(map(torch.equal, token_bytes(pool), expected))

    pool.move_tokens([0, 1, 1], [5, 5, 6], [6, 6, 5])  # of two requests at once; the second one swaps its tokens
    (own, _) = pool.pages_of(1)
    for tokens, old in zip(expected, before):
        tokens[first, 6], tokens[own, 6], tokens[own, 5] = old[first, 5], old[own, 5], old[own, 6]
    assert all(map(torch.equal, token_bytes(pool), expected))
    pool.move_tokens(0, [], [])
    assert all(map(torch.equal, token_bytes(pool), expected)) and torch.equal(pool.page_table, table)
    assert [t.data_ptr() for t in (pool.page_table, *pool.layers[0].tensors())] == addresses


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_copied_pages_are_equal_to_the_last_byte_and_others_stay(dtype, device):
    pool = make_pool([REAL_SIZES, CONFIG], dtype, dtype, device=device)
    addresses = [t.data_ptr() for t in (pool.page_table, *pool.layers[1].tensors())]
    pool.reserve(0, 100)
    pool.fork(0, 1, 100)
    expected = numbered(pool)
    pool.reserve(1, 101)
    assert (pool.pages_of(0), pool.pages_of(1)) == ((0, 1), (0, 2))
    for tokens in expected:
        tokens[2] = tokens[1]
    assert all(map(torch.equal, token_bytes(pool), expected))
    pool.move([0, 2], [8, 3])
    for tokens in expected:
        tokens[8], tokens[3] = tokens[0].clone(), tokens[2].clone()
    assert all(map(torch.equal, token_bytes(pool), expected))
    assert pool.page_table[:2].tolist() == [[8, 1, -1, -1], [8, 3, -1, -1]]
    assert [t.data_ptr() for t in (pool.page_table, *pool.layers[1].tensors())] == addresses


def test_compaction_of_more_pages_than_are_copied_at_once():
    pool = make_pool(index_dtype=FP8, num_pages=700, max_len=400 * PAGE)
    for request, pages in enumerate((300, 50, 300)):
        pool.reserve(request, pages * PAGE)
    numbered(pool)
    before = {request: rows(pool, request, pages * PAGE) for request, pages in ((1, 50), (2, 300))}
    pool.free(0)
    assert pool.compact() == 300
    assert {*pool.pages_of(1), *pool.pages_of(2)} == set(range(350))
    assert all(map(torch.equal, rows(pool, 1, 50 * PAGE), before[1]))
    assert all(map(torch.equal, rows(pool, 2, 300 * PAGE), before[2]))
    pool.reserve(0, 1)
    assert pool.pages_of(0) == (350,) and pool.compact() == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "far"),
    [
        ((PAGE, 576), torch.bfloat16, 58_255),
        ((PAGE, 656), torch.uint8, 51_151),
        ((8448,), torch.uint8, 254_201),
    ],
    ids=["bf16 latents", "fp8 latents", "fp8 index keys"],
)
def test_places_past_int32(shape, dtype, far, device):
    """Page ``far`` is the first one to begin past 2**31 elements. On a CPU memory that is not touched stays virtual."""
    pool = make_pool([], num_pages=far + 2, device=device)
    big = torch.empty(far + 2, *shape, dtype=dtype, device=device)
    assert big[far - 1].storage_offset() < 2**31 < big[far].storage_offset()
    latents = big if big.dim() == 3 else torch.empty(far + 2, PAGE, 1, dtype=dtype, device=device)
    pool.layers = [LayerPools(latents, None if latents is big else big)]
    first = torch.arange(big[0].numel(), device=device).remainder(251).view(shape).to(dtype)
    second = first.flip(0)
    big[0], big[1] = first, second
    pool.reserve(0, 100)
    pool.move([0, 1], [far - 1, far + 1])
    assert torch.equal(big[far - 1], first) and torch.equal(big[far + 1], second)
    pool.fork(0, 1, 100)
    pool.reserve(1, 101)  # copies the second page, to page 0
    assert pool.pages_of(1) == (far - 1, 0) and torch.equal(big[0], second)
    pool.free(1)
    tokens = pool.layers[0].token_tensors()
    expected = [t[far - 1, 5].clone() for t in tokens]
    pool.move_tokens(0, [5], [99])
    assert all(torch.equal(t[far + 1, 35], e) for t, e in zip(tokens, expected))
    pool.move([far + 1], [far])
    assert all(torch.equal(t[far, 35], e) for t, e in zip(tokens, expected))


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
        ({"num_pages": 0}, "num_pages=0; it must be an integer of at least 1"),
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


def test_a_layer_that_attends_anothers_latents_has_these_and_counts_them_once():
    sharing = dataclasses.replace(CONFIG, kv_source=0)
    pool, alone = make_pool([CONFIG, sharing]), make_pool()
    assert pool.layers[1].latents is pool.layers[0].latents
    assert pool.page_bytes == alone.page_bytes + pool.layers[1].index_keys[0].nbytes
    pool.reserve(0, 3)
    page, latents = pool.pages_of(0)[0], pool.layers[0].latents
    latents[page, :3] = torch.arange(1.0, 4.0)[:, None]
    pool.move_tokens(0, [1, 2], [0, 1])  # a chain: moved twice it would be wrong
    assert latents[page, :3, 0].tolist() == [2, 3, 3]
    with pytest.raises(ValueError, match=r"configs\[0\].kv_source=0; it must be an earlier layer"):
        make_pool([sharing])


def test_a_pool_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        pool = make_pool()
    pool.reserve(0, 100)
    assert int((pool.page_table[0] >= 0).sum()) == 2
