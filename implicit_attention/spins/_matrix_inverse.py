"""The inverse and the log-determinant of symmetric matrices, with derivatives of any order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _matrices
from .._autograd import host_may_look


class _Inverse(torch.autograd.Function):
    """(A, own) -> (A^{-1}, log det A, whether A is positive definite) by one Cholesky factorization.

    The derivatives are products with A^{-1}, and so can be taken any number of times, in reverse mode.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return _inverse(a, own)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, by_inverse: Tensor, by_logdet: Tensor, _: Any) -> tuple[Tensor, None]:
        x: Tensor = ctx.saved_tensors[0]
        return by_logdet[..., None, None] * x - x @ by_inverse @ x, None


def _inverse(a: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(a)
    positive = info == 0
    # cholesky_inverse raises for the whole batch if one factor is unfinished and has a zero on its diagonal.
    if not (host_may_look(positive) and bool(positive.all())):
        factor = torch.where(positive[..., None, None], factor, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))
    # Torch's forward-mode derivative of cholesky_inverse is wrong. LAPACK's columns are taken as rows of a symmetric
    # matrix: passes over it and over products are faster in one order.
    inverse = _matrices.inverse(a) if forward_mode() else torch.cholesky_inverse(factor).mT
    logs = 2 * factor.diagonal(dim1=-2, dim2=-1).log()
    if own is not None:
        # The squares of the factor's diagonal, less 1.
        pivots = own - factor.tril(-1).square().sum(-1)
        logs = torch.where(pivots > -0.5, pivots.log1p(), logs)
    return inverse, logs.sum(-1).masked_fill(~positive, torch.nan), positive


def inverse_and_logdet(a: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(A^{-1}, log det A, whether A > 0) of symmetric A, (*batch, n, n).

    With `own`, the diagonal of A less 1, (*batch, n), log det A keeps its digits where A is near 1. Where A is not
    positive log det A is NaN, and A^{-1} means nothing.

    Gradients: of the first two with respect to A, to any order.
    """
    # An autograd.Function does not see tangents of an outer forward mode.
    if forward_mode() or not a.requires_grad:
        return _inverse(a, own)
    inverse, logdet, positive = _Inverse.apply(a, own)  # type: ignore[no-untyped-call]
    return inverse, logdet, positive


def forward_mode() -> bool:
    """Whether forward mode is active."""
    return forward_ad._current_level >= 0
