"""`implicit-attention compare --suite retrieval`: what every potential stores, from how far, and what is proved."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from .. import LogSumExp, solve
from ..comparison import status_counts
from ..solvers import Anderson
from .bounds import (
    at_ratio,
    capacity,
    contraction_bound,
    longest,
    pattern_bound,
    random_patterns,
    separations,
    step_bound,
)
from .compare import load
from .contenders import STOP
from .data import TASKS, DataSample, draw
from .evaluate import SUCCESS
from .potentials import POTENTIALS, choice, energy_of
from .progress import Progress
from .retrieval import FACTORS, nearest, retrieved
from .settings import CompareSettings
from .table import cut_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The two kinds of curves: half-masked queries against the number of patterns, noisy ones against the noise.
CAPACITY, BASIN = "capacity", "basin"
#: Without energy: the query itself, and the nearest patterns.
IDENTITY = "identity"
#: Noise in units of the patterns' own root mean square.
NOISES = (0.25, 0.5, 1.0, 1.5, 2.0)
COUNTS = (10, 30, 100, 300, 1000)
#: Noise of the half-masked queries' companions, which no curve shows.
UNUSED_NOISE = 0.5
#: Separation over its threshold.
RATIOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
#: (beta, K, d, p): two examples of theorem 3 in Ramsauer et al. (2020), and shorter patterns
#: of which nothing is proved.
THEOREM = ((1.0, 3.0, 20, 0.001), (1.0, 1.0, 75, 0.001), (1.0, 0.8, 20, 0.001))


@dataclasses.dataclass(frozen=True)
class RetrievalSuite:
    """Everything that `--suite retrieval` measured.

    Attributes:
        settings: the options.
        rows: for every potential, data set, curve and point, plain numbers.
        bounds: of theorems 3 to 5 beside what was measured.
        seconds: of everything.
    """

    settings: CompareSettings
    rows: list[dict[str, Any]]
    bounds: dict[str, Any]
    seconds: float


def sizes(settings: CompareSettings) -> dict[str, Any]:
    """The sizes of the measurement."""
    quick = settings.quick
    return {
        "draws": 3 if quick else 8,
        "queries": 20 if quick else 100,
        "factors": FACTORS[::3] if quick else FACTORS,
        "counts": [*(n for n in COUNTS if n < settings.stored), settings.stored],
        "noises": NOISES[::2] if quick else NOISES,
        "steps": 50 if quick else STOP["max_steps"],
        "sets": 10 if quick else 50,
    }


def line(row: dict[str, Any]) -> str:
    """Return the line that is printed when a potential has finished."""
    if "refused" in row:
        return f"refused: {row['refused']}"
    return f"best rate {row['mean']:.3f} of {row['curve']}, {row['data']}, at beta {row['beta']:.3g}"


def run(settings: CompareSettings, progress: Progress) -> RetrievalSuite:
    """Measure the curves of all potentials, and the bounds."""
    begin = time.perf_counter()
    settings, own = load(settings)
    own = own[own.isfinite().all(-1)]
    generator = torch.Generator().manual_seed(settings.seed)
    random = torch.randn(len(own), own.shape[1], generator=generator, dtype=own.dtype)
    random = random / random.norm(dim=-1, keepdim=True) * math.sqrt(max(own.shape[1] - 1, 1))
    data = {"digits" if settings.data is None else "data": own, "random": random}
    points = [point for name, patterns in data.items() for point in _points(settings, name, patterns)]
    rows = []
    names = list(POTENTIALS) if settings.potential is None else [settings.potential]
    for index, name in enumerate(names):
        progress.begin(name, index, len(names) + 1)
        found = []
        for done, point in enumerate(points):
            found.append(_measure(settings, name, point))
            progress.part(len(points) * index + done, len(points) * (len(names) + 1))
        progress.end(name, max(found, key=lambda row: row["mean"]))
        rows += found
    for point in points:
        rows += _trivial(point)
    progress.begin("bounds of log-sum-exp", len(names), len(names) + 1)
    return RetrievalSuite(settings, rows, measure_bounds(settings), time.perf_counter() - begin)


@dataclasses.dataclass(frozen=True)
class _RetrievalPoint:
    """A point of a curve: queries of one kind, and what the nearest patterns are."""

    data: str
    curve: str
    at: float
    sample: DataSample
    trivial: dict[str, Tensor]


def _points(settings: CompareSettings, name: str, patterns: Tensor) -> list[_RetrievalPoint]:
    size, scale = sizes(settings), float(patterns.square().mean().sqrt())
    dtype = getattr(torch, settings.dtype)

    def point(curve: str, at: float, count: int, noise: float) -> _RetrievalPoint:
        drawn = draw(
            patterns,
            patterns=count,
            queries=min(count, size["queries"]),
            noise=noise * scale,
            draws=size["draws"],
            seed=settings.seed,
        ).to(torch.device(settings.device), dtype)
        part = drawn.parts[TASKS.index("half-masked" if curve == CAPACITY else "noisy")]
        kept = DataSample(drawn.keys, drawn.queries[:, part], drawn.targets[:, part])
        found = {IDENTITY: kept.queries} | {known: z[:, part] for known, z in nearest(drawn).items()}
        return _RetrievalPoint(name, curve, at, kept, found)

    stored = [point(CAPACITY, n, n, UNUSED_NOISE) for n in size["counts"]]
    return stored + [point(BASIN, noise, settings.stored, noise) for noise in size["noises"]]


def _rates(z: Tensor, sample: DataSample) -> dict[str, Any]:
    """Shares of queries that are retrieved, and whose nearest pattern by angle is the right one."""
    hits = retrieved(z, sample).double().mean(-1)
    angles = z.double() @ (sample.keys.double() / sample.keys.double().norm(dim=-1, keepdim=True)).mT
    right = torch.arange(z.shape[-2], device=z.device)
    # NaN is never the nearest.
    named = (angles.nan_to_num(-torch.inf).argmax(-1) == right) & z.isfinite().all(-1)
    return {
        "rates": hits.tolist(),
        "mean": float(hits.mean()),
        "std": float(hits.std()),
        "named": float(named.double().mean()),
    }


@torch.no_grad()
def _measure(settings: CompareSettings, name: str, point: _RetrievalPoint) -> dict[str, Any]:
    """The point of a potential at its own best beta there; of equal ones at the smallest."""
    size, sample = sizes(settings), point.sample
    betas = (
        [factor * choice(name).beta for factor in size["factors"]] if settings.beta is None else [float(settings.beta)]
    )
    solver = Anderson(rtol=STOP["rtol"], atol=STOP["atol"], max_steps=size["steps"])
    row: dict[str, Any] = {"method": name, "data": point.data, "curve": point.curve, "at": point.at}
    tried, status, refusals = [], Counter[str](), []
    for beta in betas:
        try:
            energy = energy_of(
                sample.keys, sample.queries, sample.usable, beta=beta, anchor=settings.anchor, potential=name
            )
        except ValueError as error:
            # Without a lower bound there is no equilibrium to ask for.
            refusals.append({"beta": beta, "message": str(error)})
            continue
        solution = solve(energy, sample.queries, solver=solver, on_failure="ignore")
        counts = status_counts(solution.status)
        status.update(counts)
        tried.append({"beta": beta, "status": counts} | _rates(solution.value, sample))
    if not tried:
        nothing = {"rates": [0.0] * size["draws"], "mean": 0.0, "std": 0.0, "named": 0.0, "beta": None, "status": {}}
        return row | nothing | {"refused": refusals[0]["message"], "refusals": refusals}
    best = max(tried, key=lambda entry: (entry["mean"], entry["named"]))
    seen: Any = best["status"]
    failed = not {"CONVERGED", "UNSTABLE"} & set(seen)
    return row | best | {"failed": failed, "tried": tried, "status_of_all_betas": dict(status), "refusals": refusals}


def _trivial(point: _RetrievalPoint) -> list[dict[str, Any]]:
    place = {"data": point.data, "curve": point.curve, "at": point.at, "beta": None, "status": {}}
    return [{"method": name} | place | _rates(z, point.sample) for name, z in point.trivial.items()]


def measure_bounds(settings: CompareSettings) -> dict[str, Any]:
    """Log-sum-exp beside what is proved of it: fixed points and steps near the threshold, and random patterns."""
    sets = sizes(settings)["sets"]
    found = [ratio_row(ratio, sets=sets, seed=settings.seed) for ratio in RATIOS]
    return {
        "near_threshold": found,
        "capacity": [_stored(*case, sets=20 * sets, seed=settings.seed) for case in THEOREM],
    }


@torch.no_grad()
def ratio_row(ratio: float, *, sets: int, seed: int) -> dict[str, Any]:
    """Patterns whose separation is `ratio` times the threshold: every measured length over its bound.

    A ratio above 1 is a violation. Fixed points are those that the map reaches from the pattern; steps start on the
    sphere of radius 1/(beta N M) around it.
    """
    fixed, step, contraction, own_error = [], [], [], []
    for index, (count, dim, spread) in enumerate([(2, 3, 1.0), (5, 8, 1.0), (5, 8, 0.3), (20, 10, 1.0)]):
        sphere = random_patterns(sets, count, dim, length=2.0, spread=spread, seed=seed + index)
        betas = at_ratio(sphere, ratio)
        kept = betas.isfinite()
        keys = sphere[:, None].expand(-1, count, -1, -1)[kept]
        own = sphere[kept][:, None]
        beta, length, separation = betas[kept], longest(keys), separations(sphere)[kept]
        potential = LogSumExp(keys, beta)
        z = own
        for _ in range(1000):
            z = potential.mean(z)
        distance = (z - own).norm(dim=-1)[:, 0]
        allowed = 1 / (beta * count * length)
        fixed.append(distance / allowed)
        direction = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed), dtype=own.dtype)
        start = own + allowed[:, None, None] * direction / direction.norm(dim=-1, keepdim=True)
        farthest = torch.maximum((start - own).norm(dim=-1)[:, 0], distance)
        stepped = potential.mean(start)
        step.append((stepped - own).norm(dim=-1)[:, 0] / step_bound(beta, count, length, separation, farthest))
        shrunk = (stepped - z).norm(dim=-1)[:, 0] / (start - z).norm(dim=-1)[:, 0]
        contraction.append(shrunk / contraction_bound(beta, count, length, separation, farthest))
        own_error.append(distance / pattern_bound(beta, count, length, separation))
    measured = {"fixed_point": fixed, "step": step, "contraction": contraction, "pattern": own_error}
    return {"ratio": ratio, "patterns": sum(map(len, fixed))} | {
        name: {
            "worst": float(torch.cat(parts).max()),
            "median": float(torch.cat(parts).median()),
            "violations": int((torch.cat(parts) > 1 + 1e-9).sum()),
        }
        for name, parts in measured.items()
    }


@torch.no_grad()
def _stored(beta: float, factor: float, dim: int, failure: float, *, sets: int, seed: int) -> dict[str, Any]:
    """The share of random sets all of whose patterns are stored: each has a fixed point of its own, in its own ball.

    The balls end half-way to the nearest other pattern.
    """
    promised, c = capacity(beta, factor, dim, failure)
    proved = [] if promised is None else [math.floor(promised)]
    counts = sorted({*proved, *(2**power for power in range(1, 11))})
    shares = []
    for count in counts:
        repeats = max(sets * 4 // count, 10)
        keys = random_patterns(repeats, count, dim, length=factor * math.sqrt(dim - 1), spread=1.0, seed=seed)
        z, potential = keys, LogSumExp(keys, beta)
        for _ in range(30):
            z = potential.mean(z)
        gaps = torch.cdist(keys, keys).masked_fill(torch.eye(count, dtype=torch.bool), torch.inf).amin(-1)
        inside = (z - keys).norm(dim=-1) < gaps / 2
        shares.append({"count": count, "sets": repeats, "all_stored": float(inside.all(-1).double().mean())})
    return {"beta": beta, "K": factor, "dim": dim, "p": failure, "promised": promised, "c": c, "shares": shares}


def files(suite: RetrievalSuite) -> tuple[str, dict[str, Any], dict[str, Figure]]:
    """Everything that was measured, and one picture."""
    from ..plotting import potentials_figure

    settings = suite.settings
    panels = {}
    for data in dict.fromkeys(row["data"] for row in suite.rows):
        for curve in (CAPACITY, BASIN):
            rows = [row for row in suite.rows if (row["data"], row["curve"]) == (data, curve)]
            panels[_title(settings, data, curve)] = rows
    size = sizes(settings)
    title = (
        "Share of patterns retrieved (relative error < 1e-2), each potential at its own best beta, mean over "
        f"{size['draws']} draws\nin brackets, where none is: states whose nearest pattern by angle is the right one; "
        "x: every solve failed there. Below: log-sum-exp and its published bounds"
    )
    figure = potentials_figure(panels, suite.bounds, title=title)
    options = {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("out", "data", "beta")}
    measured = {
        "success": SUCCESS,
        **{k: v for k, v in size.items() if k != "factors"},
        "factors": list(size["factors"]),
    }
    content = {
        "command": "compare",
        "settings": options | {"beta": None if settings.beta is None else float(settings.beta)} | measured,
        "rows": suite.rows,
        "bounds": suite.bounds,
        "seconds": suite.seconds,
    }
    return "retrieval.json", content, {"potentials.png": figure}


def _title(settings: CompareSettings, data: str, curve: str) -> str:
    what = "random patterns" if data == "random" else data
    if curve == CAPACITY:
        return f"{what}, half-masked\nnumber of patterns stored"
    return f"{what}, {settings.stored} stored\nnoise / root mean square"


def show(suite: RetrievalSuite, console: Console) -> None:
    """Print the rates of every potential, and how often a bound was broken."""
    for data in dict.fromkeys(row["data"] for row in suite.rows):
        mine = [row for row in suite.rows if row["data"] == data]
        cells, headers = [], ["method"]
        for name in dict.fromkeys(row["method"] for row in mine):
            own = [row for row in mine if row["method"] == name]
            headers = ["method", *(f"{'N' if r['curve'] == CAPACITY else 'noise'}\n{r['at']:g}" for r in own), "status"]
            words = Counter[str]()
            for row in own:
                words.update(row["status"])
            status = ", ".join(f"{n} {word}" for word, n in words.items() if word != "CONVERGED") or "-"
            if all("refused" in row for row in own):
                status = "refused"
            rates = ["refused" if "refused" in r else f"{r['mean']:.2f} ({r['named']:.2f})" for r in own]
            cells.append([name, *rates, status])
        title = f"{data}: share retrieved, and in brackets of states whose nearest pattern by angle is the right one"
        for table in cut_tables(title, headers, cells, console.width):
            console.print(table)
            console.print()
    for name, reason in {row["method"]: row["refused"] for row in suite.rows if "refused" in row}.items():
        console.print(f"  {name} refused: {reason}", style="dim", markup=False)
    above = [row for row in suite.bounds["near_threshold"] if row["ratio"] >= 1]
    broken = sum(row[name]["violations"] for row in above for name in ("fixed_point", "step", "contraction", "pattern"))
    tried = 4 * sum(row["patterns"] for row in above)
    console.print(
        f"log-sum-exp from the separation threshold on: {broken} violations of theorems 3 to 5 in {tried} checks; at "
        f"the threshold fixed points lie up to {above[0]['fixed_point']['worst']:.2f} of the allowed distance away",
        style="bold",
        markup=False,
    )
    console.print()
