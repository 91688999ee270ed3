"""Queries with known entries: a memory starts the others at conditional means of Gaussians around its patterns."""

import pytest
import torch

from implicit_attention import Anderson, MemoryLookup
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


@pytest.mark.parametrize(
    ("similarity", "dtype", "shift", "tolerance"),
    [
        ("dot", torch.float64, 0.0, 1e-8),
        ("distance", torch.float64, 0.0, 1e-8),
        # Far from the origin single precision loses the digits of distances.
        ("distance", torch.float32, 10.0, 1e-3),
    ],
)
def test_known_entries_stay_and_the_others_are_where_plain_steps_end(similarity, dtype, shift, tolerance):
    memory = MemoryLookup(5, size=7, learned=True, beta=0.7, similarity=similarity, dtype=dtype)
    memory.store((PATTERNS + shift).to(dtype))
    queries = (QUERIES + shift).to(dtype).requires_grad_()
    solver = Anderson(rtol=0, atol=tolerance / 100, max_steps=500)
    found, solution = memory.retrieve(queries, known=KNOWN, return_solution=True, solver=solver)
    assert solution.converged.all()
    state, patterns = queries.double(), memory.patterns.double()
    for _ in range(150):
        away = -(state[..., None, :] - patterns).square().sum(-1) / 2
        scores = away if similarity == "distance" else state @ patterns.mT
        state = queries.double().where(KNOWN, (0.7 * scores).softmax(-1) @ patterns)
    check_close(found.double(), state, tolerance)
    got, expected = (
        torch.autograd.grad((x - shift).square().sum(), (queries, memory.patterns)) for x in (found, state)
    )
    check_close(got, expected, 10 * tolerance)
