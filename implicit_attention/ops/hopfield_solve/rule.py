"""When a query is done and what it tries next: what every implementation obeys, the solvers' `Anderson(history=1)`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule

# As in `solvers/safeguard.py`, where each is explained.
DESCENT = 0.25
ENERGY_SLACK = 4.0
STRETCH = 4.0
SLOPE = 0.5
LONGEST = 30.0


class Solved(NamedTuple):
    """Where every query ended, with what was measured at that very state.

    state z and mean = softmax(beta K z) K: (*batch, N, D). The others are (*batch, N): logsumexp of the scaled scores,
    codes of `Status` (int8), residual |f(z) - z|, the tolerance it had to reach, updates and evaluations of f (int32).
    """

    state: Tensor
    mean: Tensor
    logsumexp: Tensor
    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    num_evals: Tensor


def nothing(initial: Tensor) -> Solved:
    """The answer where there is nothing to solve."""
    row = initial.new_zeros(initial.shape[:-1])
    codes, counts = row.to(torch.int8), row.to(torch.int32)
    vectors = (torch.zeros_like(initial), torch.zeros_like(initial))
    return Solved(*vectors, row, codes, row.clone(), row.clone(), counts, counts.clone())


__all__ = ["DESCENT", "ENERGY_SLACK", "LONGEST", "SLOPE", "STRETCH", "FusedRule", "Solved", "nothing"]
