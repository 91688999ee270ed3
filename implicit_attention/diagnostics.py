"""Properties of fixed points: contraction, curvature, number of different ones, keys attended to, distance at most."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import _validate
from ._autograd import check_graph, exact_precision, vjp
from ._types import LinearMap
from .energies import AnchoredEnergy
from .linear import extreme_eigenvalues
from .linear import spectral_radius as arnoldi_radius
from .potentials import LogSumExp
from .potentials.scored_keys import ScoredKeys, common, in_double
from .problem import Problem, widened
from .solution import Solution
from .solvers._rows import flat, unflat

# Rows handled at a time where an (N, M) or (N, N) matrix would be needed.
TILE = 512


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All diagnostics of one solution, (*lead) unless said.

    Not for training loops: use `Solution.report`, which costs nothing.

    Attributes:
        spectral_radius: estimate of the largest |eigenvalue| of df/dz; below 1 plain iteration converges locally.
        smallest_curvature: estimate of the smallest eigenvalue of I - df/dz; NaN where that is not symmetric.
        saddle: whether that is negative.
        distinct: number of different fixed points along the last leading axis, (*lead[:-1]).
        effective_keys: exp(entropy) of the attention at the solution; None where the potential is not `LogSumExp` or
            `SoftcapLogSumExp`.
        certified_error: bound on the distance to the solution, rounding included; inf where no Lipschitz bound below 1
            is known.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import diagnose
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> found = diagnose(energy, solution)
        >>> found.saddle.tolist(), int(found.distinct)
        ([False, False], 1)
    """

    spectral_radius: Tensor
    smallest_curvature: Tensor
    saddle: Tensor
    distinct: Tensor
    effective_keys: Tensor | None
    certified_error: Tensor


def diagnose(problem: Problem, solution: Solution, *, steps: int = 30) -> Diagnosis:
    """All diagnostics of a solution at once; `steps` is the number of Lanczos vectors.

    Not for training loops, as it costs more than most solves: use `Solution.report`.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import diagnose
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> bool((diagnose(energy, solution).spectral_radius < 1).all())
        True
    """
    z = solution.value.detach()
    problem, _ = widened(problem)
    nowhere = torch.full_like(solution.residual, torch.nan)
    curvature = smallest_curvature(problem, z, steps=steps) if _has_curvature(problem) else nowhere
    potential = getattr(problem, "potential", None)
    return Diagnosis(
        spectral_radius=spectral_radius(problem, z, steps=steps),
        smallest_curvature=curvature,
        saddle=curvature < -_negligible(z),
        distinct=distinct_fixed_points(z if z.ndim > problem.event_ndim else z[None], event_ndim=problem.event_ndim),
        effective_keys=effective_keys(potential, z) if isinstance(potential, ScoredKeys) else None,
        certified_error=certified_error(problem, solution),
    )


@torch.no_grad()
def spectral_radius(problem: Problem, z: Tensor, *, steps: int = 30) -> Float[Tensor, "*lead"]:
    """Estimate max |eigenvalue| of df/dz at z, per problem.

    Not for a guarantee: use `certified_error`.

    A local number: it says how plain iteration behaves near z and certifies nothing (see `certified_error`).

    Args:
        problem: any problem.
        z: states, (*lead, *event).
        steps: number of Krylov vectors; exact from the number of entries of one problem on.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import spectral_radius
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> spectral_radius(energy, solution.value).round(decimals=3)
        tensor([0.0620, 0.0620])
    """
    matvec, start = _jacobian(problem, z)
    if _has_curvature(problem):
        low, high = extreme_eigenvalues(matvec, start, steps)
        return torch.maximum(low.value.abs(), high.value.abs())
    return arnoldi_radius(matvec, start, steps)


