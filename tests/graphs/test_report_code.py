"""Output code of Inductor as it is for Triton, with and without graph partition; that of C++ is met in test_report."""

import pytest

from compiled_dsa.graphs.report_code import EXTERN, KERNEL, OP, Launch, read_output_code

KERNELS = """\
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()

# Topologically Sorted Source Nodes: [norm], Original ATen: [aten.mean]
triton_per_fused_mean_0 = async_compile.triton('triton_per_fused_mean_0', '''
import triton
@triton.jit
def triton_per_fused_mean_0(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')


triton_poi_fused_relu_1 = async_compile.triton('triton_poi_fused_relu_1', '''
import triton
@triton.jit
def triton_poi_fused_relu_1(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

async_compile.wait(globals())
"""

WHOLE = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        assert_size_stride(arg0_1, (s77, 8), (8, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((s77, ), (1, ), torch.float32)
            # Topologically Sorted Source Nodes: [pow_1, norm], Original ATen: [aten.mean]
            stream0 = get_raw_stream(0)
            triton_per_fused_mean_0.run(arg0_1, buf0, s77, 8, stream=stream0)
            buf1 = empty_strided_cuda((s77, 8), (8, 1), torch.float32)
            # Topologically Sorted Source Nodes: [q_proj], Original ATen: [aten.mm]
            extern_kernels.mm(arg0_1, reinterpret_tensor(arg1_1, (8, 8), (1, 8), 0), out=buf1)
            del arg1_1
            triton_poi_fused_relu_1.run(buf1, s77*8, stream=stream0)
            # Topologically Sorted Source Nodes: [store], Original ATen: [mine.store]
            torch.ops.mine.store.default(arg2_1, buf1, buf0)
            # Topologically Sorted Source Nodes: [topk], Original ATen: [aten.topk]
            buf2 = torch.ops.aten.topk.default(buf1, 5)
            buf3 = buf2[0]; del buf2  # reuse
            torch.ops.streams.wait_event.default(1, 2)
            arg2_1.copy_(buf3, False)
        return (buf1, )

runner = Runner(partitions=[])
call = runner.call

def benchmark_compiled_module(args, times=10, repeat=10):
    triton_poi_fused_relu_1.run(rand_strided((8, ), (1, ), device='cuda:0'), 8, stream=stream0)
"""

PARTITIONED = """
def partition_0(args):
    arg0_1, = args
    with torch.cuda._DeviceGuard(0):
        triton_per_fused_mean_0.run(arg0_1, buf0, s77, 8, stream=stream0)
    return (buf0, )

def partition_1(args):
    buf1, = args
    triton_poi_fused_relu_1.run(buf1, s77*8, stream=stream0)
    return (buf1, )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, = args
        partition0_args = [arg0_1]
        (buf0,) = self.partitions[0](partition0_args)
        torch.ops.mine.cut.default(buf0, buf1)
        (buf2,) = self.partitions[1]([buf1])
        return (buf2, )

runner = Runner(partitions=[partition_0,partition_1])
"""


def kinds_and_names(launches: tuple[Launch, ...]) -> list[tuple[str, str]]:
    return [(launch.kind, launch.name) for launch in launches]


def test_launches_in_order():
    code = read_output_code(KERNELS + WHOLE)
    assert kinds_and_names(code.launches) == [
        (KERNEL, "triton_per_fused_mean_0"),
        (EXTERN, "mm"),
        (KERNEL, "triton_poi_fused_relu_1"),
        (OP, "mine::store.default"),
        (EXTERN, "aten::topk.default"),
        (EXTERN, "copy_"),
    ]
    nodes = [launch.nodes for launch in code.launches]
    assert nodes == [("pow_1", "norm"), ("q_proj",), (), ("store",), ("topk",), ()]


def test_sources_of_kernels():
    kernels = read_output_code(KERNELS + WHOLE).kernels
    assert list(kernels) == ["triton_per_fused_mean_0", "triton_poi_fused_relu_1"]
    for name, source in kernels.items():
        assert source.startswith("import triton") and f"def {name}(" in source


def test_partitions_run_where_they_are_called():
    assert kinds_and_names(read_output_code(KERNELS + PARTITIONED).launches) == [
        (KERNEL, "triton_per_fused_mean_0"),
        (OP, "mine::cut.default"),
        (KERNEL, "triton_poi_fused_relu_1"),
    ]


@pytest.mark.parametrize("text", ["#include <vector>\nint main() {}", "x = 1"])
def test_other_code_is_refused(text):
    with pytest.raises(ValueError, match="output code"):
        read_output_code(text)
