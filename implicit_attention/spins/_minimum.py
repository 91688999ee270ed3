"""The minimum of phi as a function of couplings and field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _matrices
from ._matrix_inverse import forward_mode
from ._multipliers import Multipliers


class Minimum:
    """phi at its minimum, and the multipliers and the Hessian there, as functions of couplings and field.

    Derivatives in reverse mode are closed forms and right to any order. phi does not change with
    its multipliers to first order, so that theirs are computed for its second derivative only. In forward
    mode t is made a function by Newton steps: five derivatives of phi and four of the others are right.

    Args:
        problem: the function phi.
        t: its solution, (*batch, G).
        converged: where it is one, (*batch). Elsewhere t is a constant.
    """

    def __init__(self, problem: Multipliers, t: Tensor, converged: Tensor) -> None:
        self.problem, self.t, self.converged = problem, t, converged
        constant = problem._replace(couplings=problem.couplings.detach(), field=problem.field.detach())
        self._constant = None if forward_mode() else constant.moments(t, precise=True)
        own = (t, t, t) if self._constant is None else (t, *self._constant[:2])
        #: The inputs of the derivatives in reverse mode.
        self._arguments = (problem.couplings, problem.field, *own, converged, problem.live, problem.tie)

    def value(self) -> Tensor:
        """phi, (*batch)."""
        if self._constant is None:
            return self.problem.moments(self._attached(steps=2), precise=True).value
        return _Value.apply(self._constant.value, *self._arguments)  # type: ignore[no-any-return, no-untyped-call]

    def multipliers(self) -> Tensor:
        """t, (*batch, G)."""
        return self._attached(steps=4) if self._constant is None else self._response()[0]

    def mean(self) -> Tensor:
        """m = A^{-1} g, (*batch, n, k)."""
        return self._moments()[1]

    def hessian(self) -> Tensor:
        """Second derivatives of phi by t, (*batch, G, G)."""
        return self.problem.hessian(*self._moments())

    def _moments(self) -> tuple[Tensor, Tensor]:
        if self._constant is None:
            moments = self.problem.moments(self._attached(steps=4))
            return moments.covariance, moments.mean
        return self._response()[1:]

    def _response(self) -> tuple[Tensor, Tensor, Tensor]:
        return _Response.apply(*self._arguments)  # type: ignore[no-any-return, no-untyped-call]

    def _attached(self, *, steps: int) -> Tensor:
        """Each step t + H^{-1} (-grad phi(t)), with a fixed Hessian H, makes one more derivative of t right, and
        for a solution changes t by no more than its error; k right derivatives of t make 2 k + 1 of phi right."""
        problem, t, factor = self.problem, self.t, None
        for _ in range(steps):
            moments = problem.moments(t)
            if factor is None:
                factor = torch.linalg.cholesky_ex(problem.hessian(*moments[:2]).detach()).L
            force = problem.excess(moments) * problem.group_size / 2
            change = torch.cholesky_solve(force[..., None], factor).squeeze(-1)
            t = t + torch.where(self.converged[..., None], change, 0.0)
        return t


class _Value(torch.autograd.Function):
    """phi, whose derivative by couplings is (X + m m^T)/2 and by field m."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, *_: Any) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.tie = inputs[-1]
        ctx.save_for_backward(*inputs[1:-1])

    @staticmethod
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor | None, ...]:
        x, m = ctx.saved_tensors[3:5]
        if torch.is_grad_enabled():
            _, x, m = _Response.apply(*ctx.saved_tensors, ctx.tie)  # type: ignore[no-untyped-call]
        by_value = by_value[..., None, None]
        return None, by_value / 2 * (m @ m.mT).add_(x), by_value * m, *(None,) * 6


class _Response(torch.autograd.Function):
    """the known t, X = A^{-1} and m = X g as functions of couplings and field.

    A change dJ, dg changes them, with dA = diag(dt) - dJ, by dX = -X dA X and dm = X (dg - dA m), and t so that no
    length changes: H dt = 1/2 d(excess) at fixed t. Couplings stay symmetric: of their gradient that part counts.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        couplings: Tensor,
        field: Tensor,
        t: Tensor,
        x: Tensor,
        m: Tensor,
        converged: Tensor,
        live: Tensor | None,
        tie: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return t.clone(), x.clone(), m.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.tie = inputs[-1]
        ctx.save_for_backward(*output[1:], *inputs[5:7])

    @staticmethod
    def backward(ctx: Any, by_t: Tensor, by_x: Tensor, by_m: Tensor) -> tuple[Tensor | None, ...]:
        x, m, converged, live = ctx.saved_tensors
        # Used only for its sums over groups of rows.
        groups = Multipliers(x, m, ctx.tie, live)
        turned = x @ by_x
        by_t = by_t - groups.pool((turned * x).sum(-1) + ((x @ by_m) * m).sum(-1))
        rows = groups.rows(_solved(groups.hessian(x, m), by_t, converged))
        by_field = x @ (by_m + rows[..., None] * m)
        by_couplings = (turned + x * (rows[..., None, :] / 2)) @ x + by_field @ m.mT
        return by_couplings, by_field, *(None,) * 6


def _solved(hessian: Tensor, vector: Tensor, converged: Tensor) -> Tensor:
    """H^{-1} v, or 0 where t is a constant."""
    eye = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    safe = torch.where(converged[..., None, None], hessian, eye)
    solution = _matrices.solve(safe, vector[..., None]).squeeze(-1)
    return torch.where(converged[..., None], solution, 0.0)
