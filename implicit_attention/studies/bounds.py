"""The bounds of Ramsauer et al. (2020) on log-sum-exp over N patterns, none longer than M, and patterns to test them.

The separation of pattern i is k_i . k_i - max_{j != i} k_j . k_i. Keys are (*batch, N, D), beta broadcasts to *batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import LogSumExp

#: Separation over its threshold.
RATIOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
#: (beta, K, d, p): two examples of theorem 3 in Ramsauer et al. (2020), and shorter patterns, on which it is silent.
THEOREM = ((1.0, 3.0, 20, 0.001), (1.0, 1.0, 75, 0.001), (1.0, 0.8, 20, 0.001))


def separations(keys: Tensor) -> Tensor:
    """Return k_i . k_i - max_{j != i} k_j . k_i for every pattern, (*batch, N)."""
    scores = keys @ keys.mT
    own: Tensor = scores.diagonal(dim1=-2, dim2=-1)
    others = scores.masked_fill(torch.eye(keys.shape[-2], dtype=torch.bool, device=keys.device), -torch.inf)
    return own - others.amax(-1)


def longest(keys: Tensor) -> Tensor:
    """Return M, the length of the longest pattern, (*batch,)."""
    lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1)
    return lengths.amax(-1)


def separation_threshold(beta: Tensor, count: int, length: Tensor) -> Tensor:
    """Return the separation from which on a fixed point is at most 1/(beta N M) from the pattern: theorem 3, A5."""
    return (2 / count + (2 * (count - 1) * count * beta * length.square()).log()) / beta


def step_bound(beta: Tensor, count: int, length: Tensor, separation: Tensor, distance: Tensor) -> Tensor:
    """Return an upper bound of |f(z) - k_i|, with `distance` the larger of |z - k_i| and |k_i* - k_i|: theorem 5."""
    return 2 * (count - 1) * length * (-beta * (separation - 2 * length * distance)).exp()


def contraction_bound(beta: Tensor, count: int, length: Tensor, separation: Tensor, distance: Tensor) -> Tensor:
    """Return an upper bound of |f(z) - k_i*| / |z - k_i*|, `distance` as in `step_bound`: theorem 4."""
    return beta * count * length * step_bound(beta, count, length, separation, distance)


def pattern_bound(beta: Tensor, count: int, length: Tensor, separation: Tensor) -> Tensor:
    """Return an upper bound of |k_i* - k_i|, inf where the fixed point may be farther than 1/(2 beta M): theorem 5."""
    bound = 2 * math.e * (count - 1) * length * (-beta * separation).exp()
    return bound.where(bound <= 1 / (2 * beta * length), torch.inf)


def capacity(beta: float, factor: float, dim: int, failure: float) -> tuple[float | None, float]:
    """Return (N, c) of theorem 3: N = sqrt(p) c^((d - 1)/4) random patterns of length K sqrt(d - 1) in d dimensions.

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
    """Draw patterns (sets, N, D) in float64: of equal `length` around one direction, with `spread` the part across it.

    A small `spread` makes neighbours near, as the bounds' worst case asks for.
    """
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(sets, 1, dim, generator=generator, dtype=torch.float64)
    around = torch.randn(sets, count, dim, generator=generator, dtype=torch.float64)
    middle = (1 - spread) * centre / centre.norm(dim=-1, keepdim=True)
    keys = middle + spread * around / around.norm(dim=-1, keepdim=True)
    patterns: Tensor = length * keys / keys.norm(dim=-1, keepdim=True)
    return patterns


def measure_bounds(*, sets: int, seed: int) -> dict[str, Any]:
    """Compare log-sum-exp with its bounds: fixed points and steps near the threshold, and random patterns."""
    return {
        "near_threshold": [ratio_row(ratio, sets=sets, seed=seed) for ratio in RATIOS],
        "capacity": [_stored(*case, sets=20 * sets, seed=seed) for case in THEOREM],
    }


@torch.no_grad()
def ratio_row(ratio: float, *, sets: int, seed: int) -> dict[str, Any]:
    """Measure every length over its bound, for patterns whose separation is `ratio` times the threshold.

    A ratio above 1 is a violation. Fixed points are those that the map reaches from the pattern; steps start on the
    sphere of radius 1/(beta N M) around it.
    """
    fixed, step, contraction, own_error = [], [], [], []
    for index, (count, dim, spread) in enumerate([(2, 3, 1.0), (5, 8, 1.0), (5, 8, 0.3), (20, 10, 1.0)]):
        sphere = random_patterns(sets, count, dim, length=2.0, spread=spread, seed=seed + index)
        betas = at_ratio(sphere, ratio)
        kept = betas.isfinite()
        keys = sphere[:, None].expand(-1, count, -1, -1)[kept]
        own = sphere[kept][:, None]
        beta, length, separation = betas[kept], longest(keys), separations(sphere)[kept]
        potential = LogSumExp(keys, beta)
        z = own
        for _ in range(1000):
            z = potential.mean(z)
        distance = (z - own).norm(dim=-1)[:, 0]
        allowed = 1 / (beta * count * length)
        fixed.append(distance / allowed)
        direction = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed), dtype=own.dtype)
        start = own + allowed[:, None, None] * direction / direction.norm(dim=-1, keepdim=True)
        farthest = torch.maximum((start - own).norm(dim=-1)[:, 0], distance)
        stepped = potential.mean(start)
        step.append((stepped - own).norm(dim=-1)[:, 0] / step_bound(beta, count, length, separation, farthest))
        shrunk = (stepped - z).norm(dim=-1)[:, 0] / (start - z).norm(dim=-1)[:, 0]
        contraction.append(shrunk / contraction_bound(beta, count, length, separation, farthest))
        own_error.append(distance / pattern_bound(beta, count, length, separation))
    row: dict[str, Any] = {"ratio": ratio, "patterns": sum(map(len, fixed))}
    measured = {"fixed_point": fixed, "step": step, "contraction": contraction, "pattern": own_error}
    for name, parts in measured.items():
        ratios = torch.cat(parts)
        violations = int((ratios > 1 + 1e-9).sum())
        row[name] = {"worst": float(ratios.max()), "median": float(ratios.median()), "violations": violations}
    return row


@torch.no_grad()
def _stored(beta: float, factor: float, dim: int, failure: float, *, sets: int, seed: int) -> dict[str, Any]:
    """Measure the share of random sets all of whose patterns are stored: each has a fixed point in its own ball.

    The balls end half-way to the nearest other pattern.
    """
    promised, c = capacity(beta, factor, dim, failure)
    proved = [] if promised is None else [math.floor(promised)]
    counts = sorted({*proved, *(2**power for power in range(1, 11))})
    shares = []
    for count in counts:
        repeats = max(sets * 4 // count, 10)
        keys = random_patterns(repeats, count, dim, length=factor * math.sqrt(dim - 1), spread=1.0, seed=seed)
        z, potential = keys, LogSumExp(keys, beta)
        for _ in range(30):
            z = potential.mean(z)
        gaps = torch.cdist(keys, keys).masked_fill(torch.eye(count, dtype=torch.bool), torch.inf).amin(-1)
        inside = (z - keys).norm(dim=-1) < gaps / 2
        shares.append({"count": count, "sets": repeats, "all_stored": float(inside.all(-1).double().mean())})
    return {"beta": beta, "K": factor, "dim": dim, "p": failure, "promised": promised, "c": c, "shares": shares}
