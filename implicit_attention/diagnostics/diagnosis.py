"""All diagnostics of a solution at once, and tables of such numbers as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..potentials.scored_keys import ScoredKeys
from ..problem import Problem, widened
from ..solution import Solution
from .certificate import certified_error
from .curvature import has_curvature, negligible, smallest_curvature, spectral_radius
from .distinct import distinct_fixed_points, effective_keys


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
    curvature = smallest_curvature(problem, z, steps=steps) if has_curvature(problem) else nowhere
    potential = getattr(problem, "potential", None)
    return Diagnosis(
        spectral_radius=spectral_radius(problem, z, steps=steps),
        smallest_curvature=curvature,
        saddle=curvature < -negligible(z),
        distinct=distinct_fixed_points(z if z.ndim > problem.event_ndim else z[None], event_ndim=problem.event_ndim),
        effective_keys=effective_keys(potential, z) if isinstance(potential, ScoredKeys) else None,
        certified_error=certified_error(problem, solution),
    )


def table(cells: Sequence[Sequence[str]]) -> str:
    """The rows of a table as text, the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
