"""The inverse temperature at which stored patterns recall themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._torch import at_least_single

# The weight with beta="auto" of all other patterns together at a pattern that is closer to its neighbour than nine out
# of ten are.
LEAK = 1e-2
CLOSE = 0.1
# Patterns whose similarities are in memory at a time.
BLOCK = 512
# Distances |k - k'|^2/2 below this times eps |k|^2 are rounding (8 at most was measured).
ROUNDING = 16.0


def separating_beta(patterns: Tensor, similarity: str) -> Tensor:
    """The inverse temperature at which stored patterns recall themselves."""
    # All copies of a pattern are one attractor.
    distinct: Tensor = at_least_single(patterns).unique(dim=0)
    gaps = torch.cat([_gaps(distinct, part, similarity) for part in torch.split(torch.arange(len(distinct)), BLOCK)])
    gaps = gaps[gaps.isfinite()]
    if gaps.numel() == 0:
        return distinct.new_ones(())
    # Not torch.quantile, which takes no more than 16 million numbers.
    close = gaps.sort().values[int(CLOSE * (len(gaps) - 1))]
    return math.log(len(distinct) / LEAK) / close


def _gaps(patterns: Tensor, rows: Tensor, similarity: str) -> Tensor:
    """The leads of the patterns `rows` over their best rivals in their own scores, of those that lead."""
    rows = rows.to(patterns.device)
    # Around the centre distances lose less in rounding.
    points = patterns - patterns.mean(0) if similarity == "distance" else patterns
    own = points[rows]
    squares = own.square().sum(-1)
    distances = torch.cdist(own, points).square() / 2
    rivals = -distances if similarity == "distance" else own @ points.mT - squares[:, None]
    # Rounding of a solve's scores, and of distances; patterns that are closer than this are one.
    lost = torch.finfo(points.dtype).eps * (patterns[rows].square().sum(-1) + ROUNDING * squares)
    rivals = rivals.masked_fill(distances <= lost[:, None], -torch.inf).scatter(-1, rows[:, None], -torch.inf)
    gaps = -rivals.amax(-1)
    return gaps[gaps > lost]
