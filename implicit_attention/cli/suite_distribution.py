"""`implicit-attention compare --suite distribution`: what attention makes of the law of its tokens."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from . import token_moments, trained_layer
from .progress import Progress
from .settings import CompareSettings
from .table import cut_tables
from .token_moments import RENORMALISED, RESIDUAL, WAYS, Law

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS, STEPS = (100, 400, 1600), 3
#: What is measured of a sample, with mean and standard deviation over seeds.
MEASURED = ("mean_shift", "mean_error", "covariance_error", "entropy", "moved")
#: What tells how near score matrices are to the inverse covariance.
NEARNESS = ("alignment", "distance", "whitened_alignment")


@dataclasses.dataclass(frozen=True)
class DistributionSuite:
    """Everything that `--suite distribution` measured.

    Attributes:
        settings: the options.
        rows: for every law, way, number of tokens and step, moments of samples beside the closed form.
        gains: of every law, the entropy gained by a first step with residual, measured and log det(I + Sigma).
        slopes: of every law and way, the exponent of the error of one step in the number of tokens.
        layers: for every seed and matrix, how near it is to the inverse covariance.
        nearness: the same as mean and standard deviation over seeds, and the trained less the rotated matrix.
        seconds: of everything.
    """

    settings: CompareSettings
    rows: list[dict[str, Any]]
    gains: list[dict[str, Any]]
    slopes: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    nearness: dict[str, Any]
    seconds: float


def sizes(settings: CompareSettings) -> dict[str, int]:
    """The sizes of the measurement."""
    quick = settings.quick
    return {"seeds": 8 if quick else 32, "trainings": 3 if quick else 8, "updates": 200 if quick else 600}


def line(row: dict[str, Any]) -> str:
    """Return the line that is printed when a law or a training has finished."""
    if "accuracy" in row:
        return f"{row['accuracy']:.1%} of held-out digits, alignment with the inverse covariance {row['alignment']:.3f}"
    return (
        f"entropy gain of a step with residual {row['measured']:.3f} +- {row['std']:.3f}, infinite {row['closed']:.3f}"
    )


def run(settings: CompareSettings, progress: Progress) -> DistributionSuite:
    """Move the tokens of every law in every way, and train the layers."""
    begin, size = time.perf_counter(), sizes(settings)
    rows, gains, slopes, layers = [], [], [], []
    laws = token_moments.laws(settings.seed)
    total = len(laws) + size["trainings"]
    for index, law in enumerate(laws):
        progress.begin(law.name, index, total)
        mine = [row for way in WAYS for count in COUNTS for row in move(law, way, count, size["seeds"], settings.seed)]
        rows += mine
        gains.append(_gain(law, mine))
        slopes += [_slope(law, way, mine) for way in WAYS]
        progress.end(law.name, gains[-1])
    for index in range(size["trainings"]):
        name = f"training {index + 1}"
        progress.begin(name, len(laws) + index, total)
        found = trained_layer.train(settings.seed + index, steps=size["updates"])
        layers += found
        progress.end(name, found[0])
    seconds = time.perf_counter() - begin
    return DistributionSuite(settings, rows, gains, slopes, layers, _nearness(layers), seconds)


@torch.no_grad()
def move(law: Law, way: str, count: int, seeds: int, seed: int) -> list[dict[str, Any]]:
    """A row for every step from 0 on, over samples of `count` tokens."""
    start = token_moments.sample(law, seeds=seeds, count=count, seed=seed)
    x, mean, variances, rows = start, *token_moments.start(law), list[dict[str, Any]]()
    for step in range(STEPS + 1):
        if step:
            # One sample after the other: a batch of them would hold all pairs of tokens at once.
            x = torch.stack([token_moments.step(law, one, way) for one in x])
            mean, variances = token_moments.closed_form(law, mean, variances, way)
        means, covariances, eigenvalues = token_moments.moments(x)
        covariance = token_moments.spread(law, variances)
        measured = {
            "mean_shift": (means - law.mean).norm(dim=-1),
            "mean_error": (means - mean).norm(dim=-1),
            "covariance_error": torch.linalg.matrix_norm(covariances - covariance)
            / torch.linalg.matrix_norm(covariance),
            "entropy": token_moments.entropy(eigenvalues),
            # Of the width of the tokens.
            "moved": ((x - start).square().sum(-1).mean(-1) / law.covariance.trace()).sqrt(),
        }
        place = {"law": law.name, "way": way, "tokens": count, "step": step}
        closed = {
            "closed_mean_shift": float((mean - law.mean).norm()),
            "closed_eigenvalues": sorted(variances.tolist(), reverse=True),
            "closed_entropy": float(token_moments.entropy(variances)),
        }
        rows.append(place | _summary(measured) | {"eigenvalues": eigenvalues.mean(0).tolist()} | closed)
    return rows


def _summary(measured: dict[str, Tensor]) -> dict[str, float]:
    """Means over seeds, and as NAME_std standard deviations."""
    means = {name: float(values.mean()) for name, values in measured.items()}
    return means | {f"{name}_std": float(values.std()) for name, values in measured.items()}


def _gain(law: Law, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """From the law's own entropy to that after one step with residual, of the largest sample."""
    before, after = [row for row in rows if row["way"] == RESIDUAL and row["tokens"] == COUNTS[-1]][:2]
    factors = torch.linalg.eigvalsh(law.sigma).square() * token_moments.start(law)[1]
    return {
        "law": law.name,
        "tokens": COUNTS[-1],
        "measured": after["entropy"] - before["closed_entropy"],
        "std": after["entropy_std"],
        "closed": float(factors.log1p().sum()),
    }


