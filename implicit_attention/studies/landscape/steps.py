"""Scenes of `landscape` in which queries step down the energy of stored patterns, or of each other."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import Solution, solve
from ...diagnostics import StationaryPoints
from ...energies import AnchoredEnergy, RepeatedSelfAttention
from ...plotting import landscape_figure, step_norm_figure, step_norms
from ...potentials import LogSumExp
from ...solvers import Picard
from .plane import Plane, PlaneScene, course, descend, have_own, listing, nearest, number, point, points, stationary

#: Inverse temperatures of the scenes, in units of that of the plane.
HOT, MILD, VALLEYS, COLD = 0.2, 2.0, 4.0, 10.0
DIMS, SCALES = (2, 4, 8, 16, 32, 64, 128, 256, 512), (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


class Moved(NamedTuple):
    """Queries after some steps: their energy, their path, its stationary points, and how far each query came."""

    energy: AnchoredEnergy
    solution: Solution
    points: StationaryPoints
    numbers: dict[str, Any]
    facts: dict[str, str]
    lengths: Tensor

    @property
    def ends(self) -> Tensor:
        return self.solution.value

    @property
    def minima(self) -> Tensor:
        return self.points.of_kind("minimum")


def moved(keys: Tensor, queries: Tensor, starts: Tensor, beta: float, step_size: float, steps: int) -> Moved:
    """Make so many steps on the energy of `keys`, whose stationary points are searched from `starts`."""
    potential = LogSumExp(keys, beta)
    energy = AnchoredEnergy(potential, queries, 0.0)
    solution = descend(energy, queries, step_size, steps)
    fixed = stationary(potential, starts)
    numbers = course(energy, beta, solution, step_size=step_size, steps=steps)
    path, energies = numbers["path"], numbers["energy"]
    numbers["stationary_points"] = stationary_numbers(fixed)
    lengths = torch.linalg.vector_norm(path[-1] - path[0], dim=-1)
    facts = {
        "beta": f"{beta:.4g}",
        "steps": f"{steps} of size {step_size:g}",
        "a query moves": f"{float(lengths.mean()):.3g} in the mean, {float(lengths.max()):.3g} at most",
        "mean energy": f"{float(energies[0].mean()):.4g} before, {float(energies[-1].mean()):.4g} after",
        "stationary points": kinds(fixed),
    }
    return Moved(energy, solution, fixed, numbers, facts, lengths)


def stationary_numbers(fixed: StationaryPoints) -> dict[str, Any]:
    return {"value": fixed.value, "energy": fixed.energy, "curvatures": fixed.curvatures, "kind": fixed.kind}


def counts(fixed: StationaryPoints) -> tuple[int, int, int]:
    """Count minima, saddles and maxima."""
    return fixed.kind.count("minimum"), fixed.kind.count("saddle"), fixed.kind.count("maximum")


def kinds(fixed: StationaryPoints) -> str:
    """Write `two minima and one saddle`."""
    nouns = (("minimum", "minima"), ("saddle", "saddles"), ("maximum", "maxima"))
    return listing([number(count, *noun) for count, noun in zip(counts(fixed), nouns, strict=True) if count])


def seen(of: str, plane: Plane, minima: Tensor) -> str:
    """Return the beginning of a description of contours."""
    where = f"{'its lowest point' if len(minima) == 1 else 'hollows'} at {points(minima)}"
    among = f"among {number(len(plane.patterns), 'stored pattern')}, drawn as open circles"
    return f"Contours of {of}, both coordinates from {-plane.reach:.3g} to {plane.reach:.3g}, with {where}, {among}."


def descended(it: Moved) -> str:
    """Return the end of a description of paths."""
    starts = it.numbers["path"][0]
    before, after = (float(nearest(states, it.minima)[0].mean()) for states in (starts, it.ends))
    return f"{ways(starts, it.ends)} The mean distance to the nearest minimum goes from {before:.2f} to {after:.2f}."


def ways(starts: Tensor, ends: Tensor) -> str:
    """Say whose paths there are, and where the first of them lead."""
    pairs = [f"from {point(start)} to {point(end)}" for start, end in zip(starts[:3], ends[:3], strict=True)]
    return f"Lines follow {number(len(starts), 'query', 'queries')}, the first {listing(pairs)}."


def scene(name: str, title: str, sentence: str, plane: Plane, it: Moved, **look: Any) -> PlaneScene:
    """Return the scene of queries that moved."""
    description = f"{seen('the energy', plane, it.minima)} {descended(it)}"
    drawn = {"trace": it.solution.trace, "fixed_points": it.points, "reach": plane.reach, "title": title} | look
    draw = partial(landscape_figure, it.energy, it.numbers["path"][0], **drawn)
    return PlaneScene(name, title, sentence, description, it.facts, it.numbers, draw)


def _moved(plane: Plane, factor: float, step_size: float, steps: int) -> Moved:
    return moved(plane.patterns, plane.queries, plane.starts, factor * plane.beta, step_size, steps)


def _apart(it: Moved) -> float:
    """Return the largest distance between ends, and note it among the numbers and the facts."""
    apart = float(torch.pdist(it.ends).max())
    it.numbers["largest_distance_between_ends"] = apart
    it.facts["ends"] = f"at most {apart:.2g} apart"
    return apart


def one_step(plane: Plane) -> PlaneScene:
    it = _moved(plane, 1.0, 1.0, 1)
    softmax = (plane.beta * plane.queries @ plane.patterns.mT).softmax(-1) @ plane.patterns
    apart = float((it.ends - softmax).abs().max())
    it.numbers["softmax_attention"] = softmax
    it.numbers["difference_from_softmax_attention"] = apart
    it.facts["step - softmax attention"] = f"at most {apart:.1e}"
    said = "One gradient step of size 1 down this energy is softmax attention over the patterns."
    return scene("one-step", "One big step is softmax attention", said, plane, it)


def surface(plane: Plane) -> PlaneScene:
    it = _moved(plane, VALLEYS, 1.0, 5)
    said = f"The energy as a surface, at beta {it.numbers['beta']:.3g}: attention rolls downhill into its hollows."
    return scene("surface", "Minima, saddles and maxima as a surface", said, plane, it, kind="surface")


def small_steps(plane: Plane) -> PlaneScene:
    it = _moved(plane, 1.0, 0.1, 1)
    length = float(it.lengths.mean())
    said = f"A step of size 0.1 goes a tenth of the way of softmax attention, {length:.2g} in the mean."
    return scene("small-steps", "Small steps go nowhere", said, plane, it)


def many_steps(plane: Plane) -> PlaneScene:
    it = _moved(plane, 1.0, 1.0, 10)
    apart = _apart(it)
    minima = number(len(it.minima), "minimum", "minima")
    said = f"Ten big steps lead to {minima}: queries end at most {apart:.2g} apart, wherever they began."
    return scene("many-steps", "Many steps forget the query", said, plane, it)


def higher_temperature(plane: Plane) -> PlaneScene:
    it = _moved(plane, HOT, 1.0, 1)
    _apart(it)
    said = f"At beta {it.numbers['beta']:.3g} one step brings every query near the mean of all patterns."
    return scene("higher-temperature", "Higher temperature: one bowl", said, plane, it)


def lower_temperature(plane: Plane) -> PlaneScene:
    it = _moved(plane, COLD, 1.0, 5)
    kept = have_own(plane.patterns, it.minima, plane.reach)
    forgotten = plane.patterns[~kept]
    it.numbers["patterns_with_an_attractor"] = kept
    it.facts["patterns with a minimum of their own"] = f"{int(kept.sum())} of {len(kept)}"
    what = f"; {points(forgotten)} has none, as dot products prefer longer patterns" if len(forgotten) == 1 else ""
    own = f"{int(kept.sum())} of {len(kept)} patterns have a valley of their own{what}."
    said = f"At beta {it.numbers['beta']:.3g}, {own}"
    return scene("lower-temperature", "Lower temperature: a valley for each", said, plane, it)


def critical(plane: Plane) -> PlaneScene:
    it = _moved(plane, VALLEYS, 1.0, 60)
    minima, saddles, maxima = counts(it.points)
    total = minima - saddles + maxima
    it.numbers["minima_minus_saddles_plus_maxima"] = total
    it.facts["minima - saddles + maxima"] = f"{minima} - {saddles} + {maxima} = {total}"
    stop = "plain steps end at minima, a solver without a safeguard may stop at a saddle"
    said = f"At beta {it.numbers['beta']:.3g} the energy has {kinds(it.points)}{f'; {stop}' if saddles else ''}."
    return scene("stationary-points", "Minima, saddles and maxima", said, plane, it)


def with_maps(plane: Plane) -> PlaneScene:
    by_query, by_key, by_value = plane.maps
    keys, queries, values = plane.patterns @ by_key.mT, plane.queries @ by_query.mT, plane.patterns @ by_value.mT
    beta = MILD * plane.beta
    extent = float(torch.cat([keys, queries, values]).abs().max())
    wide = Plane(keys, queries, plane.maps, beta, max(plane.reach, 1.1 * extent))
    it = moved(keys, queries, wide.starts, beta, 1.0, 1)
    read = (beta * it.ends @ keys.mT).softmax(-1) @ values
    before, after = it.energy.energy(it.ends), it.energy.energy(read)
    uphill = int((after > before).sum())
    it.numbers.update(maps={"query": by_query, "key": by_key, "value": by_value}, read_out=read, energy_read_out=after)
    it.facts["values lead uphill"] = f"for {uphill} of {len(read)} queries"
    said = (
        "Query and key maps choose the start and the landscape; the values are read once at the end, "
        f"and lead uphill for {uphill} of {len(read)} queries."
    )
    drawn = scene("maps", "With query, key and value maps", said, wide, it, values=values)
    more = f" Arrows lead on from there to what is read of the values, {points(read)}."
    return dataclasses.replace(drawn, description=drawn.description + more)


def self_frozen(plane: Plane) -> PlaneScene:
    patterns = plane.patterns
    it = moved(patterns, patterns, plane.starts, plane.beta, 1.0, 1)
    own = (plane.beta * patterns @ patterns.mT).softmax(-1).diagonal()
    it.numbers["attention_to_itself"] = own
    it.facts["attention to itself"] = f"{float(own.mean()):.2g} in the mean"
    said = (
        f"Patterns that attend to each other move by {float(it.lengths.mean()):.2g} in the mean, "
        f"and each gives {float(own.mean()):.2g} of its attention to itself."
    )
    return scene("self-frozen", "Bare self-attention, the context frozen", said, plane, it)


def self_moving(plane: Plane) -> PlaneScene:
    patterns, beta, steps = plane.patterns, plane.beta, 3
    repeated = RepeatedSelfAttention(patterns, beta)
    solver = Picard(max_steps=steps, atol=0.0, rtol=0.0)
    trace = solve(repeated, patterns, solver=solver, trace=True, on_failure="ignore").trace
    assert trace is not None
    states, weights = trace.value, repeated.probabilities(patterns)
    query_side, key_side = weights @ patterns, weights.mT @ patterns
    frozen = descend(repeated.frozen_energy(patterns), patterns, 1.0, steps)
    apart, apart_frozen = (float(torch.pdist(x).max()) if len(x) > 1 else 0.0 for x in (states[-1], frozen.value))
    gradient = patterns - query_side - key_side
    numbers = {
        "beta": beta,
        "steps": steps,
        "path": states,
        "largest_distance_between_ends": apart,
        "frozen": {"end": frozen.value, "largest_distance_between_ends": apart_frozen},
        "attention": query_side,
        "full_gradient": gradient,
    }
    facts = {
        "beta": f"{beta:.4g}",
        "steps": f"{steps} of size 1, the context set to the patterns after each",
        "ends": f"at most {apart:.2g} apart; with the context frozen {apart_frozen:.2g}",
        "gradient of the first pattern": f"{point(gradient[0], 4)} with both of its roles",
        "without its role as a key": f"{point((patterns - query_side)[0], 4)}",
    }
    within = f"{number(steps, 'step')} bring all patterns within {apart:.2g} of each other"
    said = f"Where the context moves along, {within}."
    description = (
        f"Contours of the energy of the first context, both coordinates from {-plane.reach:.3g} to {plane.reach:.3g}. "
        f"{ways(patterns, states[-1])} All end within {apart:.2g}."
    )
    title = "Bare self-attention, the context moving along"
    first = repeated.frozen_energy(patterns)
    draw = partial(landscape_figure, first, patterns, trace=trace, reach=plane.reach, title=title)
    return PlaneScene("self-moving", title, said, description, facts, numbers, draw)


def norms(plane: Plane) -> PlaneScene:
    del plane  # of Gaussian tokens in more dimensions
    lengths = step_norms(DIMS, SCALES)
    quartiles = lengths.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=lengths.dtype), dim=-1)
    rows = (dict(zip(DIMS, row.tolist(), strict=True)) for row in quartiles[1])
    median = dict(zip(SCALES, rows, strict=True))
    numbers = {
        "dims": DIMS,
        "beta_scales": SCALES,
        "tokens": 32,
        "draws": lengths.shape[-1],
        "first_quartile": quartiles[0],
        "median": quartiles[1],
        "third_quartile": quartiles[2],
    }
    facts = {f"{dim} dimensions, scale 1": f"{median[1.0][dim]:.2g}" for dim in (2, 8, 64, 512)}
    facts["512 dimensions, scale 0.5"] = f"{median[0.5][512]:.2g}"
    said = (
        "Of 32 Gaussian tokens at beta 1/sqrt d a step of bare self-attention moves much in few dimensions "
        "and nothing in many, which is why small heads still move."
    )
    listed = "; ".join(
        f"scale {scale:g}: " + ", ".join(f"{median[scale][dim]:.2g} in {dim} dimensions" for dim in (2, 64, 512))
        for scale in SCALES[::3]
    )
    description = (
        "Contours of the length of a step of bare self-attention over the dimension, in powers of two, and the scale "
        f"of beta; medians of {lengths.shape[-1]} draws. {listed}. From few dimensions and small scales to many and "
        "large ones it falls by many powers of ten."
    )
    title = "How far self-attention moves: dimension and scale"
    draw = partial(step_norm_figure, DIMS, SCALES, norms=lengths)
    return PlaneScene("step-norms", title, said, description, facts, numbers, draw)
