"""Numbers of patterns that an energy stores, and distances from which it finds them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import solve
from ..solution import status_counts
from ..solvers import Anderson
from .contenders import STOP
from .data import TASKS, DataSample
from .potentials import energy_of
from .retrieval import nearest, retrieved

#: The two kinds of curves: half-masked queries against the number of patterns, noisy ones against the noise.
CAPACITY, BASIN = "capacity", "basin"
#: The method that returns the query itself.
IDENTITY = "identity"
#: Noise in units of the patterns' own root mean square.
NOISES = (0.25, 0.5, 1.0, 1.5, 2.0)
COUNTS = (10, 30, 100, 300, 1000)
#: Noise of the noisy queries that are drawn beside half-masked ones, and that no curve shows.
UNUSED_NOISE = 0.5


@dataclasses.dataclass(frozen=True)
class RetrievalPoint:
    """A point of a curve: queries of one kind, and the answers that need no energy."""

    data: str
    curve: str
    at: float
    sample: DataSample
    trivial: dict[str, Tensor]


def points(
    name: str, take: Callable[[int, float], DataSample], *, stored: int, counts: list[int], noises: tuple[float, ...]
) -> list[RetrievalPoint]:
    """Draw the points of both curves of one data set.

    Args:
        name: of the data.
        take: draws so many patterns, with queries of so much noise in units of the patterns' own.
        stored: the number of patterns beside `noises`.
        counts: numbers of patterns.
        noises: of the queries.
    """

    def point(curve: str, at: float, count: int, noise: float) -> RetrievalPoint:
        drawn = take(count, noise)
        part = drawn.parts[TASKS.index("half-masked" if curve == CAPACITY else "noisy")]
        kept = DataSample(drawn.keys, drawn.queries[:, part], drawn.targets[:, part])
        answers = {IDENTITY: kept.queries} | {known: z[:, part] for known, z in nearest(drawn).items()}
        return RetrievalPoint(name, curve, at, kept, answers)

    many = [point(CAPACITY, n, n, UNUSED_NOISE) for n in counts]
    return many + [point(BASIN, noise, stored, noise) for noise in noises]


def _rates(z: Tensor, sample: DataSample) -> dict[str, Any]:
    """Return the shares of queries that are retrieved, and whose nearest pattern by angle is the right one."""
    hits = retrieved(z, sample).double().mean(-1)
    angles = z.double() @ (sample.keys.double() / sample.keys.double().norm(dim=-1, keepdim=True)).mT
    right = torch.arange(z.shape[-2], device=z.device)
    # NaN is never the nearest.
    named = (angles.nan_to_num(-torch.inf).argmax(-1) == right) & z.isfinite().all(-1)
    shares = {"mean": float(hits.mean()), "std": float(hits.std()), "named": float(named.double().mean())}
    return {"rates": hits.tolist(), **shares}


@torch.no_grad()
def measure(
    name: str, point: RetrievalPoint, betas: Sequence[float], *, anchor: float, max_steps: int
) -> dict[str, Any]:
    """Measure a potential at a point at its own best beta there, of equal ones the smallest."""
    sample = point.sample
    solver = Anderson(rtol=STOP["rtol"], atol=STOP["atol"], max_steps=max_steps)
    row: dict[str, Any] = {"method": name, "data": point.data, "curve": point.curve, "at": point.at}
    tried, status, refusals = list[dict[str, Any]](), Counter[str](), list[dict[str, Any]]()
    for beta in betas:
        try:
            energy = energy_of(sample.keys, sample.queries, sample.usable, beta=beta, anchor=anchor, potential=name)
        except ValueError as error:
            # An energy without a lower bound has no equilibrium.
            refusals.append({"beta": beta, "message": str(error)})
            continue
        solution = solve(energy, sample.queries, solver=solver, on_failure="ignore")
        counts = status_counts(solution.status)
        status.update(counts)
        tried.append({"beta": beta, "status": counts} | _rates(solution.value, sample))
    if not tried:
        nothing = {"rates": [0.0] * len(sample.keys), "mean": 0.0, "std": 0.0, "named": 0.0, "beta": None, "status": {}}
        return row | nothing | {"refused": refusals[0]["message"], "refusals": refusals}
    best = max(tried, key=lambda entry: (entry["mean"], entry["named"]))
    failed = not {"CONVERGED", "UNSTABLE"} & set(best["status"])
    return row | best | {"failed": failed, "tried": tried, "status_of_all_betas": dict(status), "refusals": refusals}


def trivial(point: RetrievalPoint) -> list[dict[str, Any]]:
    """Return a row for the query itself, and one for each of the nearest patterns."""
    place = {"data": point.data, "curve": point.curve, "at": point.at, "beta": None, "status": {}}
    return [{"method": name} | place | _rates(z, point.sample) for name, z in point.trivial.items()]
