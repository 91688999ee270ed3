"""Scenes of `landscape` in which the energy itself changes, and those that ask where every start leads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ... import solve
from ...energies import AnchoredEnergy
from ...plotting import basins, basins_figure, landscape_figure
from ...potentials import LogSumExp, Potential
from ...potentials.distance import DistanceLogSumExp
from ...potentials.entmax import Entmax
from ...solvers import Anderson, Picard, Solver
from .plane import Plane, PlaneScene, descend, have_own, nearest, number, point, points, square, stationary
from .steps import COLD, VALLEYS, seen, stationary_numbers, told, ways

ANCHORS = (0.1, 0.3, 0.7)
#: Starts along a side, and steps, of basins.
SIDE, STEPS = 81, 200
#: A start has reached a point if it ends so near, in units of half the side of the picture.
NEAR = 1e-3


def anchored(plane: Plane, anchor: float) -> PlaneScene:
    """One query's energy, tilted towards it."""
    query, beta = plane.queries[:1], COLD * plane.beta
    potential = LogSumExp(plane.patterns, beta)
    energy = AnchoredEnergy(potential, query, anchor)
    solution = solve(energy, query, solver=Picard(max_steps=2000, atol=1e-12, rtol=1e-12), trace=True)
    found = stationary(potential, plane.starts, anchor=anchor, query=query)
    assert solution.trace is not None
    end = solution.value[0]
    way = float(torch.linalg.vector_norm(end - query[0]))
    numbers = {
        "potential": "LogSumExp",
        "beta": beta,
        "anchor": anchor,
        "query": query[0],
        "path": solution.trace.value,
        "energy": solution.trace.energy,
        "equilibrium": end,
        "evaluations": solution.num_evals[0],
        "stationary_points": stationary_numbers(found),
    }
    facts = {
        "beta": f"{beta:.4g}",
        "query": point(query[0]),
        "equilibrium": f"{point(end, 4)}, {way:.3g} away",
        "evaluations of plain steps": str(int(solution.num_evals[0])),
        "stationary points": told(found),
    }
    left = len(found.of_kind("minimum"))
    said = (
        f"With an anchor of {anchor:g} the energy of the query {point(query[0])} has "
        f"{number(left, 'minimum', 'minima')}, and plain steps end {way:.3g} from the query."
    )
    description = (
        f"{seen('the energy of one query', plane, found.of_kind('minimum'))} "
        f"A line leads the query from {point(query[0])} to {point(end)}."
    )
    title = f"Anchored: a weight of {anchor:g} on the query"
    draw = partial(
        landscape_figure,
        energy,
        query,
        trace=solution.trace,
        fixed_points=found,
        reach=plane.reach,
        title=f"{title}, {point(query[0])}",
    )
    return PlaneScene(f"anchor-{anchor:g}", title, said, description, facts, numbers, draw)


def _of_potential(plane: Plane, name: str, title: str, potential: Potential, sentence: str, notes: str) -> PlaneScene:
    """Five plain steps down an energy without anchor, and what every start of the picture reaches."""
    energy = AnchoredEnergy(potential, plane.queries, 0.0)
    solution = descend(energy, plane.queries, 1.0, 5)
    found = basins(energy, grid=SIDE, reach=plane.reach, steps=STEPS)
    assert solution.trace is not None
    apart = nearest(plane.patterns, found.attractors)[0]
    alone = have_own(plane.patterns, found.attractors, plane.reach)
    numbers = {
        "potential": type(potential).__name__,
        "beta": COLD * plane.beta,
        "anchor": 0.0,
        "step_size": 1.0,
        "steps": 5,
        "path": solution.trace.value,
        "energy": solution.trace.energy,
        "attractors": found.attractors,
        "attractor_energies": found.energies,
        "starts_that_end_there": found.counts,
        "patterns_with_an_attractor": alone,
        "distance_of_patterns_from_an_attractor": apart,
    }
    facts = {
        "beta": f"{COLD * plane.beta:.4g}",
        "steps": "5 of size 1",
        "attractors": points(found.attractors),
        f"of {found.index.numel()} starts end there": ", ".join(map(str, found.counts.tolist())),
        "from a pattern to an attractor": f"{float(apart.mean()):.2g} in the mean, {float(apart.max()):.2g} at most",
    }
    said = sentence.format(alone=int(alone.sum()), all=len(apart), exact=int((apart < 1e-9 * plane.reach).sum()))
    description = f"{seen(f'the energy {notes}', plane, found.attractors)} {ways(plane.queries, solution.value)}"
    look: dict[str, Any] = {"trace": solution.trace, "patterns": plane.patterns, "reach": plane.reach, "title": title}
    draw = partial(landscape_figure, energy, plane.queries, fixed_points=found.points, **look)
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
    """Those of which basins are drawn."""
    return {
        "plain steps": Picard(max_steps=STEPS),
        "Anderson": Anderson(max_steps=STEPS),
        "Anderson, unguarded": Anderson(max_steps=STEPS, guard="none"),
    }


def by_solver(plane: Plane) -> PlaneScene:
    beta = VALLEYS * plane.beta
    potential = LogSumExp(plane.patterns, beta)
    energy = AnchoredEnergy(potential, plane.queries, 0.0)
    found = basins(energy, grid=SIDE, reach=plane.reach, steps=STEPS)
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
    numbers = {
        "potential": "LogSumExp",
        "beta": beta,
        "starts": len(starts),
        "attractors": found.attractors,
        "attractor_energies": found.energies,
        "starts_that_end_there": found.counts,
        "stationary_points": stationary_numbers(fixed),
        "solvers": rows,
    }
    facts = {"beta": f"{beta:.4g}", "attractors": points(found.attractors)}
    facts[f"of {len(starts)} starts end there"] = ", ".join(map(str, found.counts.tolist()))
    for name, row in rows.items():
        lost = f"{int(row['at_no_minimum'])} starts end at no minimum, {int(row['not_converged'])} nowhere"
        facts[name] = f"{float(row['mean_evaluations']):.1f} evaluations in the mean; {lost}"
    unguarded = int(rows["Anderson, unguarded"]["at_no_minimum"])
    said = (
        f"Plain steps part the plane into {number(len(found.attractors), 'basin')}; Anderson without its safeguard "
        f"ends at a saddle or a maximum from {100 * unguarded / len(starts):.2g} % of all starts."
    )
    evaluations = "; ".join(f"{name} {float(row['mean_evaluations']):.1f}" for name, row in rows.items())
    description = (
        f"Left the plane, both coordinates from {-plane.reach:.3g} to {plane.reach:.3g}, coloured by the fixed point "
        f"that plain steps reach: {number(len(found.attractors), 'region')} around {points(found.attractors)}. "
        f"Beside it for each solver the plane by its number of evaluations, in the mean {evaluations}; starts that end "
        f"at a saddle have a colour of their own, for Anderson without safeguard {unguarded} of {len(starts)}."
    )
    title = "Basins, and what each solver spends"
    draw = partial(basins_figure, energy, solvers=solvers(), grid=SIDE, reach=plane.reach, steps=STEPS, title=title)
    return PlaneScene("basins", title, said, description, facts, numbers, draw)
