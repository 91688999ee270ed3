"""Queries with known entries: a memory starts the others at conditional means of Gaussians around its patterns."""

import pytest
import torch

from implicit_attention import MemoryLookup
from implicit_attention.testing.numerics import check_close, random, relative_error

PATTERNS, QUERIES = random(7, 5), random(2, 3, 5, seed=1)
KNOWN = random(2, 3, 5, seed=8) > 0


def filled(queries, known, patterns):
    """With anchor 1 the answer is where a solve starts."""
    memory = MemoryLookup(5, beta=0.7, anchor=1.0, dtype=queries.dtype)
    memory.store(patterns)
    return memory.retrieve(queries, known=known, clamp=False, max_steps=0)


def test_filled_entries_are_conditional_means_of_gaussians():
    away = (QUERIES[..., None, :] - PATTERNS).square().masked_fill(~KNOWN[..., None, :], 0.0).sum(-1)
    expected = QUERIES.where(KNOWN, (-0.35 * away).softmax(-1) @ PATTERNS)
    check_close(filled(QUERIES, KNOWN, PATTERNS), expected, 1e-12)
    # The conditional means by the density itself: integrated over a grid of the one entry that is unknown.
    one, grid = torch.arange(5) < 4, torch.linspace(-12, 12, 4001, dtype=torch.float64)
    points = torch.cat([QUERIES[0, 0, :4].expand(len(grid), 4), grid[:, None]], -1)
    density = (-0.35 * torch.cdist(points, PATTERNS).square()).exp().sum(-1)
    found = filled(QUERIES[:1, :1], one, PATTERNS)[0, 0, 4]
    check_close(found, (density * grid).sum() / density.sum(), 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_low_precision_fills_nearly_the_same(dtype, tolerance):
    patterns, queries = (PATTERNS + 20).to(dtype), (QUERIES + 20).to(dtype)
    found = filled(queries, KNOWN, patterns)
    assert found.dtype == dtype
    assert relative_error(found, filled(queries.double(), KNOWN, patterns.double())) < tolerance
