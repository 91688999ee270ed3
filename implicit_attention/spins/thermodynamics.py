"""Thermodynamics: first and second derivatives of one log-partition function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import along, grad, in_own_precision, vjp
from ..failure import OnFailure
from ..solution import AdjointReport, SolveReport
from ._request import fill, reported, validated, without_nonfinite
from .approximation import Answer, Approximation, Check, FixedPointApproximation, LogPartition, gradient
from .dynamics import DynamicalMethod, no_free_energy
from .system import SpinSystem, kept

#: Number of columns of the susceptibility that are computed at a time.
CHUNK = 64


@dataclasses.dataclass(frozen=True, repr=False)
class Thermodynamics:
    """Thermodynamic quantities of a spin system by one method, one number per sample unless said.

    With F = -log Z/beta, at fixed couplings. Z is relative to the `measure` of the system, by default the uniform one:
    S is then 0 for spins without field and couplings, and below 0 else. Where the states of Ising spins are counted F
    is lower by N log(2)/beta, and S higher by N log 2.

    Attributes:
        free_energy: F, (*batch).
        log_partition: log Z, (*batch).
        internal_energy: U = -d log Z/d beta, (*batch).
        entropy: S = beta (U - F), (*batch).
        heat_capacity: C = beta^2 d^2 log Z/d beta^2, (*batch).
        magnetization: -dF/dh at fixed couplings, (*batch, N, D).
        correlations: <s_i . s_j> as the derivative -2 dF/dJ_ij, of the couplings' shape with the batch.
        report: of the solve behind it.

    Not for synchronous dynamics, which has no free energy: `stationary_state` gives a `StationaryState`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Enumeration, SpinSystem, thermodynamics
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> found = thermodynamics(system, Enumeration())
        >>> found.susceptibility().shape
        torch.Size([2, 1, 2, 1])
        >>> torch.allclose(found.entropy, found.internal_energy - found.free_energy)  # beta = 1
        True
    """

    free_energy: Tensor
    log_partition: Tensor
    internal_energy: Tensor
    entropy: Tensor
    heat_capacity: Tensor
    magnetization: Tensor
    correlations: Tensor
    report: SolveReport
    _product: Callable[[Tensor], Tensor]

    def susceptibility_product(self, v: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """chi v with chi = dm/dh = beta Cov(s, s), without the matrix."""
        _validate.check_float_tensor("v", v, min_ndim=2)
        shape = self.magnetization.shape
        _validate.require(v.shape == shape, "v", f"have the field's shape {tuple(shape)}", tuple(v.shape))
        return self._product(v)

    def susceptibility(self) -> Tensor:
        """chi as a tensor, (*batch, N, D, N, D)."""
        m = self.magnetization
        n, d = m.shape[-2:]
        directions = torch.eye(n * d).to(m).reshape(n * d, *(1,) * (m.ndim - 2), n, d).expand(n * d, *m.shape)
        # chi is symmetric: the response to direction k is row k.
        rows: Tensor = torch.vmap(self._product, out_dims=-3, chunk_size=CHUNK)(directions)
        return rows.unflatten(-3, (n, d))  # type: ignore[no-any-return, no-untyped-call]

    def __repr__(self) -> str:
        numbers = (("F", self.free_energy), ("U", self.internal_energy), ("S", self.entropy), ("C", self.heat_capacity))
        means = ", ".join(f"{name} {float(value.detach().mean()):.6g}" for name, value in numbers)
        return f"Thermodynamics(mean over {self.free_energy.numel()} samples: {means}; {self.report!r})"


@in_own_precision
def thermodynamics(
    system: SpinSystem,
    method: Approximation,
    *,
    initial: Float[Tensor, "*batch N D"] | None = None,
    check: Check = "stability",
    on_failure: OnFailure = "raise",
) -> Thermodynamics:
    """Free energy, energy, entropy, heat capacity, magnetization, correlations and susceptibility, by one solve.

    All are derivatives of the method's own log-partition function at fixed couplings, so that they are consistent with
    each other whatever the method leaves out.

    Args:
        system: the spins.
        method: such as `SaddlePoint()`.
        initial: magnetizations that the solve starts from, (*batch, N, D), to choose one of several branches, such as
            one of `stability`. None is the answer to the bare field. Methods with one answer refuse it.
        check: "stability" gives a solution that is no minimum of the free energy the status UNSTABLE, with a warning.
            That takes longer than most solves. With "none" all that solves the equations is CONVERGED.
        on_failure: for samples whose solve failed: "raise", "warn" or "ignore".

    Raises:
        ConvergenceError: with on_failure="raise". TypeError, ValueError: a system that the method cannot treat.

    Gradients: every output with respect to field, couplings and beta, to second order; none with respect to `initial`.

    Not for one number alone, as it finds second derivatives, too: use `free_energy` or `magnetization`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import AdaTAP, SpinSystem, thermodynamics
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> found = thermodynamics(system, AdaTAP())
        >>> found.magnetization.shape, found.correlations.shape, bool(found.report.converged)
        (torch.Size([2, 1]), torch.Size([2, 2]), True)
    """
    system = validated(system, method, initial, check, on_failure)
    required = "be a tensor for thermodynamics, whose correlations are derivatives with respect to every pair"
    remedy = "use LowRank(...).dense(), or free_energy and magnetization"
    _validate.require(not system.low_rank, "couplings", required, "a LowRank", remedy)
    # J_ij and J_ji are two numbers of a matrix, and one of a bond.
    field = system.field
    twice = field.new_tensor(2.0) if system.graph is None else 1.0 + system.graph.own().to(field.dtype)
    beta = torch.as_tensor(system.beta, dtype=field.dtype, device=field.device).expand(system.batch)
    # Every sample gets its own couplings, so that their derivatives are correlations of that sample.
    couplings = system.couplings.expand(*system.batch, *system.couplings.shape[-system.pair_axes :])
    adjoint = AdjointReport()

    def log_z(field: Tensor, couplings: Tensor, beta: Tensor) -> tuple[Tensor, Any]:
        nonlocal adjoint
        (value, report), lost = _answer(method, system.at(field, couplings, beta), initial, check, on_failure)
        adjoint = report.adjoint
        return value.masked_fill(lost, 0.0).sum(), (value, lost, report.record)

    derivatives = grad(log_z, argnums=(0, 1, 2), has_aux=True)
    (by_field, by_couplings, by_beta), pullback, aux = vjp(derivatives, field, couplings, beta, has_aux=True)
    value, lost, record = aux
    nothing = (torch.zeros_like(by_field), torch.zeros_like(by_couplings))
    curvature = pullback((*nothing, torch.ones_like(by_beta)))[2]

    @in_own_precision
    def product(v: Tensor) -> Tensor:
        return fill(pullback((v, nothing[1], torch.zeros_like(by_beta)))[0] / beta[..., None, None], lost)

    log_partition = value + system.base_measure()
    free = -log_partition / beta
    twice = twice.reshape(*twice.shape, *(1,) * (system.pair_axes - 1))
    numbers = {
        "free_energy": free,
        "log_partition": log_partition,
        "internal_energy": -by_beta,
        "entropy": beta * (-by_beta - free),
        "heat_capacity": beta.square() * curvature,
        "magnetization": by_field / beta[..., None, None],
        "correlations": twice * by_couplings / along(beta, by_couplings),
    }
    # Filled at the end, so that NaN of one sample enters no gradient of a tensor that samples share.
    numbers = {name: fill(number, lost) for name, number in numbers.items()}
    return Thermodynamics(**numbers, report=SolveReport(record, adjoint, method.remedies), _product=product)


@in_own_precision
def free_energy(
    system: SpinSystem,
    method: Approximation,
    *,
    initial: Float[Tensor, "*batch N D"] | None = None,
    check: Check = "none",
    on_failure: OnFailure = "raise",
) -> Float[Tensor, "*batch"]:
    """F = -log Z/beta of every sample, (*batch); see `thermodynamics`.

    Not for entropy or energy as well: `thermodynamics` finds all of them by one solve.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Enumeration, SpinSystem, free_energy
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> round(float(free_energy(system, Enumeration())), 3)
        -0.164
    """
    system = validated(system, method, initial, check, on_failure)
    (value, _), lost = _answer(method, system, initial, check, on_failure)
    return fill(-(value + system.base_measure()) / system.beta_over(0), lost)


@in_own_precision
def magnetization(
    system: SpinSystem,
    method: Approximation,
    *,
    split: bool = False,
    initial: Float[Tensor, "*batch N D"] | None = None,
    check: Check = "none",
    on_failure: OnFailure = "raise",
    return_answer: bool = False,
) -> Any:
    """m = -dF/dh of the method's own F, in total: couplings that are a function of the field answer, too.

    m_i = <s_i> + (1/2) sum_mn <s_m . s_n> dJ_mn/dh_i.

    Args:
        system: the spins.
        method: such as `SaddlePoint()`.
        split: return both terms instead of their sum.
        initial: magnetizations <s_i> that the solve starts from, as in `thermodynamics`.
        check: as in `thermodynamics`; with "none" a solution that is no minimum, such as m = 0, is not reported.
        on_failure: "raise", "warn" or "ignore".
        return_answer: return also the `Answer`: <s_i>, from which the next call may start, with the solve's report.

    Returns:
        (*batch, N, D), or two of them; with `return_answer` this and the `Answer`.

    Gradients: with respect to field, couplings (and the parameters of their function) and beta, to second order; none
    with respect to `initial`.

    Not for entropy or susceptibility as well: `thermodynamics` finds all of them by one solve.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SaddlePoint, SpinSystem, magnetization
        >>> tokens = torch.randn(2, 5, 16)
        >>> system = SpinSystem(lambda h: h @ h.mT / 80, tokens)  # couplings that are a function of the field
        >>> magnetization(system, SaddlePoint()).shape
        torch.Size([2, 5, 16])
    """
    if split and isinstance(method, DynamicalMethod):
        no_free_energy(method)
    wide = validated(system, method, initial, check, on_failure)
    function = None if isinstance(method, DynamicalMethod) else wide.coupling_function
    sound, nonfinite = without_nonfinite(wide, symmetric=method.symmetric)
    found = method.answer(sound, initial=initial, check=check)
    report = reported(method, found.report, nonfinite, check, on_failure)
    direct = fill(found.magnetization, nonfinite)
    through = torch.zeros_like(direct)
    if function is not None:
        by_couplings = _by_couplings(method, sound, nonfinite, found.state).sum_to_size(wide.couplings.shape)
        # The function gets the field in its original precision.
        couplings, pullback = vjp(lambda field: kept(function(field, system.mask)), system.field)
        through = pullback(by_couplings.to(couplings.dtype))[0].to(direct.dtype) / wide.beta_over(2)
    m = (direct, through) if split else direct + through
    return (m, Answer(direct, found.state, report)) if return_answer else m


def _by_couplings(method: Approximation, system: SpinSystem, nonfinite: Tensor, state: Tensor | None) -> Tensor:
    """d log Z/dJ, of the couplings' shape, 0 in samples that are not finite."""

    def log_z(couplings: Tensor) -> Tensor:
        at = system.at(system.field, couplings, system.beta)
        if state is None or not isinstance(method, FixedPointApproximation):
            value = method.log_partition(at).value
        else:
            # log Z is stationary in the state, so that a fixed state changes no first derivative.
            value = method.value(at, state)
        return value.masked_fill(nonfinite | ~value.isfinite(), 0.0)

    return gradient(log_z, system.couplings)


def _answer(
    method: Approximation, system: SpinSystem, initial: Tensor | None, check: Check, on_failure: OnFailure
) -> tuple[LogPartition, Tensor]:
    """The method's log Z and report, and the samples without an answer, (*batch), whose numbers mean nothing."""
    sound, nonfinite = without_nonfinite(system, symmetric=method.symmetric)
    options: Any = {"initial": initial, "check": check} if isinstance(method, FixedPointApproximation) else {}
    value, report = method.log_partition(sound, **options)
    report = reported(method, report, nonfinite, check, on_failure)
    # A method may find no log Z although all numbers are finite: then its derivatives are NaN as well.
    return LogPartition(value, report), nonfinite | ~value.isfinite()