@torch.no_grad()
def smallest_curvature(problem: Problem, z: Tensor, *, steps: int = 30) -> Float[Tensor, "*lead"]:
    """Estimate the smallest eigenvalue of I - df/dz, for an energy of its Hessian, per problem.

    Of an energy with a metric M, where df/dz = H M, it is that of I - M^(1/2) H M^(1/2), the Hessian in the metric.

    Not for maps that are no gradient: use `spectral_radius`.

    From above: a negative number proves a direction of negative curvature, so a saddle at a stationary point.

    Args:
        problem: a problem whose Jacobian is symmetric.
        z: states, (*lead, *event).
        steps: number of Lanczos vectors; exact from the number of entries of one problem on.

    Raises:
        ValueError: for a map whose Jacobian is not symmetric.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import smallest_curvature
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> bool((smallest_curvature(energy, solution.value) > 0.9).all())
        True
    """
    _validate.require(
        _has_curvature(problem),
        "problem",
        "have a symmetric Jacobian (an energy)",
        type(problem).__name__,
        "use spectral_radius for other maps",
    )
    matvec, start = _jacobian(problem, z)
    return 1 - extreme_eigenvalues(matvec, start, steps)[1].value


def is_saddle(problem: Problem, z: Tensor, *, steps: int = 30) -> Bool[Tensor, "*lead"]:
    """Whether the energy has negative curvature at z beyond rounding, per problem; at a solution that is a saddle.

    Not for states that are no solution: there the sign of the curvature says nothing of stability.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import is_saddle
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> is_saddle(energy, solution.value)
        tensor([False, False])
    """
    return smallest_curvature(problem, z, steps=steps) < -_negligible(z)


@torch.no_grad()
def distinct_fixed_points(value: Tensor, *, event_ndim: int = 1, rtol: float = 1e-2) -> Int[Tensor, "*batch"]:
    """Count the different solutions along the last leading axis.

    Not for problems with different parameters, whose solutions differ anyway.

    Two solutions are the same within a distance of rtol times the larger of their norms (plus rtol times 1e-3).

    Args:
        value: (*batch, N, *event); problems whose value is not finite are not counted.
        event_ndim: number of axes of one problem.
        rtol: relative distance.

    Returns:
        (*batch) integers.

    Examples:
        >>> import torch
        >>> from implicit_attention.diagnostics import distinct_fixed_points
        >>> distinct_fixed_points(torch.tensor([[1.0, 0.0], [1.0, 0.001], [0.0, 1.0]]))
        tensor(2)
    """
    return first_fixed_points(value, event_ndim=event_ndim, rtol=rtol).sum(-1)


@torch.no_grad()
def first_fixed_points(value: Tensor, *, event_ndim: int = 1, rtol: float = 1e-2) -> Bool[Tensor, "*batch N"]:
    """Which solutions along the last leading axis differ from all before them; arguments as `distinct_fixed_points`.

    Not for the number alone: use `distinct_fixed_points`.

    Examples:
        >>> import torch
        >>> from implicit_attention.diagnostics import first_fixed_points
        >>> first_fixed_points(torch.tensor([[1.0, 0.0], [1.0, 0.001], [0.0, 1.0]]))
        tensor([ True, False,  True])
    """
    _validate.require(
        value.ndim > event_ndim, "value", "have a leading axis of problems", f"shape {tuple(value.shape)}"
    )
    rows = flat(value, value.shape[value.ndim - event_ndim :])
    norms = torch.linalg.vector_norm(rows, dim=-1)
    finite = torch.isfinite(norms)
    rows = torch.where(finite[..., None], rows, 0.0)
    first = []
    index = torch.arange(rows.shape[-2], device=value.device)
    for part in torch.split(index, TILE):
        # cdist by matrix products loses the small distances that matter here.
        near = torch.cdist(rows[..., part, :], rows, compute_mode="donot_use_mm_for_euclid_dist")
        scale = torch.maximum(norms[..., part, None], norms[..., None, :]) + 1e-3
        earlier = (near <= rtol * scale) & finite[..., None, :] & (index < part[:, None])
        first.append(finite[..., part] & ~earlier.any(-1))
    return torch.cat(first, dim=-1)


