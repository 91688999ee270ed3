"""The Legendre transform of a convex potential: from a mean back to its natural parameter, by `solve`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._solve import solve
from .._torch import in_own_precision, transforms_active
from ..energies import Energy
from ..failure import ConvergenceError
from ..problem import widened
from ..solvers import NewtonKrylov, Solver
from ._read import joined
from .base import Potential
from .entmax import Entmax
from .log_sum_exp import LogSumExp


@in_own_precision
def natural_parameter(
    potential: Potential, m: Float[Tensor, "*batch N D"], *, solver: Solver | None = None
) -> Float[Tensor, "*batch N D"]:
    """The eta with mean(eta) = m, the inverse of grad Phi: the minimum of Phi(eta) - <m, eta>.

    Args:
        potential: convex, of rows (event_ndim 1), such as `LogSumExp`, `GaussianMixture`, `HiddenUnits`.
        m: means, (*batch, N, D), inside the set of all means (of `LogSumExp` the convex hull of the keys that the row
            attends to).
        solver: default `NewtonKrylov` with rtol 0 and, as |mean(eta) - m|, atol 1e-12 (float64) or 1e-5 in units of m.

    Returns:
        eta, (*batch, N, D). Where it is not unique (keys in a subspace) the one that the solver reaches from 0, which
        lies in the span of the covariance. On the boundary of the hull there is none, but points that come within
        `atol`: one of them is returned, long, and longer for a smaller `atol`.

    Raises:
        ValueError: m outside the hull, with a direction that proves it (`LogSumExp` and `Entmax`); a potential that is
            not convex, or whose rows are coupled; shapes, dtypes or devices that do not fit.
            Inside torch.vmap such rows are NaN.
        ConvergenceError: another m whose residual |mean(eta) - m| stays above the tolerance, such as means that no
            state of another potential has.

    Gradients: with respect to m and the tensors of the potential, to any order, by the implicit function theorem:
    d eta/d m is the inverse Fisher information, which has to exist.

    Not for a value alone: `conjugate` needs no inverse.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import natural_parameter
        >>> keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
        >>> phi, eta = LogSumExp(keys, beta=2.0), torch.tensor([[0.3, -0.1]])
        >>> natural_parameter(phi, phi.mean(eta)).round(decimals=3)
        tensor([[ 0.3000, -0.1000]])
    """
    potential_wide, wide = _checked(potential, m)
    return _inverted(potential_wide, wide, solver).to(m.dtype)


@in_own_precision
def conjugate(
    potential: Potential, m: Float[Tensor, "*batch N D"], *, solver: Solver | None = None
) -> Float[Tensor, "*batch N"]:
    """The convex conjugate Phi*(m) = sup over eta of <m, eta> - Phi(eta).

    It is reached at eta = natural_parameter(potential, m). Of points of weight 1 it is minus the entropy of the most
    even weights with that mean; of `LogSumExp` that, with bias_j subtracted, divided by beta. On the boundary of the
    hull the supremum is finite but not reached: the result is below it by at most |eta| times the tolerance. The
    result is never above Phi*(m) by more than rounding, whatever the solver does.

    Args:
        potential: as in `natural_parameter`.
        m: as in `natural_parameter`.
        solver: as in `natural_parameter`.

    Returns:
        In units of Phi, (*batch, N).

    Raises:
        ValueError, ConvergenceError: as `natural_parameter`; outside the hull Phi* is infinite.

    Gradients: d Phi*/d m = eta, and d Phi*/d t = -d Phi(eta)/d t for every tensor t of the potential (envelope
    theorem), neither of which needs a linear solve; higher orders by the implicit function theorem.

    Not for the divergence of two states: use `bregman`, whose two arguments may be states or, as
    Phi*(m) + Phi(eta) - <m, eta>, one of each.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import conjugate
        >>> corners = LogSumExp(torch.eye(2), beta=1.0)
        >>> conjugate(corners, torch.tensor([[0.5, 0.5]]))  # -log 2
        tensor([-0.6931])
    """
    potential_wide, wide = _checked(potential, m)
    eta = _inverted(potential_wide, wide, solver)
    at = stationary(eta)
    return ((wide * at).sum(-1) - potential_wide.value(at)).to(m.dtype)


class _Stationary(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(state: Tensor) -> Tensor:
        return state.view_as(state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor | None:
        return cotangent - cotangent.detach() if torch.is_grad_enabled() else None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def stationary(state: Tensor) -> Tensor:
    """A state at which a function is stationary, to evaluate it there: its derivative by the state is made exactly 0.

    Derivatives of that derivative stay, so that those of the function with respect to all else are right to any order.
    A rounding error of it would be divided by the curvature, which may be small, or 0 in some directions; and where no
    further derivative is recorded, the state needs no backward pass. Forward mode keeps the rounding error.
    """
    return _Stationary.apply(state)  # type: ignore[no-any-return, no-untyped-call]


class _Matching(Energy):
    """Phi(eta) - <m, eta>, whose gradient is mean(eta) - m."""

    event_ndim = 1

    def __init__(self, potential: Potential, target: Tensor) -> None:
        self.potential = potential
        self.target = target

    @property
    def row_block(self) -> int:  # type: ignore[override]
        return self.potential.row_block

    def energy(self, z: Tensor) -> Tensor:
        return self.potential.value(z) - (self.target * z).sum(-1)

    def gradient(self, z: Tensor) -> Tensor:
        return self.potential.mean(z) - self.target

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self.potential.covariance_product(z, v)


def _checked(potential: Potential, m: Tensor) -> tuple[Potential, Tensor]:
    """Both in the precision of the solve."""
    name = type(potential).__name__
    required = "compute each row by itself (event_ndim 1)"
    _validate.require(potential.event_ndim == 1, "potential", required, f"{name}, event_ndim {potential.event_ndim}")
    remedy = "set `convex = True` in a subclass that is"
    _validate.require(potential.convex, "potential", "be known to be convex", name, remedy)
    _validate.check_instance("potential", potential, Potential)
    potential.check_state("m", m)
    wide, (target,) = widened(potential, m)
    return wide, target


def _inverted(potential: Potential, m: Tensor, solver: Solver | None) -> Tensor:
    if solver is None:
        solver = NewtonKrylov(rtol=0.0, atol=1e-12 if m.dtype == torch.float64 else 1e-5)
    problem, initial = _Matching(potential, m), torch.zeros_like(m)
    try:
        solution = solve(problem, initial, solver=solver)
    except ConvergenceError:
        if transforms_active():
            raise
        # Once more for the message below. Not at first: a backward solve that fails would be ignored, too.
        solution = solve(problem, initial, solver=solver, on_failure="ignore")
    eta = solution.value
    short = (m - potential.mean(eta)).detach()
    # Beside a long eta the solver's f(eta) - eta rounds to 0: outside the hull, where eta runs away.
    failed = solution.failed | ~(short.norm(dim=-1) <= 2 * solution.tolerance)
    if transforms_active():
        return eta.where(~failed[..., None], torch.nan)
    if bool(failed.any()):
        _explain(potential, m.detach(), eta.detach(), short, failed)
    return eta


def _explain(potential: Potential, m: Tensor, eta: Tensor, short: Tensor, failed: Tensor) -> None:
    """Raise the error of problems without answer: a certain one where a direction separates m from all keys."""
    remedy = "pass a convex combination of the keys that the row attends to, such as a mean of the potential"
    if type(potential) in (LogSumExp, Entmax):
        assert isinstance(potential, LogSumExp | Entmax)
        keys = potential.keys.detach()
        sizes = m.norm(dim=-1) + keys.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).max()
        rounding = 8 * m.shape[-1] * torch.finfo(m.dtype).eps * sizes
        masked = potential.masked_for(m.shape[-2])
        attended = joined(masked.mask, masked.bias)[1]
        for direction in (torch.nn.functional.normalize(d, dim=-1) for d in (eta, short)):
            along = direction @ keys.mT
            if attended is not None:
                # A row without keys has the mean 0.
                along = along.where(attended, -torch.inf).where(attended.any(-1, keepdim=True), 0.0)
            beyond = (m * direction).sum(-1) - along.amax(-1)
            outside = failed & (beyond > rounding)
            if bool(outside.any()):
                where = tuple(outside.nonzero()[0].tolist())
                towards = [round(u, 4) for u in direction[where].tolist()]
                received = f"a row {where} that lies {beyond[where].item():.3g} beyond them all along {towards}"
                raise ValueError(_validate.message("m", "lie in the convex hull of the keys", received, remedy))
    where = tuple(failed.nonzero()[0].tolist())
    gap, length = short[where].norm().item(), eta[where].norm().item()
    raise ConvergenceError(
        f"no natural parameter was found for {int(failed.sum())} of {failed.numel()} means, first for row {where}, "
        f"where mean(eta) stays {gap:.3g} away from `m` at |eta| = {length:.3g}; pass means inside the set of all "
        "means of the potential, or a solver with a larger atol or max_steps"
    )
