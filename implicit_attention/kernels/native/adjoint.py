"""The adjoint solve of every query, by the native library."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ...solution import UNSURE
from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule
from ..trust import empty, empty_like
from .library import library
from .operands import Operands, in_memory
from .solve import Evidence


class Adjoints(NamedTuple):
    """The solutions u of adjoint systems, (*batch, N, D), their parts of the gradients, and the evidence.

    failed: how many queries failed.
    doubtful: how many estimates of the error of a gradient, which the third number of the evidence holds, are large or
        uncertain; 0 where none was asked for.
    """

    value: Tensor
    by_beta: Tensor
    by_keys: Tensor
    evidence: Evidence
    failed: int
    doubtful: int

    @property
    def answer(self) -> AdjointAnswer:
        """Return the answer in the form that all implementations share."""
        own = self.evidence
        evidence = (own.status, own.number(0), own.number(1), own.steps, own.flags)
        return AdjointAnswer(self.value, *evidence, self.by_beta, self.by_keys)


def adjoints(
    problem: Hopfield,
    state: Tensor,
    mean: Tensor,
    cotangent: Tensor,
    rule: AdjointRule,
    *,
    by_bias: Tensor | None = None,
    moved: int = 0,
    least: float = 0.0,
) -> Adjoints:
    """Solve A u = cotangent at every state, where the mean of the keys is `mean`, all (*batch, N, D) and `in_memory`.

    A query that stalled, at a saddle above all, has the status STALLED and adds nothing to the gradients.

    by_bias: zeros (*batch, M), contiguous, to which the gradient of a bias of every key is added.
    moved: the address of the residuals of the states, (*batch, N), from which the error of the gradient is estimated,
        for states that count as no smaller than `least`; 0 for no estimate.
    """
    _, keys, beta, anchor, mask, first = problem
    loaded = library()
    assert loaded is not None
    operands = Operands(cotangent, keys, beta, anchor, mask, first, state, mean)
    shape, dtype, device = cotangent.shape, cotangent.dtype, cotangent.device
    rows = shape[:-1]
    value, by_beta, by_keys = empty_like(cotangent), empty(rows, dtype=dtype, device=device), empty_like(keys)
    evidence = Evidence(rows, dtype, device, flags=True)
    residual, tolerance, error, status, steps, negative = evidence.addresses()
    numbers = [rule.rtol, rule.max_steps, math.sqrt(max(shape[-1], 1)), least, UNSURE]
    outputs = [value.data_ptr(), by_beta.data_ptr(), by_keys.data_ptr(), 0 if by_bias is None else by_bias.data_ptr()]
    outputs += (residual, tolerance, status, steps, negative, moved, error if moved else 0)
    counts = operands.call(loaded.adjoint, dtype.itemsize, numbers, outputs, loaded.parallel_for)
    return Adjoints(value, by_beta, by_keys, evidence, counts & 0xFFFFFFFF, counts >> 32)


def solve_adjoint(
    problem: Hopfield,
    state: Tensor,
    cotangent: Tensor,
    mean: Tensor,
    rule: AdjointRule,
    *,
    by_bias: Tensor | None = None,
) -> AdjointAnswer:
    """Solve the adjoint systems of a problem whose tensors are all of one dtype."""
    problem = Hopfield._make(map(in_memory, problem))
    state, mean, cotangent = map(in_memory, (state, mean, cotangent))
    return adjoints(problem, state, mean, cotangent, rule, by_bias=by_bias).answer
