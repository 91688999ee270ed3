"""The scenes of `landscape`: patterns, queries and maps in the plane, and their measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import Solution, solve
from ...diagnostics import StationaryPoints, stationary_points
from ...energies import AnchoredEnergy
from ...potentials import Potential
from ...solvers import GradientDescent
from ..errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATTERNS = ((1.2, 0.3), (-0.8, 1.1), (-0.4, -1.3), (0.9, -0.9), (-1.3, -0.1), (0.2, 0.6))
QUERIES = ((1.5, 1.5), (-1.5, 0.5), (0.0, -0.2))
BETA = 1 / math.sqrt(2)
#: Queries beside those above, drawn from the square that just holds those.
DRAWN, HALF_SIDE = 5, 1.5
#: Half the side of the pictures, and starts along a side of them from which stationary points are searched.
REACH, STARTS = 2.0, 17
#: The largest coordinate of the default patterns, in units of which those of users are measured.
LARGEST = 1.3
#: The limits of the largest coordinate, beyond which squares are not finite, and the most patterns.
SMALLEST_SIZE, LARGEST_SIZE, MOST = 1e-6, 1e6, 10_000
#: An attractor within this part of half the side of the picture is near a pattern.
OWN = 0.1
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclasses.dataclass(frozen=True)
class Plane:
    """Patterns (M, 2), queries (N, 2), maps of queries, keys and values (3, 2, 2), beta, and half the side to draw."""

    patterns: Tensor
    queries: Tensor
    maps: Tensor
    beta: float
    reach: float

    @property
    def starts(self) -> Tensor:
        """Return states all over the picture, (S, 2)."""
        return square(self.reach, STARTS)


@dataclasses.dataclass(frozen=True)
class PlaneScene:
    """A picture with its story.

    Attributes:
        name: of the file, and in the terminal.
        title: a few words.
        sentence: the message of the picture.
        description: the same for somebody who does not see the picture.
        facts: the numbers to read, by name.
        numbers: all numbers.
        draw: makes the picture.
    """

    name: str
    title: str
    sentence: str
    description: str
    facts: dict[str, str]
    numbers: dict[str, Any]
    draw: Callable[[], Figure]


def plane_of(patterns: Tensor | None, name: str, *, beta: float | None, seed: int) -> Plane:
    """Return the plane of the six patterns, or of a user's, with queries and maps drawn from a seed.

    Args:
        patterns: (M, 2) float64, or None for the six.
        name: of the patterns in messages.
        beta: inverse temperature; None for the one that suits the size of the patterns.
        seed: of queries and maps.

    Raises:
        InputError: patterns that cannot be used.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = HALF_SIDE * (2 * torch.rand(DRAWN, 2, generator=generator, dtype=torch.float64) - 1)
    maps = _maps(torch.rand(3, 2, generator=generator, dtype=torch.float64))
    queries = torch.cat([torch.tensor(QUERIES, dtype=torch.float64), drawn])
    size = 1.0 if patterns is None else _size(patterns, name)
    patterns = torch.tensor(PATTERNS, dtype=torch.float64) if patterns is None else patterns
    # beta multiplies products of two coordinates.
    return Plane(patterns, size * queries, maps, BETA / size**2 if beta is None else beta, size * REACH)


def _maps(drawn: Tensor) -> Tensor:
    """Return maps that turn by any angle and stretch by s and 1/s, s from 1/2 to 3/2, from numbers (3, 2) in [0, 1)."""
    angle, stretch = 2 * math.pi * drawn[:, 0], drawn[:, 1] + 0.5
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    maps: Tensor = turn * torch.stack([stretch, 1 / stretch], -1)[:, None, :]
    return maps


def _size(patterns: Tensor, name: str) -> float:
    """Return the factor by which the patterns are larger than the default ones."""
    count, width = patterns.shape
    if width != 2:
        remedy = "draw longer patterns with implicit_attention.plotting.principal_figure"
        raise InputError(f"{name} must have shape (M, 2), got {(count, width)}; {remedy}")
    if not 1 <= count <= MOST:
        raise InputError(f"{name} must hold 1 to {MOST} patterns, got {count}; choose some of them")
    if bad := int((~patterns.isfinite()).any(-1).sum()):
        raise InputError(f"{name} must hold finite numbers, got NaN or inf in {bad} of {count} patterns; remove those")
    largest = float(patterns.abs().max())
    if largest > 0 and not SMALLEST_SIZE <= largest <= LARGEST_SIZE:
        required = f"have a largest coordinate between {SMALLEST_SIZE:g} and {LARGEST_SIZE:g}"
        raise InputError(f"{name} must {required}, got {largest:g}; scale them")
    return largest / LARGEST if largest > 0 else 1.0


def square(reach: float, side: int) -> Tensor:
    """Return states on a square around 0, row after row, (side^2, 2) float64."""
    line = torch.linspace(-reach, reach, side, dtype=torch.float64)
    return torch.cartesian_prod(line, line).flip(-1)


def descend(energy: AnchoredEnergy, start: Tensor, step_size: float, steps: int) -> Solution:
    """Make exactly so many gradient steps from `start`, with their trace."""
    solver = GradientDescent(step_size=step_size, max_steps=steps, atol=0.0, rtol=0.0)
    return solve(energy, start, solver=solver, trace=True, on_failure="ignore")


def course(energy: AnchoredEnergy, beta: float, solution: Solution, **options: Any) -> dict[str, Any]:
    """Return the numbers of a solve with a trace: the energy, options of the solve, and the path."""
    assert solution.trace is not None
    numbers = {"potential": type(energy.potential).__name__, "beta": beta, "anchor": float(energy.anchor), **options}
    return numbers | {"path": solution.trace.value, "energy": solution.trace.energy}


def stationary(
    potential: Potential, starts: Tensor, *, anchor: float = 0.0, query: Tensor | None = None
) -> StationaryPoints:
    """Find the stationary points of one query's energy; without an anchor the query does not matter."""
    field = (starts if query is None else query).expand(starts.shape)
    return stationary_points(AnchoredEnergy(potential, field, anchor), starts)


def nearest(states: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance from every state to the nearest of the points, and the number of that point."""
    away, index = torch.cdist(states, points, compute_mode="donot_use_mm_for_euclid_dist").min(-1)
    return away, index


def have_own(patterns: Tensor, attractors: Tensor, reach: float) -> Tensor:
    """Return whether a pattern has an attractor nearby that is near no other pattern, (M,)."""
    away, index = nearest(patterns, attractors)
    near = away < OWN * reach
    alone: Tensor = torch.bincount(index[near], minlength=len(attractors))[index] == 1
    return near & alone


# ------------------------------------------------------------------ words


def point(state: Tensor | Sequence[float], digits: int = 2) -> str:
    """Write `(0.09, -0.66)`, without negative zeros."""
    numbers = state.tolist() if isinstance(state, Tensor) else state
    return "(" + ", ".join(f"{round(x, digits) + 0.0:.{digits}f}" for x in numbers) + ")"


def listing(parts: Sequence[str]) -> str:
    """Write `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def points(states: Tensor, most: int = 7) -> str:
    """Write the states one after the other, at most so many."""
    shown = [point(state) for state in states[:most]]
    return listing([*shown, f"{len(states) - most} more"] if len(states) > most else shown)


def number(count: int, noun: str, plural: str | None = None) -> str:
    """Write `one minimum` or `six patterns`."""
    word = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{word} {noun if count == 1 else plural or noun + 's'}"
