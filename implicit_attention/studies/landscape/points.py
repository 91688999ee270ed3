"""Scenes of `landscape` with other energies, and with the end of every start."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ... import solve
from ...energies import AnchoredEnergy
from ...plotting import Basins, basins, basins_figure, landscape_figure
from ...potentials import LogSumExp, Potential
from ...potentials.distance import DistanceLogSumExp
from ...potentials.entmax import Entmax
from ...solvers import Anderson, Picard, Solver
from .plane import Plane, PlaneScene, course, descend, have_own, nearest, number, point, points, square, stationary
from .steps import COLD, VALLEYS, kinds, seen, stationary_numbers, ways

ANCHORS = (0.1, 0.3, 0.7)
#: Starts along a side of basins, and their steps.
SIDE, STEPS = 81, 200
#: A start that ends within this part of half the side of the picture has reached the point.
NEAR = 1e-3


def anchored(plane: Plane, anchor: float) -> PlaneScene:
    """Return the scene of one query's energy, tilted towards it."""
    query, beta = plane.queries[:1], COLD * plane.beta
    potential = LogSumExp(plane.patterns, beta)
    energy = AnchoredEnergy(potential, query, anchor)
    solution = solve(energy, query, solver=Picard(max_steps=2000, atol=1e-12, rtol=1e-12), trace=True)
    fixed = stationary(potential, plane.starts, anchor=anchor, query=query)
    end, spent = solution.value[0], solution.num_evals[0]
    way = float(torch.linalg.vector_norm(end - query[0]))
    numbers = course(energy, beta, solution, query=query[0])
    numbers |= {"equilibrium": end, "evaluations": spent, "stationary_points": stationary_numbers(fixed)}
    facts = {
        "beta": f"{beta:.4g}",
        "query": point(query[0]),
        "equilibrium": f"{point(end, 4)}, {way:.3g} away",
        "evaluations of plain steps": str(int(spent)),
        "stationary points": kinds(fixed),
    }
    minima, place = fixed.of_kind("minimum"), point(query[0])
    said = (
        f"With an anchor of {anchor:g} the energy of the query {place} has "
        f"{number(len(minima), 'minimum', 'minima')}, and plain steps end {way:.3g} from the query."
    )
    contours = seen("the energy of one query", plane, minima)
    description = f"{contours} A line leads the query from {place} to {point(end)}."
    title = f"Anchored: a weight of {anchor:g} on the query"
    look: dict[str, Any] = {"trace": solution.trace, "reach": plane.reach, "title": f"{title}, {place}"}
    draw = partial(landscape_figure, energy, query, fixed_points=fixed, **look)
    return PlaneScene(f"anchor-{anchor:g}", title, said, description, facts, numbers, draw)


