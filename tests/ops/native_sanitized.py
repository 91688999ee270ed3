"""Native solves and adjoint solves of many shapes: `python native_sanitized.py FOLDER_OF_LIBRARY INSTRUCTION_SET`."""

import itertools
import sys
from pathlib import Path

import torch

from implicit_attention._fused_rule import FusedRule
from implicit_attention.adjoints.native import is_finite
from implicit_attention.ops.native import library
from implicit_attention.ops.native.adjoint import adjoints
from implicit_attention.ops.native.solve import equilibria
from implicit_attention.ops.problem import Hopfield
from implicit_attention.ops.rule import AdjointRule

QUERIES = (1, 5, 14, 33)
KEYS = (1, 15, 17, 129, 200)
DIMS = (1, 3, 16, 17, 70)


def masks(queries, keys):
    generator = torch.Generator().manual_seed(2)
    pairs = torch.rand(queries, keys, generator=generator) > 0.3
    yield None, None
    yield None, 0
    yield None, 6
    yield pairs, None
    yield pairs[:1], 3
    yield torch.where(pairs, 0.5, -torch.inf)[None, None], None


def run(dtype):
    for (queries, keys, dim), shared in itertools.product(itertools.product(QUERIES, KEYS, DIMS), (False, True)):
        generator = torch.Generator().manual_seed(queries + keys + dim)
        query = torch.randn(2, 3, queries, dim, generator=generator).to(dtype)
        key = torch.randn(2, 1 if shared else 3, keys, dim, generator=generator).to(dtype)
        assert is_finite(key)
        # Exactly its own memory: what is read beyond it is seen.
        for mask, first in masks(queries, keys):
            mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
            rule = FusedRule(1e-4, 1e-8, 30, 3)
            problem = Hopfield(query, key, 0.3, 0.4, mask, first)
            found = equilibria(problem, query, rule)
            cotangent = torch.ones_like(query)
            cotangent[0, 0, 0] = 0
            by_bias = torch.zeros(2, 3, keys, dtype=dtype) if shared else None
            stop = AdjointRule(1e-4, 30)
            given = (found.state, found.mean, cotangent.mT.contiguous().mT, stop)
            adjoints(problem._replace(beta=torch.full((3,), 0.3, dtype=dtype)), *given, by_bias=by_bias)


if __name__ == "__main__":
    library.FOLDER = Path(sys.argv[1])
    status = library.native_status()
    assert status.isa == sys.argv[2], status
    for dtype in (torch.float32, torch.float64):
        run(dtype)
    print("clean")
