"""The adjoint solve of every query, by the native library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule
from ..trust import empty
from .library import library
from .operands import Operands


class Adjoints(NamedTuple):
    """The fields of `ops.AdjointAnswer`, and how many solves failed; what nobody asked for is None.

    A query that stalled, at a saddle above all, has the status STALLED and adds nothing to the gradients.
    """

    value: Tensor
    by_beta: Tensor
    by_keys: Tensor
    status: Tensor | None
    residual: Tensor | None
    tolerance: Tensor | None
    num_steps: Tensor | None
    negative_curvature: Tensor | None
    failed: int

    @property
    def whole(self) -> AdjointAnswer:
        """The same where all evidence was asked for."""
        evidence: Any = (self.status, self.residual, self.tolerance, self.num_steps, self.negative_curvature)
        return AdjointAnswer._make((self.value, *evidence, self.by_beta, self.by_keys))


def adjoints(
    keys: Tensor,
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None,
    first: int | None,
    state: Tensor,
    mean: Tensor,
    cotangent: Tensor,
    rule: AdjointRule,
    *,
    evidence: bool = True,
    by_bias: Tensor | None = None,
) -> Adjoints:
    """Solve A u = cotangent at every state, where the mean of the keys is `mean`, all (*batch, N, D).

    by_bias: zeros (*batch, M), contiguous, to which the gradient of a bias of every key is added.
    """
    loaded = library()
    assert loaded is not None
    operands = Operands(cotangent, keys, beta, anchor, mask, first, state, mean)
    shape, dtype, device = cotangent.shape, cotangent.dtype, cotangent.device
    rows = shape[:-1]
    value, by_beta = empty(shape, dtype=dtype, device=device), empty(rows, dtype=dtype, device=device)
    by_keys = empty(keys.shape, dtype=dtype, device=device)
    residual = tolerance = status = steps = negative = None
    if evidence:
        residual, tolerance = empty((2, *rows), dtype=dtype, device=device).unbind()
        kinds = (torch.int8, torch.int32, torch.bool)
        status, steps, negative = (empty(rows, dtype=kind, device=device) for kind in kinds)
    wanted = (value, by_beta, by_keys, by_bias, residual, tolerance, status, steps, negative)
    numbers = [rule.rtol, rule.max_steps]
    failed = operands.call(loaded.adjoint, dtype.itemsize, numbers, wanted, loaded.parallel_for)
    return Adjoints(value, by_beta, by_keys, status, residual, tolerance, steps, negative, failed)


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
    _, keys, beta, anchor, mask, first = problem
    beta, anchor = beta.squeeze((-2, -1)), anchor.squeeze((-2, -1))
    return adjoints(keys, beta, anchor, mask, first, state, mean, cotangent, rule, by_bias=by_bias).whole