@torch.no_grad()
def effective_keys(potential: ScoredKeys, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
    """exp(-sum_j p_j log p_j) of the attention weights at z: on how many keys the answer rests, from 1 to M.

    Not for potentials without attention weights.

    Queries that attend to no key have 0.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.diagnostics import effective_keys
        >>> effective_keys(LogSumExp(torch.eye(4), beta=1.0), torch.zeros(2, 4)).round(decimals=3)
        tensor([4., 4.])
    """
    index = torch.arange(z.shape[-2], device=z.device)
    counts = []
    for part in torch.split(index, TILE):
        rows = potential.select(part.expand(*z.shape[:-2], part.numel()))
        if rows is None:
            return _perplexity(potential.probabilities(z))
        counts.append(_perplexity(rows.probabilities(z[..., part, :])))
    return torch.cat(counts, dim=-1)


def _perplexity(p: Tensor) -> Tensor:
    """exp(entropy) of distributions over the last axis, 0 for one that is all zeros."""
    total = p.sum(-1)
    return torch.where(total > 0, torch.special.entr(p).sum(-1).exp(), total)


@torch.no_grad()
def certified_error(problem: Problem, solution: Solution) -> Float[Tensor, "*lead"]:
    """A bound on |z - z*| that holds: (|r| + e)/(1 - L), with L a Lipschitz constant of f everywhere.

    Not for sharp attention, where no bound below 1 is known: use `spectral_radius` for an estimate.

    For the anchored log-sum-exp energy L = (1 - anchor) beta diam(K)^2/4; that of `LegendreEnergy` holds where f leads
    to, and |f(z) - z| is added to the bound on |f(z) - z*|. Where L >= 1 or none is known the bound is inf: the
    spectral radius at one point would certify nothing. The residual r is evaluated anew in float64, as the one that the
    solver saw has the rounding of its precision, and e bounds what rounding is left.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import certified_error
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> bool((certified_error(energy, solution) < 1e-3).all())
        True
    """
    nothing = torch.full_like(solution.residual, torch.inf)
    # Lipschitz constants belong to a batch entry: there is one more axis.
    if problem.lipschitz() is None or not solution.residual.ndim:
        return nothing
    with exact_precision(solution.value):
        problem = problem.replace(*(in_double(t) if t.is_floating_point() else t for t in problem.tensors()))
        z = in_double(solution.value)
        f, lipschitz = _mapped(problem, z), problem.lipschitz()
        assert lipschitz is not None
        event = tuple(range(-problem.event_ndim, 0))
        apart = torch.zeros(z.shape[: z.ndim - problem.event_ndim], dtype=z.dtype, device=z.device)
        if problem.has_metric:
            # Its constant holds where f leads to, so that z is judged by f(z).
            apart, z, f = torch.linalg.vector_norm(f - z, dim=event), f, _mapped(problem, f)
        # A bound on the rounding error of a sum of the longest axis, in units of its terms.
        tensors = [t for t in problem.tensors() if t.is_floating_point()]
        unit = 4 * (z.shape[-1] + max(max(t.shape, default=1) for t in tensors)) * torch.finfo(z.dtype).eps
        largest = sum(t.masked_fill(~t.isfinite(), 0.0).abs().max() for t in tensors if t.numel())
        bound = (lipschitz * (1 + unit))[(...,) + (None,) * (2 - problem.event_ndim)].expand(apart.shape)
        ends = sum(torch.linalg.vector_norm(t, dim=event) for t in (z, f))
        size = ends + largest * z[(0,) * apart.ndim].numel() ** 0.5
        error = torch.linalg.vector_norm(f - z, dim=event) + unit * (1 + 4 * bound) * (size + apart)
        error = apart + error / (1 - bound).clamp(min=torch.finfo(z.dtype).tiny)
        error = torch.where(bound < 1, error, torch.inf)
    return (error * (1 + 2 * torch.finfo(nothing.dtype).eps)).to(nothing)


def _mapped(problem: Problem, z: Tensor) -> Tensor:
    """f(z); for attention with centred keys, as the rounding error grows with the distance of the keys from 0."""
    potential = getattr(problem, "potential", None)
    if type(problem) is not AnchoredEnergy or type(potential) is not LogSumExp:
        return problem.fixed_point_map(z)
    potential = potential.masked_for(z.shape[-2])
    shared = common(potential.keys.nan_to_num(0.0, 0.0, 0.0))
    centred = LogSumExp(potential.keys - shared, potential.beta, mask=potential.mask, bias=potential.bias).mean(z)
    anchor = problem.anchor[..., None, None] if isinstance(problem.anchor, Tensor) else problem.anchor
    # A query that attends to nothing has the mean 0.
    nothing = (potential.mean(z) == 0).all(-1, keepdim=True)
    mean = (centred + shared).masked_fill(nothing, 0.0)
    return mean if problem._forgets else mean + anchor * (problem.field - mean)


def jacobian_penalty(
    problem: Problem, z: Float[Tensor, "*lead_event"], samples: int = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Estimate |df/dz|_F^2 / n at z, the mean square of the Jacobian's singular values, per problem: a term of a loss.

    mean over e of |J^T e|^2 / n with J = df/dz, e of `samples` draws of random signs and n the entries of a problem.

    Not for a certificate: a map may have a small mean and one singular value above 1; see `spectral_radius`.

    It keeps a map that is trained by `Implicit()` from drifting out of convergence: add a small multiple of its mean.

    Args:
        problem: any problem.
        z: states, (*lead, *event), such as `solution.value` or, cheaper, `solution.value.detach()`.
        samples: draws of e, >= 1; each costs one product with J^T and its derivative.
        generator: where the signs are drawn from; None is torch's own.

    Returns:
        (*lead), float32 where z is half precision.

    Gradients: with respect to z and every tensor of the problem. They differentiate f twice: attention in f is done by
    torch's plain products here, as its fused kernels have no second derivative.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Reference: Hutchinson (1990); Bai, Koltun and Kolter (2021).

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap
        >>> from implicit_attention.diagnostics import jacobian_penalty
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, scale: scale * z, scale, event_ndim=1)
        >>> penalty = jacobian_penalty(problem, torch.ones(3, 4))
        >>> penalty.tolist(), round(torch.autograd.grad(penalty.mean(), scale)[0].item(), 4)
        ([0.25, 0.25, 0.25], 1.0)
    """
    samples = _validate.check_integer("samples", samples, low=1)
    problem.check_state(z)
    problem, (z,) = widened(problem, z)
    lead = z.shape[: z.ndim - problem.event_ndim]

    def mapped(z: Tensor) -> Tensor:
        result = problem.fixed_point_map(z)
        check_graph(problem._map_name(), result, problem.fixed_point_map, z)
        return result

    total = torch.zeros(lead, dtype=z.dtype, device=z.device)
    with exact_precision(z), sdpa_kernel(SDPBackend.MATH):
        _, transposed = vjp(mapped, z)
        for _ in range(samples):
            where = z.device if generator is None else generator.device
            signs = 2 * torch.randint(0, 2, z.shape, generator=generator, device=where).to(z) - 1
            (product,) = transposed(signs)
            total = total + product.reshape(*lead, z.shape[len(lead) :].numel()).square().mean(-1)
    return total / samples


def _has_curvature(problem: Problem) -> bool:
    """Whether I - df/dz is a Hessian, at least in a metric."""
    return problem.symmetric or problem.has_metric


def _negligible(z: Tensor) -> float:
    """Curvature that rounding alone can make."""
    return 1e3 * torch.finfo(z.dtype).eps


def _jacobian(problem: Problem, z: Tensor) -> tuple[LinearMap, Tensor]:
    """v -> J v on (*lead, n), symmetric where the problem has a metric, and a fixed random start."""
    problem, (z,) = widened(problem, z.detach())
    event = z.shape[z.ndim - problem.event_ndim :]
    with exact_precision(z):
        linear = problem.linearize(z)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(event.numel(), generator=generator, dtype=torch.float64).to(z)
    lead = z.shape[: z.ndim - problem.event_ndim]

    def jacobian(v: Tensor) -> Tensor:
        if linear.outer is None:
            return linear.jvp(v)
        # M^(1/2) H M^(1/2), symmetric and with the eigenvalues of J = H M.
        return problem.metric_root_product(z, linear.outer(problem.metric_root_product(z, v)))

    def product(v: Tensor) -> Tensor:
        with exact_precision(v):
            return flat(jacobian(unflat(v, event)), event)

    return product, start.expand(*lead, event.numel())
