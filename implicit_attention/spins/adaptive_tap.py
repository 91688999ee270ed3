"""Adaptive TAP: sites of any law coupled through a Gaussian that shares their moments."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from .. import _validate
from .._solve import solve
from ..linear import _matrices
from ..potentials import GaussianUnits, SiteLaw, SphereUnits, SphericalLaw
from ..problem import widened
from ..solution import Remedies, Solution, SolveReport, Status
from ..solvers import NewtonKrylov
from ._expectation_consistency import SiteEquations, descended
from ._matrix_inverse import inverse_and_logdet
from ._request import closed_form
from .approximation import Answer, Approximation, Check, FixedPointApproximation, InUnits, LogPartition, field_unit
from .system import SpinSystem


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaTAP(FixedPointApproximation):
    r"""log Z from sites that see each other through a Gaussian of the same means and variances.

    Site i has its own law, tilted to mean m_i and variance c_i (of a component) by the fields theta_i and V_i; the
    Gaussian has the couplings, C = (Lambda - beta J)^{-1}, Lambda_i = V_i + 1/c_i, and what is counted twice is one
    Gaussian for each site:

    ```math
    \begin{align*}
    \log Z &= \sum_i \left[ \log A(\theta_i, V_i) - \theta_i \cdot m_i - \tfrac12 V_i |m_i|^2 \right]
    + \beta \sum_i h_i \cdot m_i \\
    &\quad + \frac\beta2 \sum_{ij} J_{ij}\, m_i \cdot m_j
    - \frac D2 \left[ \log \det(\Lambda - \beta J) + \sum_i \log c_i \right] \\
    \theta_i &= \beta \left( h_i + \sum_j J_{ij} m_j \right) - V_i m_i, \qquad C_{ii} = c_i
    \end{align*}
    ```

    where log Z is stationary in all of these. V_i is the variance of the field that the others exert on i; it makes
    Onsager's reaction V_i m_i, and adapts to the couplings instead of being averaged over them. Exact for Gaussian
    sites, and for any that are not coupled to others; a diagonal J_ii of numbers only adds beta J_ii R^2/2 where |s| is
    fixed. For D = 1 log Z is off by the third order of the couplings, without a field by the fourth. For D > 1 V_i is a
    number, whereas the field of others differs along and across m_i: in a field log Z is off by the second order, times
    a small factor. Per dimension all of it falls like 1/D: for D to infinity, and for vectors without a field at every
    D, this is `SaddlePoint`.

    Couplings may be matrices (N, N, D, D). For spins that are not Gaussian V_i and Lambda_i are numbers all the same,
    C_ii then being the mean over a site's dimensions.

    Args:
        prior: the law of a site, which log Z is relative to: `SphereUnits()` (any vector of length R, and +-R for D =
            1), `SignUnits()`, `GaussianUnits()`, `DiscreteUnits(values, weights)` or another `SiteLaw`.
        solver: for the equations, all of a sample one problem, from the answer to the bare field. None descends the
            free energy by Newton steps to one of its minima, which there always is, and finishes with `NewtonKrylov` to
            a relative residual of 1e-11 (1e-5 in float32). Below a transition others find nothing, or a point that is
            no minimum.
        adjoint: None is `Implicit()`.

    With `GaussianUnits()` there is nothing to solve. There Z is infinite unless the largest eigenvalue of beta J is
    below D/R^2; such a sample has the status OUT_OF_RANGE and changes no other.

    Below a transition there are several minima; the one that the bare field leads to is taken. Without a field means of
    0 are a minimum at every temperature, for laws that are even. No minimum is a bound of the true free energy.

    Gradients: with respect to field, couplings and beta, to any order.

    Reference: Opper and Winther (2001), Adaptive and self-averaging TAP mean-field theory; Opper and Winther (2005),
    Expectation consistent approximate inference, whose Gaussian shares one number per site here.

    Not for thousands of sites, at O(N^3) a step: use `TAP()` or `MeanField()`; not for trees: `Bethe()` is exact there;
    not for Ising lattices at beta J near 1 and above, where m is off by .3 and F by .03 a spin while all is CONVERGED
    (the table of the guide to spin systems): use `Enumeration()` up to 20 sites, else `SaddlePoint(one_loop=True)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import AdaTAP, SpinSystem, magnetization
        >>> couplings = 0.5 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.tensor([[0.3], [0.0], [-0.1]]), beta=0.8)
        >>> magnetization(system, AdaTAP())[:, 0].round(decimals=3)  # exact are 0.198, 0.078 and 0.038
        tensor([0.2030, 0.0670, 0.0210])
    """

    remedies: ClassVar[Remedies] = {
        **FixedPointApproximation.remedies,
        Status.MAX_STEPS: "leave out `solver`, so that the free energy is descended, or lower beta",
        Status.OUT_OF_RANGE: "Z of Gaussian sites is infinite here: lower beta until beta J has no eigenvalue >= D/R^2",
    }

    prior: SiteLaw = dataclasses.field(default_factory=SphereUnits)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_instance("prior", self.prior, SiteLaw, "be a SiteLaw", "for example SignUnits()")

    @property
    def by_products(self) -> bool:
        return isinstance(self.prior, GaussianUnits)

    by_bonds = False

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        self.prior.check("system", system.dim, system.radius)
        weighted = system.measure == "uniform" or self.prior.fixed_length
        required = f"be 'uniform' for {type(self.prior).__name__}, whose states are weighted by itself and not counted"
        remedy = "use SpinSystem(..., measure='uniform'), or SignUnits()"
        _validate.require(weighted, "measure", required, repr(system.measure), remedy)

    def site_response(self) -> SphericalLaw:
        name = type(self.prior).__name__
        remedy = "use SphereUnits() or SignUnits()"
        _validate.require(self.prior.fixed_length, "prior", "have spins of fixed length", name, remedy)
        return self.prior if isinstance(self.prior, SphericalLaw) else super().site_response()

    def inverse_variances(self, system: SpinSystem) -> Tensor:
        """Lambda, (*batch, N), with (Lambda - beta J)^{-1} the covariance of all spins; NaN where the solve failed."""
        self.check(system)
        system = widened(system)[0]
        problem = self.problem(system)
        if isinstance(self.prior, GaussianUnits):
            return torch.full_like(problem.field[..., 0], system.dim / system.radius**2)
        solution = self.solution(system, self.start(system))
        multipliers: Tensor = solution.value[..., -1] + problem.moments(solution.value)[1].reciprocal()
        return multipliers.masked_fill(solution.failed[..., None], torch.nan)

    def cavity_variances(self, system: SpinSystem) -> Tensor:
        """V, (*batch, N), or (*batch, N, D, D) for `GaussianUnits()` with couplings that are matrices.

        NaN where the solve has failed. Gradients: as log Z.
        """
        self.check(system)
        system = widened(system)[0]
        if not isinstance(self.prior, GaussianUnits):
            solution = self.solution(system, self.start(system))
            return solution.value[..., -1].masked_fill(solution.failed[..., None], torch.nan)
        problem = self.problem(system)
        x, _, positive = _gaussian(problem)
        plain = torch.full_like(problem.field[..., 0], system.radius**2 / system.dim)
        if not system.block:
            return problem.cavity(x, plain).masked_fill(~positive[..., None], torch.nan)
        n, d = system.num_sites, system.dim
        own = x.reshape(*x.shape[:-2], n, d, n, d).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        v: Tensor = (torch.eye(d, dtype=x.dtype, device=x.device) - _matrices.inverse(own)) / plain[..., None, None]
        return v.masked_fill(~positive[..., None, None, None], torch.nan)

    def problem(self, system: SpinSystem) -> SiteEquations:
        couplings, beta = system.flat_couplings, system.beta_tensor(2).expand(*system.batch, 1, 1)
        # One half of each order of a pair: derivatives with respect to J_ij and J_ji are the same.
        bonds = beta * (couplings + couplings.mT) / 2
        return SiteEquations(beta * system.live_field, bonds, self.prior, system.radius)

    def start(self, system: SpinSystem) -> Tensor:
        problem = self.problem(system)
        return self._begun(problem, problem.field)

    def _begun(self, problem: SiteEquations, theta: Tensor) -> Tensor:
        """A state to start from at theta. The descent finds V by itself."""
        if self.solver is None:
            return torch.cat([theta, torch.zeros_like(theta[..., :1])], dim=-1)
        return descended(problem, theta, steps=0)[0]

    def check_initial(self, system: SpinSystem, initial: Tensor) -> None:
        if isinstance(self.prior, GaussianUnits):
            Approximation.check_initial(self, system, initial)
        super().check_initial(system, initial)

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        problem = self.problem(system)
        if self.prior.fixed_length:
            theta = self.site_response().inverse(m, 1.0, system.radius)
        else:
            # Other laws have no inverse in closed form: the field that others exert, less the reaction to it.
            theta = problem.field + problem.coupled(m)
            theta = theta - descended(problem, theta, steps=0)[0][..., -1:] * m
        return self._begun(problem, theta)

    def unit(self, system: SpinSystem) -> Tensor:
        unit = system.beta_tensor(2).detach() * field_unit(system)
        return torch.cat([unit.expand(system.field.shape), unit / system.radius], -1)

    def magnetization_at(self, system: SpinSystem, state: Tensor) -> Tensor:
        return self.problem(system).moments(state)[0]

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        known = torch.isfinite(state).all(-1).all(-1)
        value = self.problem(system).log_partition(state.masked_fill(~known[..., None, None], 0.0))
        return value.masked_fill(~known, torch.nan)

    def log_partition(
        self, system: SpinSystem, *, initial: Tensor | None = None, check: Check = "none"
    ) -> LogPartition:
        if not isinstance(self.prior, GaussianUnits):
            return super().log_partition(system, initial=initial, check=check)
        m, logdet, positive = _gaussian_answer(self, system)
        copies = 1 if system.block else system.dim
        value = ((system.beta_over(2) * system.live_field * m).sum((-2, -1)) - copies * logdet) / 2
        return LogPartition(value.masked_fill(~positive, torch.nan), _gaussian_report(positive, value))

    def answer(self, system: SpinSystem, *, initial: Tensor | None = None, check: Check = "none") -> Answer:
        if not isinstance(self.prior, GaussianUnits):
            return super().answer(system, initial=initial, check=check)
        m, logdet, positive = _gaussian_answer(self, system)
        return Answer(m.masked_fill(~positive[..., None, None], torch.nan), None, _gaussian_report(positive, logdet))

    def solution(self, system: SpinSystem, start: Tensor, *, check: Check = "none") -> Solution:
        """The solution that a start leads to; the descent ends at minima, so that there is nothing to check."""
        problem, unit, solver, start = self.problem(system), self.unit(system), self.solver, start.detach()
        spent: list[Tensor | int] = [0, 0]
        if solver is None:
            start, *spent = descended(problem, start[..., :-1])
            rtol = (1e-5 if start.dtype == torch.float32 else 1e-11) if self.rtol is None else self.rtol
            solver = NewtonKrylov(rtol=rtol, atol=rtol, forcing=1e-3, max_steps=50)
        solution = solve(InUnits(problem, unit), start / unit, solver=solver, adjoint=self.adjoint, on_failure="ignore")
        solution = solution.amended(num_steps=solution.num_steps + spent[0], num_evals=solution.num_evals + spent[1])
        return dataclasses.replace(solution, value=unit * solution.value)


def _gaussian(problem: SiteEquations) -> tuple[Tensor, Tensor, Tensor]:
    """Return the covariance of Gaussian sites in units of a site's own, minus its log det, and whether it exists."""
    scaled = problem.radius**2 / problem.field.shape[-1] * problem.couplings
    eye = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    return inverse_and_logdet(eye - scaled, -scaled.diagonal(dim1=-2, dim2=-1))


def _gaussian_answer(method: AdaTAP, system: SpinSystem) -> tuple[Tensor, Tensor, Tensor]:
    """The magnetizations of Gaussian sites, (*batch, N, D), with the last two of `_gaussian`."""
    plain = system.radius**2 / system.dim
    if system.low_rank:
        # With C_i = 1 + |w_i|^2 and G = 1 - W^T C^-1 W of Woodbury's formula 1 - J is C - W W^T, of the determinant
        # |C| |G|, and its inverse C^-1 + C^-1 W G^-1 W^T C^-1.
        beta = system.beta_tensor(2).expand(*system.batch, 1, 1)
        w = (plain * beta).sqrt() * system.live_factors
        own = 1 + w.square().sum(-1, keepdim=True)
        inverse, logdet, positive = inverse_and_logdet(torch.eye(w.shape[-1]).to(w) - w.mT @ (w / own))
        alone = plain * beta * system.live_field / own
        m = alone + w @ (inverse @ (w.mT @ alone)) / own
        return m, logdet + own.log().sum((-2, -1)), positive
    problem = method.problem(system)
    x, logdet, positive = _gaussian(problem)
    return problem.replace(problem.field, plain * x).coupled(problem.field), logdet, positive


def _gaussian_report(positive: Tensor, value: Tensor) -> SolveReport:
    report = closed_form(value.masked_fill(~positive, torch.nan))
    return report.amended(status=report.status.masked_fill(~positive, int(Status.OUT_OF_RANGE)))