def _slope(law: Law, way: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The exponent of N in the error of the covariance after one step; where that is set, of the tokens' way."""
    quantity = "moved" if way == RENORMALISED else "covariance_error"
    errors = [row[quantity] for row in rows if (row["way"], row["step"]) == (way, 1)]
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (COUNTS, errors))
    x = x - x.mean()
    return {"law": law.name, "way": way, "quantity": quantity, "slope": float((x * y).sum() / x.square().sum())}


def _nearness(layers: list[dict[str, Any]]) -> dict[str, Any]:
    def column(matrix: str, name: str) -> Tensor:
        return torch.tensor([row[name] for row in layers if row["matrix"] == matrix], dtype=torch.float64)

    def excess(name: str) -> dict[str, float]:
        less = column(trained_layer.TRAINED, name) - column(trained_layer.ROTATED, name)
        return {"mean": float(less.mean()), "standard_error": float(less.std() / math.sqrt(len(less)))}

    return {
        "matrices": [
            {"matrix": matrix} | _summary({name: column(matrix, name) for name in NEARNESS})
            for matrix in trained_layer.COMPARED
        ],
        "trained_less_rotated": {name: excess(name) for name in NEARNESS},
    }


def files(suite: DistributionSuite) -> tuple[str, dict[str, Any], dict[str, Figure]]:
    """Everything that was measured, and one picture."""
    from ..plotting import distribution_figure

    settings, size = suite.settings, sizes(suite.settings)
    title = (
        "Tokens as samples of a Gaussian under repeated attention; dashed: infinitely many tokens, in closed form\n"
        f"Error bars: standard deviation over {size['seeds']} samples, and over {size['trainings']} trainings"
    )
    figure = distribution_figure(suite.rows, suite.slopes, suite.nearness["matrices"], title=title)
    content = {
        "command": "compare",
        "settings": {"suite": settings.suite, "seed": settings.seed, "quick": settings.quick, **size},
        "rows": suite.rows,
        "entropy_gains": suite.gains,
        "slopes": suite.slopes,
        "layers": suite.layers,
        "nearness": suite.nearness,
        "seconds": suite.seconds,
    }
    return "distribution.json", content, {"distribution.png": figure}


def show(suite: DistributionSuite, console: Console) -> None:
    """Print the moments of the largest samples, and how near the score matrices are."""
    headers = ["method", "step", "entropy", "closed form", "mean shift", "closed form", "eigenvalues", "moved"]
    for law in dict.fromkeys(row["law"] for row in suite.rows):
        cells = [
            [
                row["way"],
                str(row["step"]),
                f"{row['entropy']:.2f} +- {row['entropy_std']:.2f}",
                f"{row['closed_entropy']:.2f}",
                f"{row['mean_shift']:.2f} +- {row['mean_shift_std']:.2f}",
                f"{row['closed_mean_shift']:.2f}",
                f"{row['eigenvalues'][0]:.2g} .. {row['eigenvalues'][-1]:.2g}",
                f"{row['moved']:.2f}",
            ]
            for row in suite.rows
            if row["law"] == law and row["tokens"] == COUNTS[-1]
        ]
        for table in cut_tables(f"{law}, {COUNTS[-1]} tokens", headers, cells, console.width):
            console.print(table)
            console.print()
    names = ["method", "cosine", "distance at the best scale", "cosine, whitened"]
    cells = [
        [row["matrix"], *(f"{row[name]:.3f} +- {row[f'{name}_std']:.3f}" for name in NEARNESS)]
        for row in suite.nearness["matrices"]
    ]
    for table in cut_tables("W_q^T W_k and the inverse covariance of its tokens", names, cells, console.width):
        console.print(table)
        console.print()
    for gain in suite.gains:
        text = f"{gain['law']}: {line(gain)}"
        console.print(text, style="bold", markup=False)
    for slope in suite.slopes:
        text = f"{slope['law']}, {slope['way']}: {slope['quantity']} ~ N^{slope['slope']:.2f}"
        console.print(text, style="dim", markup=False)
    less = suite.nearness["trained_less_rotated"]["alignment"]
    text = f"cosine of trained less rotated matrices: {less['mean']:.3f}, standard error {less['standard_error']:.3f}"
    console.print(text, style="bold", markup=False)
    console.print()
