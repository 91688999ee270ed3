"""The adjoint solve of every query, by the native library."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...solution import UNSURE
from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule
from ..trust import empty
from .library import library
from .operands import Operands


def adjoints(
    problem: Hopfield,
    state: Tensor,
    mean: Tensor,
    cotangent: Tensor,
    rule: AdjointRule,
    *,
    evidence: bool = True,
    by_bias: Tensor | None = None,
    moved: Tensor | None = None,
    least: float = 0.0,
) -> tuple[AdjointAnswer, int, Tensor | None, int]:
    """Solve A u = cotangent at every state, where the mean of the keys is `mean`, all (*batch, N, D).

    A query that stalled, at a saddle above all, has the status STALLED and adds nothing to the gradients. Without
    `evidence` its fields are None.

    by_bias: zeros (*batch, M), contiguous, to which the gradient of a bias of every key is added.
    moved: the residuals of the states, (*batch, N), contiguous, from which the error of the gradient is estimated, for
        states that count as no smaller than `least`.

    Returns:
        The answer, how many failed, the estimates (*batch, N), and how many of these are large or uncertain.
    """
    _, keys, beta, anchor, mask, first = problem
    loaded = library()
    assert loaded is not None
    operands = Operands(cotangent, keys, beta, anchor, mask, first, state, mean)
    shape, dtype, device = cotangent.shape, cotangent.dtype, cotangent.device
    rows = shape[:-1]
    value, by_beta = empty(shape, dtype=dtype, device=device), empty(rows, dtype=dtype, device=device)
    by_keys = empty(keys.shape, dtype=dtype, device=device)
    residual = tolerance = status = steps = negative = error = None
    if evidence:
        residual, tolerance, error = empty((3, *rows), dtype=dtype, device=device).unbind()
        error = None if moved is None else error
        status = empty(rows, dtype=torch.int8, device=device)
        steps = empty(rows, dtype=torch.int32, device=device)
        negative = empty(rows, dtype=torch.bool, device=device)
    wanted = (value, by_beta, by_keys, by_bias, residual, tolerance, status, steps, negative, moved, error)
    numbers = [rule.rtol, rule.max_steps, math.sqrt(max(shape[-1], 1)), least, UNSURE]
    outputs = [0 if t is None else t.data_ptr() for t in wanted]
    counts = operands.call(loaded.adjoint, dtype.itemsize, numbers, outputs, loaded.parallel_for)
    found: Any = (value, status, residual, tolerance, steps, negative, by_beta, by_keys)
    return AdjointAnswer._make(found), counts & 0xFFFFFFFF, error, counts >> 32


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
    return adjoints(problem, state, mean, cotangent, rule, by_bias=by_bias)[0]
