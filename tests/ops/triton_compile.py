"""Compiles the kernels for an NVIDIA H100 or H200, for `test_triton.py`, on a machine that may have no GPU.

`python triton_compile.py FILE` writes {kernel: [number of tensor core instructions, size of the machine code]} to FILE.
"""

import json
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from implicit_attention._fused_rule import FusedRule
from implicit_attention.ops.problem import Hopfield
from implicit_attention.ops.rule import AdjointRule
from implicit_attention.ops.triton.adjoint import solve_adjoint
from implicit_attention.ops.triton.solve import solve


class Hopper:
    """All that compiling asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def main(path):
    driver.set_active(Hopper())
    launch, found = JITFunction.run, {}

    def only_compile(kernel, *arguments, grid, warmup, **options):
        compiled = launch(kernel, *arguments, grid=grid, warmup=True, **options)
        found[kernel.__name__] = [compiled.asm["ptx"].count("wgmma.mma_async"), len(compiled.asm["cubin"])]

    JITFunction.run = only_compile
    x = torch.randn(2, 2, 256, 64).bfloat16()
    one = torch.ones(1, 1, 1, 1)
    problem = Hopfield(x, x[:, :1], one, one / 2, torch.ones(2, 1, 1, 256, dtype=torch.bool), first=3)
    z, logsumexp = x.float(), x[..., 0].float().contiguous()
    solve(problem, x, FusedRule(1e-3, 0.0, 10, 3))
    solve_adjoint(problem, z, z, z, logsumexp, AdjointRule(1e-2, 10))
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
