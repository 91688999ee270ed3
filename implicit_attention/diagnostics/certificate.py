"""A bound on the distance to the solution."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .._torch import exact_precision
from ..energies import AnchoredEnergy
from ..potentials import LogSumExp
from ..potentials._attention import common
from ..potentials.masked_keys import in_double
from ..problem import Problem
from ..solution import Solution


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
    # A Lipschitz constant holds for a batch entry, so that states need one more axis.
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
            # The constant holds where f leads to, so that the bound is one on f(z).
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
