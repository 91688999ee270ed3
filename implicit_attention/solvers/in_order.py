"""Problems whose tokens read no later ones: the loop stops each token on its own."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from .._torch import norm
from ..problem import Problem, TokenOrder
from ..solution import Record, Status, Trace


class Tokens(Problem):
    """A problem with a `token_order`, each of whose tokens is a problem that reads those before it.

    A token has converged when its own residual is small at states of those before it that no longer change.
    """

    event_ndim = 1
    separates = False
    #: Which of them other rules have ended than that of their residual.
    exits: Any = None

    def __init__(self, inner: Problem) -> None:
        assert inner.token_order is not None
        self.inner, self.mixes = inner, inner.mixes
        self.token_order: TokenOrder = inner.token_order

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.inner.fixed_point_map(z)

    def check_undeclared(self, z: Tensor) -> None:
        self.inner.check_undeclared(z)

    def settled_of(
        self, active: Tensor, converged: Tensor | None, broken: Tensor, point: Any
    ) -> tuple[Bool[Tensor, "*lead"] | None, Bool[Tensor, "*lead"]]:
        """The tokens that have converged, and those that are given up, by the state of all tokens that they read.

        point: the `Iteration`, for subclasses with rules of their own.
        """
        broken = active & self.behind(broken)
        if converged is None:
            return None, broken
        # A token that was given up is not active, nor is any token that reads it.
        return converged & ~self.behind(active & ~converged), broken

    def behind(self, tokens: Tensor) -> Tensor:
        # In a problem with more axes a token may read all parts of the tokens before it.
        parts = tuple(range(1 - self.inner.event_ndim, -1))
        return self.token_order.behind(tokens.any(parts, keepdim=True) if parts else tokens)

    def course(self, trace: Trace | None) -> Trace | None:
        """The course of the whole problems, from that of all tokens."""
        if trace is None:
            return None
        start = 1 - self.inner.event_ndim
        residual, num_evals = norm(trace.residual.flatten(start)), trace.num_evals.flatten(start).amax(-1)
        return trace._replace(residual=residual, num_evals=num_evals)


def of_problems(record: Record, axes: int) -> Record:
    """The record of whole problems from that of their tokens, on the last `axes` axes.

    Its status is the first failure of a token, its residual and tolerance the length of all.
    """
    start = record.status.ndim - axes
    if record.status.shape[start:].numel() == 0:
        return record.map(lambda field: field.new_zeros(field.shape[:start]))
    first = (record.status != Status.CONVERGED).flatten(start).to(torch.int8).argmax(-1, keepdim=True)
    return Record(
        status=record.status.flatten(start).gather(-1, first)[..., 0],
        residual=norm(record.residual.flatten(start)),
        tolerance=norm(record.tolerance.flatten(start)),
        num_steps=record.num_steps.flatten(start).amax(-1),
        num_evals=record.num_evals.flatten(start).amax(-1),
    )
