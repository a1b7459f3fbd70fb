"""Gluon kernels compile for Hopper with the Triton that is installed, on a machine without a GPU too.

Triton 3.9 has renamed some of what kernels call, and a kernel that the other tests run on one version alone would break
on the other. Compiled in a process of its own, whose driver says that the GPU is a Hopper.
"""

import os
import subprocess
import sys

SCORES = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Hopper())
from compiled_dsa.custom_ops.kernels import index_scores_gluon as kernel

fp8, fp32, int32 = (MockTensor(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.int32))
pool = torch.zeros(4, 8448, dtype=torch.uint8)
copies = kernel.descriptors(torch.zeros(8, 64, 128).to(torch.float8_e4m3fn), pool)
for HI in map(int, sys.argv[1:]):
    compiled = kernel._scores.warmup(
        *copies, fp32, int32, int32, int32, fp32, HI, 512, 32768, 4096, 32768, 512, 2048, HI=HI, num_warps=4, grid=(1,)
    )
    assert "wgmma.mma_async" in compiled.asm["ptx"] and len(compiled.asm["cubin"]) > 1000
"""


def test_index_scores(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", SCORES, "32", "64", "128"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
