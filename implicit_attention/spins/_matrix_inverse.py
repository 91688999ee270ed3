"""The inverse and the log-determinant of symmetric matrices, with derivatives of any order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch import host_may_look, transforms_active
from ..linear import _matrices


class _Inverse(torch.autograd.Function):
    """(A, A^{-1}, log det A) -> the last two, as functions of A.

    The derivatives are products with A^{-1}, and so can be taken any number of times, in reverse mode.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, inverse: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        # Inside torch.vmap A may be many where what is known of it is the same for all.
        zero = torch.zeros_like(a[..., :1, :1]).sum((-2, -1))
        return inverse + zero[..., None, None], logdet + zero

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, by_inverse: Tensor | None, by_logdet: Tensor | None) -> tuple[Tensor | None, None, None]:
        x: Tensor = ctx.saved_tensors[0]
        by_a = None if by_inverse is None else -(x @ by_inverse @ x)
        if by_logdet is not None:
            share = by_logdet[..., None, None] * x
            by_a = share if by_a is None else by_a + share
        return by_a, None, None


#: A^{-1}, log det A, and whether A is positive definite.
Known = tuple[Tensor, Tensor, Tensor]


def _inverse(a: Tensor, own: Tensor | None) -> Known:
    factor, info = torch.linalg.cholesky_ex(a)
    # Infinite numbers may have a factor.
    positive = (info == 0) & factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    # cholesky_inverse raises for the whole batch if one factor is unfinished and has a zero on its diagonal.
    if not (host_may_look(positive) and bool(positive.all())):
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        a, factor = (torch.where(positive[..., None, None], x, eye) for x in (a, factor))
    # Torch's forward-mode derivative of cholesky_inverse is wrong. LAPACK's columns are taken as rows of a symmetric
    # matrix: passes over it and over products are faster in one order.
    inverse = _matrices.inverse(a) if forward_mode() else torch.cholesky_inverse(factor).mT
    logs = 2 * factor.diagonal(dim1=-2, dim2=-1).log()
    if own is not None:
        # The squares of the factor's diagonal, less 1.
        pivots = own - factor.tril(-1).square().sum(-1)
        logs = torch.where(pivots > -0.5, pivots.log1p(), logs)
    return inverse, logs.sum(-1).masked_fill(~positive, torch.nan), positive


def inverse_and_logdet(a: Tensor, own: Tensor | None = None, known: Known | None = None) -> Known:
    """(A^{-1}, log det A, whether A > 0) of symmetric A, (*batch, n, n), by one Cholesky factorization.

    With `own`, the diagonal of A less 1, (*batch, n), log det A keeps its digits where A is near 1. Where A is not
    positive log det A is NaN, and A^{-1} stands for 1. `known` are the three numbers, where a call has found them.

    Gradients: of the first two with respect to A, to any order.
    """
    # An autograd.Function does not see tangents of an outer forward mode.
    if forward_mode():
        return _inverse(a, own)
    inverse, logdet, positive = _inverse(a.detach(), None if own is None else own.detach()) if known is None else known
    # Inside torch.func an outer transform may differentiate by it, though this one does not.
    if a.requires_grad or transforms_active():
        inverse, logdet = _Inverse.apply(a, inverse, logdet)  # type: ignore[no-untyped-call]
    return inverse, logdet, positive


def forward_mode() -> bool:
    """Whether forward mode is active."""
    return forward_ad._current_level >= 0
