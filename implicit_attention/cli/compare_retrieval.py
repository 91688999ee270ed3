"""`implicit-attention compare --suite retrieval`: patterns that potentials store and find, and proved bounds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..plotting import potentials_figure
from ..studies.bounds import measure_bounds
from ..studies.capacity import BASIN, CAPACITY, COUNTS, NOISES, RetrievalPoint, measure, points, trivial
from ..studies.contenders import STOP
from ..studies.data import DataSample, draw
from ..studies.evaluate import SUCCESS
from ..studies.potentials import POTENTIALS
from ..studies.retrieval import FACTORS
from .command import Console, Files, Progress
from .compare import Compare
from .report import options_of
from .table import cut_tables, print_tables

#: The options with the number of patterns, and all measurements by the names of the JSON file.
Measured: TypeAlias = tuple[Compare, dict[str, Any]]


def sizes(settings: Compare) -> dict[str, Any]:
    """Return the sizes of the measurement."""
    quick = settings.quick
    return {
        "draws": 3 if quick else 8,
        "queries": 20 if quick else 100,
        "counts": [*(n for n in COUNTS if n < settings.stored), settings.stored],
        "noises": NOISES[::2] if quick else NOISES,
        "steps": 50 if quick else STOP["max_steps"],
        "sets": 10 if quick else 50,
        "factors": FACTORS[::3] if quick else FACTORS,
    }


def line(row: dict[str, Any]) -> str:
    """Return the line that is printed when a potential has finished."""
    if "refused" in row:
        return f"refused: {row['refused']}"
    return f"best rate {row['mean']:.3f} of {row['curve']}, {row['data']}, at beta {row['beta']:.3g}"


def run(settings: Compare, progress: Progress) -> Measured:
    """Measure the curves of all potentials, and the bounds."""
    settings, own = settings.load()
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
        mine = []
        for done, point in enumerate(points):
            mine.append(_measure(settings, name, point))
            progress.part(len(points) * index + done, len(points) * (len(names) + 1))
        progress.end(name, max(mine, key=lambda row: row["mean"]))
        rows += mine
    rows += [row for point in points for row in trivial(point)]
    progress.begin("bounds of log-sum-exp", len(names), len(names) + 1)
    bounds = measure_bounds(sets=sizes(settings)["sets"], seed=settings.seed)
    return settings, {"rows": rows, "bounds": bounds}


def _points(settings: Compare, name: str, patterns: Tensor) -> list[RetrievalPoint]:
    size, scale = sizes(settings), float(patterns.square().mean().sqrt())

    def take(count: int, noise: float) -> DataSample:
        shared = {"draws": size["draws"], "seed": settings.seed, "noise": noise * scale}
        drawn = draw(patterns, patterns=count, queries=min(count, size["queries"]), **shared)
        return drawn.to(torch.device(settings.device), getattr(torch, settings.dtype))

    return points(name, take, stored=settings.stored, counts=size["counts"], noises=size["noises"])


def _measure(settings: Compare, name: str, point: RetrievalPoint) -> dict[str, Any]:
    size = sizes(settings)
    usual = [factor * POTENTIALS[name].beta for factor in size["factors"]]
    betas = usual if settings.beta is None else [float(settings.beta)]
    return measure(name, point, betas, anchor=settings.anchor, max_steps=size["steps"])


def files(result: Measured) -> Files:
    """Return all measurements, and one picture."""
    settings, measured = result
    panels = {}
    for data in dict.fromkeys(row["data"] for row in measured["rows"]):
        for curve in (CAPACITY, BASIN):
            rows = [row for row in measured["rows"] if (row["data"], row["curve"]) == (data, curve)]
            panels[_title(settings, data, curve)] = rows
    size = sizes(settings)
    title = (
        "Share of patterns retrieved (relative error < 1e-2), each potential at its own best beta, mean over "
        f"{size['draws']} draws\nin brackets, where none is: states whose nearest pattern by angle is the right one; "
        "x: every solve failed there. Below: log-sum-exp and its published bounds"
    )
    figure = potentials_figure(panels, measured["bounds"], title=title)
    beta = {"beta": None if settings.beta is None else float(settings.beta), "success": SUCCESS}
    content = {"settings": options_of(settings, "data", "beta") | beta | size, **measured}
    return "retrieval.json", content, {"potentials.png": figure}


def _title(settings: Compare, data: str, curve: str) -> str:
    what = "random patterns" if data == "random" else data
    if curve == CAPACITY:
        return f"{what}, half-masked\nnumber of patterns stored"
    return f"{what}, {settings.stored} stored\nnoise / root mean square"


def show(result: Measured, console: Console) -> None:
    """Print the rates of every potential, and how often a bound was broken."""
    _, measured = result
    for data in dict.fromkeys(row["data"] for row in measured["rows"]):
        mine = [row for row in measured["rows"] if row["data"] == data]
        cells, headers = [], ["method"]
        for name in dict.fromkeys(row["method"] for row in mine):
            own = [row for row in mine if row["method"] == name]
            headers = ["method", *(f"{'N' if r['curve'] == CAPACITY else 'noise'}\n{r['at']:g}" for r in own), "status"]
            counts = sum((Counter(row["status"]) for row in own), Counter[str]())
            status = ", ".join(f"{n} {word}" for word, n in counts.items() if word != "CONVERGED") or "-"
            if all("refused" in row for row in own):
                status = "refused"
            rates = ["refused" if "refused" in r else f"{r['mean']:.2f} ({r['named']:.2f})" for r in own]
            cells.append([name, *rates, status])
        title = f"{data}: share retrieved, and in brackets of states whose nearest pattern by angle is the right one"
        print_tables(console, cut_tables(title, headers, cells, console.width))
    for name, reason in {row["method"]: row["refused"] for row in measured["rows"] if "refused" in row}.items():
        console.print(f"  {name} refused: {reason}", style="dim", markup=False)
    above = [row for row in measured["bounds"]["near_threshold"] if row["ratio"] >= 1]
    broken = sum(row[name]["violations"] for row in above for name in ("fixed_point", "step", "contraction", "pattern"))
    tried = 4 * sum(row["patterns"] for row in above)
    text = (
        f"log-sum-exp from the separation threshold on: {broken} violations of theorems 3 to 5 in {tried} checks; at "
        f"the threshold fixed points lie up to {above[0]['fixed_point']['worst']:.2f} of the allowed distance away"
    )
    console.print(text, style="bold", markup=False)
    console.print()
