"""``torch.compile(mode="reduce-overhead")``, without any runner of ours: Inductor cuts its graph at tagged ops."""

import re

import pytest
import torch

from compiled_dsa import Batch, PagePool
from tests.graphs.programs import append, prefix_sum
from tests.modules.layers import angles, our_layer, stock_layer

pytestmark = pytest.mark.gpu
STEPS = 6  # cudagraph trees warm up, record and then replay


class Compiled:
    """A function under reduce-overhead, and the code that Inductor made of it."""

    def __init__(self, function):
        self._run = torch.compile(function, mode="reduce-overhead", fullgraph=True)
        self.code = ""

    def __call__(self, *args):
        from torch._inductor.utils import run_and_get_code

        torch.compiler.cudagraph_mark_step_begin()
        if self.code:
            return self._run(*args)
        with torch._inductor.config.patch(force_disable_caches=True):
            result, code = run_and_get_code(self._run, *args)
        self.code = "\n".join(code)
        return result

    @property
    def partitions(self) -> int:
        """Parts that are captured as CUDA graphs."""
        return len(re.findall(r"def partition_\d+\(", self.code))


def graphs_skipped() -> int:
    """Graphs that torch chose not to capture in this process so far."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def toy(x, weight, pool):
    """Two layers around a split op, then a split op that writes a pool which pointwise work reads."""
    for _ in range(2):
        summed = torch.empty_like(x)
        prefix_sum(torch.relu(x) + 0.5, summed)
        x = torch.tanh(summed @ weight) * 2
    append(pool, x, torch.arange(x.shape[0], device=x.device) + 1)
    return pool[: x.shape[0]] * 2


@torch.no_grad()
def test_split_ops_run_between_captured_partitions_and_pools_stay_where_they_are(fresh_dynamo):
    weight = torch.randn(4, 4, device="cuda")
    pools = [torch.zeros(1 << 25, 4, device="cuda") for _ in range(2)]  # 512 MiB, more than any workspace
    torch._dynamo.mark_static_address(pools[0])
    run, skipped = Compiled(toy), graphs_skipped()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        x = torch.randn(8, 4, device="cuda")
        torch.testing.assert_close(run(x, weight, pools[0]), toy(x, weight, pools[1]))
        torch.testing.assert_close(pools[0][:16], pools[1][:16])
    assert torch.cuda.max_memory_allocated() - before < pools[0].nbytes // 2
    assert run.partitions == 4
    assert graphs_skipped() == skipped


class Prefills:
    """Chunks of one request through a layer, each layer with pools of its own."""

    def __init__(self, layer, x):
        self.layer, self.x, self.held = layer, x, 0
        dtypes = {"latent_dtype": x.dtype, "index_dtype": x.dtype}
        self.pool = PagePool([layer.dsa_config], num_pages=4, max_requests=1, max_len=len(x), device=x.device, **dtypes)
        self.pool.reserve(0, len(x))

    def next(self, new: int):
        """Arguments of the layer for the next ``new`` tokens."""
        x, device = self.x[self.held : self.held + new], self.x.device
        positions = torch.arange(self.held, self.held + new)
        cos, sin = (a.to(device) for a in angles(positions, self.layer.dsa_config.qk_rope_head_dim, x.dtype))
        self.held += new
        lengths = [torch.tensor([n], device=device) for n in (new, self.held)]
        return x, cos, sin, Batch.from_lengths(*lengths, self.pool.page_table, new), self.pool.layers[0]


@torch.no_grad()
def test_a_layer_of_ours(fresh_dynamo):
    layer = our_layer(stock_layer("deepseek_v32", torch.float32)).cuda()
    x = torch.randn(8 * STEPS, 64, device="cuda")
    mine, theirs = Prefills(layer, x), Prefills(layer, x)
    run, skipped = Compiled(layer), graphs_skipped()
    for _ in range(STEPS):
        out, topk = run(*mine.next(8))
        expected, expected_topk = theirs.layer(*theirs.next(8))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(topk.sort().values, expected_topk.sort().values)
    for pool, other in zip(mine.pool.layers[0].tensors(), theirs.pool.layers[0].tensors()):
        torch.testing.assert_close(pool, other, rtol=1e-4, atol=1e-4)
    assert run.partitions >= 2  # before the selection and after the attention; what lies between may move
    assert graphs_skipped() == skipped