def _of_basins(result: Basins) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the numbers of basins, and the facts."""
    numbers = {"attractors": result.attractors, "attractor_energies": result.energies}
    facts = {"attractors": points(result.attractors)}
    facts[f"of {result.index.numel()} starts end there"] = ", ".join(map(str, result.counts.tolist()))
    return numbers | {"starts_that_end_there": result.counts}, facts


def _of_potential(plane: Plane, name: str, title: str, potential: Potential, sentence: str, notes: str) -> PlaneScene:
    """Return the scene of five plain steps down an energy without anchor, and of the end of every start."""
    energy = AnchoredEnergy(potential, plane.queries, 0.0)
    solution = descend(energy, plane.queries, 1.0, 5)
    result = basins(energy, grid=SIDE, reach=plane.reach, steps=STEPS)
    apart = nearest(plane.patterns, result.attractors)[0]
    alone = have_own(plane.patterns, result.attractors, plane.reach)
    beta = COLD * plane.beta
    reached, ends = _of_basins(result)
    numbers = course(energy, beta, solution, step_size=1.0, steps=5) | reached
    numbers |= {"patterns_with_an_attractor": alone, "distance_of_patterns_from_an_attractor": apart}
    away = f"{float(apart.mean()):.2g} in the mean, {float(apart.max()):.2g} at most"
    facts = {"beta": f"{beta:.4g}", "steps": "5 of size 1", **ends, "from a pattern to an attractor": away}
    said = sentence.format(alone=int(alone.sum()), all=len(apart), exact=int((apart < 1e-9 * plane.reach).sum()))
    description = f"{seen(f'the energy {notes}', plane, result.attractors)} {ways(plane.queries, solution.value)}"
    look: dict[str, Any] = {"trace": solution.trace, "patterns": plane.patterns, "reach": plane.reach, "title": title}
    draw = partial(landscape_figure, energy, plane.queries, fixed_points=result.points, **look)
    return PlaneScene(name, title, said, description, facts, numbers, draw)


def by_distance(plane: Plane) -> PlaneScene:
    said = "If distances decide in place of dot products, {alone} of {all} patterns have an attractor of their own."
    potential = DistanceLogSumExp(plane.patterns, COLD * plane.beta)
    return _of_potential(plane, "distance", "Distances do not prefer long patterns", potential, said, "by distances")


def sparse(plane: Plane) -> PlaneScene:
    said = "Sparse attention reads few patterns: plain steps reach {exact} of {all} patterns exactly, not nearly."
    potential = Entmax(plane.patterns, COLD * plane.beta, alpha=2.0)
    return _of_potential(plane, "sparse", "Sparse attention: patterns exactly", potential, said, "of sparsemax")


def solvers() -> dict[str, Solver]:
    """Return the solvers whose basins are drawn."""
    return {
        "plain steps": Picard(max_steps=STEPS),
        "Anderson": Anderson(max_steps=STEPS),
        "Anderson, unguarded": Anderson(max_steps=STEPS, guard="none"),
    }


def by_solver(plane: Plane) -> PlaneScene:
    beta = VALLEYS * plane.beta
    potential = LogSumExp(plane.patterns, beta)
    energy = AnchoredEnergy(potential, plane.queries, 0.0)
    result = basins(energy, grid=SIDE, reach=plane.reach, steps=STEPS)
    fixed = stationary(potential, plane.starts)
    starts = square(plane.reach, SIDE)
    rows: dict[str, dict[str, Any]] = {}
    for name, solver in solvers().items():
        solution = solve(AnchoredEnergy(potential, starts, 0.0), starts, solver=solver, on_failure="ignore")
        away = nearest(solution.value, fixed.of_kind("minimum"))[0]
        done = solution.converged
        rows[name] = {
            "mean_evaluations": solution.num_evals.double().mean(),
            "most_evaluations": solution.num_evals.max(),
            "at_no_minimum": (done & (away > NEAR * plane.reach)).sum(),
            "not_converged": (~done).sum(),
        }
    reached, ends = _of_basins(result)
    numbers = {"potential": "LogSumExp", "beta": beta, "starts": len(starts), **reached}
    numbers |= {"stationary_points": stationary_numbers(fixed), "solvers": rows}
    facts = {"beta": f"{beta:.4g}", **ends}
    for name, row in rows.items():
        lost = f"{int(row['at_no_minimum'])} starts end at no minimum, {int(row['not_converged'])} nowhere"
        facts[name] = f"{float(row['mean_evaluations']):.1f} evaluations in the mean; {lost}"
    unguarded = int(rows["Anderson, unguarded"]["at_no_minimum"])
    count = len(result.attractors)
    said = (
        f"Plain steps part the plane into {number(count, 'basin')}; Anderson without its safeguard "
        f"ends at a saddle or a maximum from {100 * unguarded / len(starts):.2g} % of all starts."
    )
    evaluations = "; ".join(f"{name} {float(row['mean_evaluations']):.1f}" for name, row in rows.items())
    description = (
        f"Left the plane, both coordinates from {-plane.reach:.3g} to {plane.reach:.3g}, coloured by the fixed point "
        f"that plain steps reach: {number(count, 'region')} around {points(result.attractors)}. "
        f"Beside it for each solver the plane by its number of evaluations, in the mean {evaluations}; starts that end "
        f"at a saddle have a colour of their own, for Anderson without safeguard {unguarded} of {len(starts)}."
    )
    title = "Basins, and what each solver spends"
    draw = partial(basins_figure, energy, solvers=solvers(), grid=SIDE, reach=plane.reach, steps=STEPS, title=title)
    return PlaneScene("basins", title, said, description, facts, numbers, draw)
