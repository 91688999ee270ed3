"""Measures of trust in an answer: its distance to a transition, and the number of branches."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .. import _validate
from .._torch import LinearMap, grad, in_own_precision
from ..diagnostics import first_fixed_points
from ..diagnostics.diagnosis import table
from ..failure import OnFailure, check_on_failure, report_failures
from ..linear import extreme_eigenvalues, lanczos, spectral_radius
from ..problem import widened
from ..solution import SolveReport, Status
from ._curvature import flattened, local_field
from ._request import fill
from ._site import SpinSite
from .adaptive_tap import AdaTAP
from .approximation import Approximation, FixedPointApproximation
from .bethe import Bethe
from .mean_field import MeanField
from .methods import METHODS
from .saddle_point import SaddlePoint
from .system import ALL_PAIRS, SpinSystem, couple
from .thermodynamics import Thermodynamics, thermodynamics

#: Neighbours of an Ising spin, in the mean, up to which one loop is nearer to the truth than `AdaTAP`.
FEW = 6
#: Lines of a table that are printed.
LINES = 24


@dataclasses.dataclass(frozen=True, repr=False)
class Stability:
    """The stability of a method's answer, one number per sample, (*batch), unless said.

    With Cov_i the covariance of a lone spin that has the magnetization m_i:

    Attributes:
        spectral_radius: of beta Cov_i J_ij, the Jacobian of the naive map m -> response(h + J m): below 1 plain
            iteration converges near m.
        smallest_eigenvalue: of A = Lambda - beta J, the inverse covariance of all spins: Lambda_i are the method's own
            multipliers where it has such, and Cov_i^{-1} where not. It goes to 0 at a transition; where it is negative
            the point is no minimum of the naive free energy.
        susceptibility: (smallest, largest) eigenvalue of chi = dm/dh. A true one has none below 0.
        almeida_thouless: largest eigenvalue of beta^2 Tr(J_ij Cov_j J_ji Cov_i)/D, i != j: beyond 1 the number of
            solutions grows with the size of a disordered system, and expansions in J lose their sense.
        branches: number of different minima that were found (with no field and D > 1 each of them is a continuum);
            always 1 for methods that have but one.
        free_energies: F on the branch that every start led to, (*batch, starts + 1), the method's own first; NaN where
            it did not converge.
        magnetizations: m there, (*batch, starts + 1, N, D): `initial=magnetizations[..., k, :, :]` leads to the branch
            of start k.
        first: whether a start was the first to find its minimum, (*batch, starts + 1): `branches` of them are.
        recommended_method: the method to trust: an exact one if one treats all samples (a sum over the states
            of up to 20 Ising spins, a chain, a tree), else the one whose magnetizations were measured to be nearest to
            the truth over all temperatures: `Bethe` on rings, one loop for vectors and for Ising spins with few
            neighbours, such as a lattice, `AdaTAP` for many neighbours. On bonds of more than 2,048 sites these refuse:
            there it is `Bethe`, for vectors `MeanField`. Where `reliable` is False it is a guess: draw
            samples. Where it is True each is wrong at times on lattices, by up to .3 in m at beta J = 1.
        report: of the method's own solve.

    Not for how well the equations were solved, which is in `report`. Printed it is a table with a line per sample, and
    one with a line per branch.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import TAP, SpinSystem, stability
        >>> couplings = 0.5 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.tensor([[0.3], [0.0], [-0.1]]), beta=0.8)
        >>> found = stability(system, TAP(), starts=2)
        >>> bool(found.reliable), int(found.branches), found.recommended_method
        (True, 1, Enumeration())
    """

    spectral_radius: Tensor
    smallest_eigenvalue: Tensor
    susceptibility: tuple[Tensor, Tensor]
    almeida_thouless: Tensor
    branches: Int[Tensor, "*batch"]
    free_energies: Float[Tensor, "*batch starts"]
    magnetizations: Float[Tensor, "*batch starts N D"]
    first: Bool[Tensor, "*batch starts"]
    recommended_method: Approximation
    report: SolveReport

    @property
    def excess(self) -> Tensor:
        """F less that of the lowest branch found, (*batch): 0 where the method's answer is the most probable one."""
        lowest = self.free_energies.nan_to_num(nan=torch.inf).amin(-1)
        return self.free_energies[..., 0] - lowest

    @property
    def lowest(self) -> Float[Tensor, "*batch N D"]:
        """m on the lowest branch found, from which `thermodynamics(..., initial=)` starts; NaN without any."""
        which = self.free_energies.nan_to_num(nan=torch.inf).argmin(-1)[..., None, None, None]
        return self.magnetizations.take_along_dim(which, -3)[..., 0, :, :]

    @property
    def reliable(self) -> Tensor:
        """(*batch), whether nothing speaks against approximations: no AT number above 1, no negative eigenvalue of A
        or chi, one branch."""
        positive = (self.smallest_eigenvalue > 0) & (self.susceptibility[0] > 0)
        return positive & (self.almeida_thouless < 1) & (self.branches == 1)

    def __repr__(self) -> str:
        samples = list(np.ndindex(tuple(self.branches.shape)))
        numbers = self.spectral_radius, self.smallest_eigenvalue, *self.susceptibility, self.almeida_thouless
        heads = ("sample", "radius", "smallest of A", "chi from", "to", "AT", "branches", "reliable")
        lines: list[tuple[str, ...]] = [heads]
        branches = [("sample", "start", "F", "above the lowest", "|m|, mean over sites")]
        for at in samples[:LINES]:
            name = ", ".join(map(str, at)) or "-"
            shown = (f"{t[at]:.3g}" for t in numbers)
            lines.append((name, *shown, f"{self.branches[at]}", "yes" if self.reliable[at] else "no"))
            above = self.free_energies[at] - self.free_energies[at].nan_to_num(nan=math.inf).min()
            sizes = self.magnetizations[at].norm(dim=-1).mean(-1)
            for start in self.first[at].nonzero()[:, 0].tolist():
                free = self.free_energies[at][start]
                branches.append((name, str(start), f"{free:.6g}", f"{above[start]:.3g}", f"{sizes[start]:.3g}"))
        counts = ("samples", len(samples)), ("branches", int(self.branches.sum()))
        left = [f"and {count - LINES} {name} more" for name, count in counts if count > LINES]
        count = "1 sample" if len(samples) == 1 else f"{len(samples)} samples"
        title = f"Stability({count}; recommended {self.recommended_method!r}; {self.report!r})"
        return "\n".join([title, "", table(lines), "", table(branches[: LINES + 1]), *left])


