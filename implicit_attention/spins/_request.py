"""The frame that all functions of methods share: arguments, samples that are not finite, the report of the solve."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from .. import _validate
from .._torch import along, backward_running, host_may_look, is_batched, readable
from ..failure import OnFailure, check_on_failure, located, policy_of, report_failures, warn_at
from ..problem import widened
from ..solution import Record, SolveReport, Status
from .approximation import Approximation, Check
from .methods import listed
from .system import SpinSystem


def validated(
    system: SpinSystem,
    method: Approximation,
    initial: Tensor | None,
    check: Check,
    on_failure: OnFailure,
    kind: type[Approximation] = Approximation,
) -> SpinSystem:
    """The system in the precision of solves; raises where an argument is wrong, or the method cannot treat it."""
    _validate.check_instance("system", system, SpinSystem, "be a SpinSystem")
    if not isinstance(method, kind):
        remedy = f"use {listed(lambda other: issubclass(other, kind), '()')}"
        _validate.check_instance("method", method, kind, f"be an instance of {kind.__name__}", remedy)
    check_on_failure("on_failure", on_failure, policies=False)
    _validate.check_choice("check", check, ("none", "stability"))
    method.check(system)
    if initial is not None:
        method.check_initial(system, initial)
    return widened(system)[0]


def reported(
    method: Approximation, report: SolveReport, nonfinite: Tensor, check: Check, on_failure: OnFailure
) -> SolveReport:
    """The report of a solve, in which replaced samples are NONFINITE, after failures were raised or warned of."""
    # A later backward pass reports its failures in the same way.
    on_failure, site = located(on_failure)
    report.adjoint.on_failure, report.adjoint.site, report.adjoint.lead = on_failure, site, nonfinite.shape
    report = SolveReport(report.record.nonfinite_at(nonfinite), report.adjoint, method.remedies)
    name = type(method).__name__
    # Checkpointing computes a pass again whose failures were reported before.
    if not backward_running():
        report_failures(on_failure, name, report.record, method.remedies, site=site)
        # Unstable solutions solve the equations, but small deviations from them grow.
        unstable = report.status == Status.UNSTABLE
        looks = check == "stability" and policy_of(on_failure).over != "ignore" and not is_batched(unstable)
        if looks and (count := int(unstable.sum())):
            message = (
                f"{name} ended on an unstable solution (status UNSTABLE) for {count} of {unstable.numel()} problems: "
                "a small field, or another solver, may lead to a stable one"
            )
            warn_at(site, "forward", int(Status.UNSTABLE), message)
    return report


def closed_form(value: Tensor, residual: Tensor | None = None, tolerance: Tensor | None = None) -> SolveReport:
    """The report of values (*batch) that needed no iteration; MAX_STEPS where a residual exceeds its tolerance."""
    record, zero = Record.unmeasured(value, Status.CONVERGED), torch.zeros_like(value.detach())
    residual, tolerance = (zero if number is None else number for number in (residual, tolerance))
    status = record.status.masked_fill(~(residual <= tolerance), int(Status.MAX_STEPS))
    status = status.masked_fill(~value.isfinite(), int(Status.NONFINITE))
    return SolveReport(record._replace(status=status, residual=residual, tolerance=tolerance))


def without_nonfinite(system: SpinSystem, *, symmetric: bool = False) -> tuple[SpinSystem, Bool[Tensor, "*batch"]]:
    """Replace samples that cannot be solved by spins without field or couplings, and say which these are.

    Such a sample has a number that is not finite, or fields so strong that the square of the field at a site is not
    finite. In derivatives by tensors that samples share, its 0 * NaN would spoil the others. The caller makes its
    answers NaN at the end. With `symmetric`, a sample with asymmetric couplings is replaced as well; wherever the host
    can look, `Approximation.check` has refused it already.
    """
    field, couplings, beta = system.field, system.couplings, system.beta_over(0)
    with torch.no_grad():
        sites, strongest = nonfinite_sites(system)
        lost = sites.any(-1)
        if symmetric and readable(lost) is None:
            lost = lost | system.asymmetric()
        if host_may_look(lost) and not lost.any():
            sound = system.at(field, couplings, system.beta)
            sound.row_sums = None if system.low_rank or system.graph or system.block else strongest
            return sound, lost
    own = couplings.shape[-system.pair_axes :]
    if couplings.ndim > len(own):
        couplings = fill(couplings.expand(*lost.shape, *own), lost, 0.0)
    else:
        # Shared couplings belong to samples with different masks: entries at missing sites may be anything.
        couplings = couplings.masked_fill(~couplings.isfinite(), 0.0)
    if isinstance(beta, Tensor):
        beta = beta.expand(lost.shape).masked_fill(lost, 1.0)
    return system.at(fill(field, lost, 0.0), couplings, beta), lost


@torch.no_grad()
def nonfinite_sites(system: SpinSystem) -> tuple[Bool[Tensor, "*batch N"], Tensor]:
    """The sites that make a sample unsolvable, and sum_j |J_ij|, (*#batch, N)."""
    if system.low_rank:
        sizes = torch.linalg.vector_norm(system.live_factors, dim=-1)
        strongest = sizes * sizes.sum(-1, keepdim=True)
    elif system.graph is not None:
        sizes = system.live_numbers.abs()
        strongest = system.graph.sums_of(sizes.sum((-1, -2)) if system.block else sizes)
    else:
        couplings, axes = system.live_couplings, (-3, -2, -1) if system.block else (-1,)
        if host_may_look(couplings) and couplings.numel() and bool(couplings.amin() >= 0):
            # Two such passes take a quarter of the time of one that takes sizes.
            strongest = couplings.sum(axes)
        else:
            strongest = torch.linalg.vector_norm(couplings, ord=1, dim=axes)
    reach = system.live_field.norm(dim=-1) + system.radius * strongest
    return ~(system.beta_over(1) * system.radius * reach).square().isfinite(), strongest


def fill(x: Tensor, samples: Tensor, value: float = torch.nan) -> Tensor:
    """x with `value` in some samples."""
    return x.masked_fill(along(samples, x), value)
