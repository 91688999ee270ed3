"""Steepest descent over the multipliers of the spins' lengths: exact for spins of many dimensions."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from .. import _validate
from ..potentials import SaddlePointResponse, SphericalLaw
from ..potentials.legendre import stationary
from ..solution import Remedies, SolveReport, Status
from ._matrix_inverse import inverse_and_logdet
from ._multipliers import Multipliers, minimise
from .approximation import Answer, Approximation, Check, LogPartition
from .system import SpinSystem, wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaddlePoint(Approximation):
    r"""log Z to leading order in large D, or, with `one_loop`, to the next: errors of 1/D and 1/D^2 in log Z/D.

    The constraint |s_i| = R becomes <|s_i|^2> = R^2, with a multiplier lambda_i for every site, and spins Gaussian:

    ```math
    \frac{\log Z}D = \underset{\lambda}{\min} \left[ \tfrac12 \sum_i (\lambda_i - 1) - \tfrac12 \log \det A
    + \tfrac{b^2}2 \operatorname{Tr} g^\top A^{-1} g \right], \qquad
    A = \operatorname{diag}(\lambda) - b J > 0, \quad b = \frac{\beta R^2}D, \quad g = \frac hR
    ```

    This is a strictly convex problem: there is one answer, which damped Newton steps find from any start. It is zero
    for free spins. m = R b A^{-1} g, and <s_i . s_j> = R^2 (A^{-1} + m m^T/R^2)_ij. One loop adds -1/2 log det 2 Hess,
    where Hess = 1/2 A^{-1} o A^{-1} + A^{-1} o (m m^T)/R^2 is the Hessian in lambda, o the product entry by entry.

    In the cold A is nearly singular, and derivatives of log Z lose 1/A of their digits: float32 is solved in float64,
    where the device has it.

    All couplings go: a number for each pair at a cost of O(N^3) for each step, and a matrix for each pair, where A is
    made of blocks and lambda_i fixes <|s_i|^2> all the same, at O((N D)^3). D = 1 goes, but then 1/D is not small.

    Args:
        shared: one multiplier for all sites of a sample, the spherical model: only sum_i <|s_i|^2> = N R^2.
        one_loop: add the fluctuations of the multipliers.
        rtol: largest error of <|s_i|^2>/R^2, or of its mean if shared; rounding errors are admitted.
            The error of log Z is of second order in it.
        max_steps: largest number of steps tried, shortened ones included.

    Gradients: with respect to field, couplings and beta: exact to any order, in every mode.

    Reference: Berlin and Kac (1952) for the shared multiplier.

    Not for spins of few dimensions, D = 1 above all: use `AdaTAP()`, or one loop where neighbours are few.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SaddlePoint, SpinSystem, free_energy
        >>> couplings = 0.2 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.ones(5, 3, 64), beta=0.8)
        >>> free_energy(system, SaddlePoint(one_loop=True)).shape
        torch.Size([5])
    """

    remedies: ClassVar[Remedies] = {
        **Approximation.remedies,
        Status.MAX_STEPS: "raise max_steps",
        Status.STALLED: "use a larger rtol, or lower beta: at this beta A is nearly singular",
        Status.OUT_OF_RANGE: "A is singular to rounding at this beta: lower it",
    }

    shared: bool = False
    one_loop: bool = False
    rtol: float = 1e-8
    max_steps: int = 200

    def __post_init__(self) -> None:
        _validate.check_instance("shared", self.shared, bool, "be True or False")
        _validate.check_instance("one_loop", self.one_loop, bool, "be True or False")
        _validate.check_number("rtol", self.rtol, low=0.0)
        _validate.check_integer("max_steps", self.max_steps, low=1)

    def site_response(self) -> SphericalLaw:
        return SaddlePointResponse()

    def inverse_variances(self, system: SpinSystem) -> Tensor:
        scale = system.dim / system.radius**2
        return scale * self.multipliers(system).expand(*system.batch, system.num_sites)

    def log_partition(self, system: SpinSystem) -> LogPartition:
        problem, t, copies, report = self._minimum(system)
        moments = problem.moments(t if self.one_loop else stationary(t), precise=True)
        value = copies * moments.value
        if self.one_loop:
            size = torch.as_tensor(problem.group_size, device=value.device)[..., None]
            hessian = problem.hessian(moments.covariance, moments.mean)
            value = value - inverse_and_logdet(2 * hessian / size)[1] / 2
        return LogPartition(value.to(system.field.dtype), _judged(report, value, system.field.dtype))

    def answer(self, system: SpinSystem, *, initial: Tensor | None = None, check: Check = "none") -> Answer:
        if self.one_loop:
            return super().answer(system, initial=initial, check=check)
        problem, t, copies, report = self._minimum(system)
        moments, field = problem.moments(t, precise=True), system.field
        value = moments.value.detach()
        m = system.radius * moments.mean.reshape(field.shape) * math.sqrt(copies / system.dim)
        m = m.masked_fill(~value.isfinite()[..., None, None], torch.nan)
        return Answer(m.to(field.dtype), None, _judged(report, value, field.dtype))

    def multipliers(self, system: SpinSystem) -> Tensor:
        """lambda, (*batch, N), or, with `shared`, (*batch, 1), with its derivatives."""
        self.check(system)
        return self._minimum(system)[1].to(system.field.dtype)

    def _minimum(self, system: SpinSystem) -> tuple[Multipliers, Tensor, int, SolveReport]:
        """The convex problem, its minimum t, of how many copies of it log Z consists, and the report."""
        problem, copies = self._problem(system)
        t, report = minimise(problem, rtol=self.rtol, max_steps=self.max_steps)
        return *problem.at_minimum(t, report.converged), copies, report

    def _problem(self, system: SpinSystem) -> tuple[Multipliers, int]:
        """The convex problem, and how many copies of it log Z consists of: D, or 1 where couplings mix dimensions."""
        n, d, radius = system.num_sites, system.dim, system.radius
        field, couplings, tie = wide(system.live_field), wide(system.flat_couplings), 1
        if system.block:
            # N D sites of one dimension each, D of which share a multiplier. The field of a site is spread over them.
            field, tie = field.flatten(-2)[..., None] * math.sqrt(d), d
        beta = torch.as_tensor(system.beta_over(2), dtype=field.dtype, device=field.device)
        scale = beta * radius**2 / d
        # One half of each order of a pair: derivatives with respect to J_ij and J_ji are the same.
        scaled = (scale / 2 * (couplings + couplings.mT)).expand(*system.batch, -1, -1)
        live = None
        if self.shared:
            live = torch.ones_like(field[..., 0], dtype=torch.bool)
            if system.mask is not None:
                live = system.mask.expand((*system.batch, n)).repeat_interleave(tie, -1)
                # Without any site free spins stand in, whose log Z is 0, too.
                live = live | ~live.any(-1, keepdim=True)
            tie = live.shape[-1]
        return Multipliers(scaled, scale * field / radius, tie, live), 1 if system.block else d


def _judged(report: SolveReport, value: Tensor, dtype: torch.dtype) -> SolveReport:
    """The report in the precision of the system; a minimum at which A or the Hessian is not positive in the precision
    of the solve has no log Z."""
    nowhere = report.converged & value.detach().isnan()
    status = report.status.masked_fill(nowhere, int(Status.OUT_OF_RANGE))
    return report.amended(status=status, residual=report.residual.to(dtype), tolerance=report.tolerance.to(dtype))