@torch.no_grad()
@in_own_precision
def stability(
    system: SpinSystem,
    method: Approximation,
    *,
    starts: int = 8,
    steps: int = 64,
    generator: torch.Generator | None = None,
    on_failure: OnFailure = "raise",
) -> Stability:
    """The eigenvalues and the number of branches that show how near a method is to its breakdown.

    Args:
        system: the spins.
        method: such as `TAP()`.
        starts: how many starts are tried beside the method's own: two along the strongest mode of the couplings, in
            which an antiferromagnet alternates, and random ones.
        steps: number of Krylov vectors; eigenvalues are exact from N D on, else estimates from inside the spectrum.
        generator: of the starts; None is one of seed 0.
        on_failure: for samples whose solve failed: "raise", "warn" or "ignore".

    Raises:
        ConvergenceError: with on_failure="raise". TypeError, ValueError: a system that the method cannot treat.

    Gradients: none.

    Reference: de Almeida and Thouless (1978) for the last number, here with the covariances of vectors.

    Not for every step of a training run, as it costs many solves: use `check="stability"` of `thermodynamics`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import MeanField, SpinSystem, stability
        >>> couplings = 0.5 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.tensor([[0.3], [0.0], [-0.1]]), beta=0.8)
        >>> found = stability(system, MeanField(), starts=2)
        >>> bool(found.spectral_radius < 1), bool(found.smallest_eigenvalue > 0)
        (True, True)
    """
    check_on_failure("on_failure", on_failure, policies=False)
    _validate.check_integer("starts", starts, low=0)
    _validate.check_integer("steps", steps, low=1)
    with torch.enable_grad():
        # The report says more about an unstable solution than the warning of `thermodynamics` would.
        result = thermodynamics(system, method, on_failure="ignore")
        report_failures(on_failure, type(method).__name__, result.report.record, method.remedies)
        m = result.magnetization.detach()
        system = widened(system)[0]
        system = system.replace(*(t.detach() for t in system.tensors()))
        lowest, highest = _extremes(result.susceptibility_product, m, system, steps)
    response, beta = method.site_response(), system.beta_over(2)
    site = SpinSite(response, local_field(response, m, system.beta_over(0), system.radius)[0], system)
    if system.mask is not None:
        # A site that does not exist does not vary.
        site.tau, site.slope = (part * system.mask for part in (site.tau, site.slope))
    own = method.inverse_variances(system)

    def jacobian(v: Tensor) -> Tensor:
        return beta * site.product(system.coupled(v))

    def precision(v: Tensor) -> Tensor:
        alone = site.inverse_product(v) if own is None else own[..., None] * v
        return alone - beta * system.coupled(v)

    energies, states, first = _branches(system, method, result, starts, generator)
    return Stability(
        spectral_radius=spectral_radius(flattened(jacobian, m), torch.zeros_like(m.flatten(-2)), steps),
        smallest_eigenvalue=_extremes(precision, m, system, steps)[0],
        susceptibility=(lowest, highest),
        almeida_thouless=_almeida_thouless(system, site, steps),
        branches=first.sum(-1),
        free_energies=energies,
        magnetizations=states,
        first=first,
        recommended_method=_recommended(system),
        report=result.report,
    )


