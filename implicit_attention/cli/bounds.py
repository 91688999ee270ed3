"""The bounds of Ramsauer et al. (2020) on log-sum-exp over N patterns, none longer than M, and patterns to test them.

The separation of pattern i is k_i . k_i - max_{j != i} k_j . k_i. Keys are (*batch, N, D), beta broadcasts to *batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def separations(keys: Tensor) -> Tensor:
    """k_i . k_i - max_{j != i} k_j . k_i for every pattern, (*batch, N)."""
    scores = keys @ keys.mT
    own: Tensor = scores.diagonal(dim1=-2, dim2=-1)
    others = scores.masked_fill(torch.eye(keys.shape[-2], dtype=torch.bool, device=keys.device), -torch.inf)
    return own - others.amax(-1)


def longest(keys: Tensor) -> Tensor:
    """M, the length of the longest pattern, (*batch,)."""
    lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1)
    return lengths.amax(-1)


def separation_threshold(beta: Tensor, count: int, length: Tensor) -> Tensor:
    """From this separation on there is one fixed point at most 1/(beta N M) away from the pattern: theorem 3, A5."""
    return (2 / count + (2 * (count - 1) * count * beta * length.square()).log()) / beta


def step_bound(beta: Tensor, count: int, length: Tensor, separation: Tensor, distance: Tensor) -> Tensor:
    """An upper bound of |f(z) - k_i|, with `distance` the larger of |z - k_i| and |k_i* - k_i|: theorem 5."""
    return 2 * (count - 1) * length * (-beta * (separation - 2 * length * distance)).exp()


def contraction_bound(beta: Tensor, count: int, length: Tensor, separation: Tensor, distance: Tensor) -> Tensor:
    """An upper bound of |f(z) - k_i*| / |z - k_i*|, `distance` as in `step_bound`: theorem 4."""
    return beta * count * length * step_bound(beta, count, length, separation, distance)


def pattern_bound(beta: Tensor, count: int, length: Tensor, separation: Tensor) -> Tensor:
    """An upper bound of |k_i* - k_i|, inf where the fixed point may be farther than 1/(2 beta M): theorem 5."""
    bound = 2 * math.e * (count - 1) * length * (-beta * separation).exp()
    return bound.where(bound <= 1 / (2 * beta * length), torch.inf)


def capacity(beta: float, factor: float, dim: int, failure: float) -> tuple[float | None, float]:
    """(N, c) of theorem 3: N = sqrt(p) c^((d - 1)/4) random patterns of length K sqrt(d - 1) in d dimensions.

    All of them are stored with a probability of at least 1 - p. The theorem holds for c >= (2/sqrt p)^(4/(d - 1)); N is
    None where it does not.

    Args:
        beta: inverse temperature.
        factor: K.
        dim: d.
        failure: p.
    """
    from scipy.special import lambertw

    a = 2 / (dim - 1) * (1 + math.log(2 * beta * factor**2 * failure * (dim - 1)))
    b = 2 * factor**2 * beta / 5
    c = b / float(lambertw(math.exp(a + math.log(b))).real)
    holds = c >= (2 / math.sqrt(failure)) ** (4 / (dim - 1))
    return math.sqrt(failure) * c ** ((dim - 1) / 4) if holds else None, c


def at_ratio(keys: Tensor, ratio: float | Tensor) -> Tensor:
    """Return for every pattern the beta at which its separation is `ratio` times the threshold, (*batch, N); or NaN.

    beta times the threshold grows like log beta: the largest such beta is found by bisection.
    """
    count, length, separation = keys.shape[-2], longest(keys)[..., None], separations(keys)
    low = high = (2 / ((count - 1) * count)) / length.square() * torch.ones_like(separation)
    # Below `low` the logarithm may be negative. separation beta - ratio log(...) is convex: its root right of its
    # minimum, at beta = ratio/separation, is the one near the threshold.
    low = torch.maximum(low, ratio / separation)
    high = low.clone()
    for _ in range(60):
        high = torch.where(separation < ratio * separation_threshold(high, count, length), 2 * high, high)
    for _ in range(100):
        middle = (low + high) / 2
        below = separation < ratio * separation_threshold(middle, count, length)
        low, high = middle.where(below, low), high.where(below, middle)
    exact = (separation / (ratio * separation_threshold(high, count, length)) - 1).abs() < 1e-6
    return high.where(exact & (separation > 0), torch.nan)


def random_patterns(sets: int, count: int, dim: int, *, length: float, spread: float, seed: int) -> Tensor:
    """(sets, N, D) float64: patterns of equal `length` around one direction, with `spread` the part across it.

    A small `spread` makes neighbours near, as the bounds' worst case asks for.
    """
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(sets, 1, dim, generator=generator, dtype=torch.float64)
    around = torch.randn(sets, count, dim, generator=generator, dtype=torch.float64)
    keys = (1 - spread) * centre / centre.norm(dim=-1, keepdim=True) + spread * around / around.norm(
        dim=-1, keepdim=True
    )
    patterns: Tensor = length * keys / keys.norm(dim=-1, keepdim=True)
    return patterns