def _recommended(system: SpinSystem) -> Approximation:
    """The method that is exact for the system, or else the best."""
    exact: list[Approximation] = [row.method for row in METHODS if row.kind.exact]
    for method in exact:
        with contextlib.suppress(ValueError):
            method.check(system)
            return method
    if system.graph is not None and system.num_sites > ALL_PAIRS:
        return MeanField() if system.dim > 1 else Bethe()
    if system.dim > 1:
        return SaddlePoint(one_loop=True)
    couplings = system.live_couplings
    bonds = (couplings.tril(-1) + couplings.triu(1)).reshape(-1, *couplings.shape[-2:]) != 0
    neighbours = bonds.sum(-1)
    if int(neighbours.max()) <= 2 or all(map(_is_tree, bonds.cpu().numpy())):
        # Loops, if there are any, are as long as the ring.
        return Bethe()
    return SaddlePoint(one_loop=True) if float(neighbours.double().mean(-1).max()) <= FEW else AdaTAP()


def _is_tree(bonds: np.ndarray[Any, Any]) -> bool:
    """Whether the bonds of one sample form no loop: each joins two parts of the rest."""
    from scipy.sparse.csgraph import connected_components

    return bool(len(bonds) == bonds.sum() // 2 + connected_components(bonds)[0])


def _extremes(product: LinearMap, m: Tensor, system: SpinSystem, steps: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest eigenvalue of a map (*batch, N, D) -> (*batch, N, D), of sites that exist."""
    matvec = flattened(product, m)
    if system.mask is not None:
        live = system.mask[..., None].expand(m.shape)
        x = live.to(m.dtype) * torch.cos(torch.arange(m.shape[-1], dtype=m.dtype, device=m.device))
        # Sites that do not exist get an eigenvalue from inside the spectrum of the others.
        inside = (x * product(x)).sum((-1, -2), keepdim=True) / x.square().sum((-1, -2), keepdim=True)
        matvec = flattened(lambda v: torch.where(live, product(v * live), inside * v), m)
    # Lanczos replaces a start of zeros by a vector that is as good as random.
    low, high = extreme_eigenvalues(matvec, torch.zeros_like(m.flatten(-2)), steps)
    return low.value, high.value


def _almeida_thouless(system: SpinSystem, site: SpinSite, steps: int) -> Tensor:
    graph = system.graph
    # `linear_response` is beta Tr Cov_i J_ij Cov_j, for matrices without the trace.
    weights = site.linear_response(system) * system.live_pairs
    weights = system.beta_over(2) * (weights.sum((-2, -1)) if system.block else weights)
    weights = weights.tril(-1) + weights.triu(1) if graph is None else graph.of_components().without_loops(weights)

    def product(v: Tensor) -> Tensor:
        return couple(weights, v[..., None], block=False, graph=graph)[..., 0] / system.dim

    # A matrix with positive entries has a positive eigenvector at its largest eigenvalue: ones are a good start.
    return extreme_eigenvalues(product, torch.ones_like(site.tau), steps)[1].value


def _branches(
    system: SpinSystem, method: Approximation, result: Thermodynamics, starts: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every start, (*batch, starts + 1, ...), F and m of the solution, and whether it is a new minimum."""
    m = result.magnetization.detach()
    if not isinstance(method, FixedPointApproximation):
        known = result.report.converged[..., None]
        return fill(result.free_energy.detach()[..., None], ~known), fill(m[..., None, :, :], ~known), known
    generator = generator or torch.Generator().manual_seed(0)
    field = system.field
    noise = torch.randn(starts, *field.shape, dtype=field.dtype, device=generator.device, generator=generator)
    noise = noise.to(field.device)
    if starts:
        mode = _strongest_mode(system, noise[0])
        noise = torch.cat((mode[None], -mode[None], noise[2:]))[:starts]
    # A field as strong as all couplings together starts a solve anywhere.
    size = system.at(field, system.couplings.abs(), system.beta).coupled(torch.ones_like(field)) * system.radius
    strength = field.abs() + size
    drawn = torch.cat((field[None], noise * strength.nan_to_num()))

    field = field.expand(drawn.shape)
    start = method.start(system.at(drawn, system.couplings, system.beta))
    solution = method.solution(system.at(field, system.couplings, system.beta), start, check="stability")

    def log_z(field: Tensor) -> tuple[Tensor, Tensor]:
        value = method.value(system.at(field, system.couplings, system.beta), solution.value)
        return value.sum(), value

    # log Z is stationary in the state, so that m is its derivative by the field at a fixed state.
    slope, value = grad(log_z, has_aux=True)(field)
    failed = ~(solution.converged & torch.isfinite(m).flatten(-2).all(-1))
    free = fill(-(value + system.base_measure()) / system.beta_over(0), failed)
    m = fill(slope / system.beta_over(2), failed)
    minima = fill(solution.value, failed | (solution.status == Status.UNSTABLE)).movedim(0, len(system.batch))
    return free.movedim(0, -1), m.movedim(0, -3), first_fixed_points(minima, event_ndim=2)


def _strongest_mode(system: SpinSystem, start: Tensor) -> Tensor:
    """The eigenvector of the largest eigenvalue of J, (*batch, N, D), from a start; the longest of its vectors is 1."""
    result = lanczos(flattened(system.coupled, start), start.flatten(-2), 64)
    tridiagonal = result.alphas.diag_embed() + result.betas.diag_embed(-1) + result.betas.diag_embed(1)
    weights = torch.linalg.eigh(tridiagonal.nan_to_num()).eigenvectors[..., -1]
    mode = (weights[..., None, :] @ result.basis)[..., 0, :].reshape(start.shape).nan_to_num()
    longest = torch.linalg.vector_norm(mode, dim=-1, keepdim=True).amax(-2, keepdim=True)
    return torch.div(mode, torch.where(longest > 0, longest, 1.0))
