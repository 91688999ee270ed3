"""`implicit-attention compare --suite distribution`: the law of tokens under repeated attention."""

from __future__ import annotations

from typing import Any, TypeAlias

from ..plotting import distribution_figure
from ..studies import token_moments, trained_layer
from ..studies.token_moments import WAYS
from .command import Console, Files, Progress
from .compare import Compare
from .table import cut_tables, print_tables

#: The options, and all measurements by the names of the JSON file.
Measured: TypeAlias = tuple[Compare, dict[str, Any]]


def sizes(settings: Compare) -> dict[str, int]:
    """Return the sizes of the measurement."""
    quick = settings.quick
    return {"seeds": 8 if quick else 32, "trainings": 3 if quick else 8, "updates": 200 if quick else 600}


def line(row: dict[str, Any]) -> str:
    """Return the line that is printed when a law or a training has finished."""
    if "accuracy" in row:
        return f"{row['accuracy']:.1%} of held-out digits, alignment with the inverse covariance {row['alignment']:.3f}"
    measured, infinite = f"{row['measured']:.3f} +- {row['std']:.3f}", f"{row['closed']:.3f}"
    return f"entropy gain of a step with residual {measured}, infinite {infinite}"


def run(settings: Compare, progress: Progress) -> Measured:
    """Move the tokens of every law in every way, and train the layers."""
    size = sizes(settings)
    rows, gains, slopes, layers = [], [], [], []
    laws = token_moments.laws(settings.seed)
    total = len(laws) + size["trainings"]
    for index, law in enumerate(laws):
        progress.begin(law.name, index, total)
        seeds, seed, counts = size["seeds"], settings.seed, token_moments.COUNTS
        mine = [row for way in WAYS for n in counts for row in token_moments.move(law, way, n, seeds, seed)]
        rows += mine
        gains.append(token_moments.gain(law, mine))
        slopes += [token_moments.slope(law, way, mine) for way in WAYS]
        progress.end(law.name, gains[-1])
    for index in range(size["trainings"]):
        name = f"training {index + 1}"
        progress.begin(name, len(laws) + index, total)
        compared = trained_layer.train(settings.seed + index, steps=size["updates"])
        layers += compared
        progress.end(name, compared[0])
    nearness = trained_layer.nearness(layers)
    return settings, {"rows": rows, "entropy_gains": gains, "slopes": slopes, "layers": layers, "nearness": nearness}


def files(result: Measured) -> Files:
    """Return all measurements, and one picture."""
    settings, measured = result
    size = sizes(settings)
    title = (
        "Tokens as samples of a Gaussian under repeated attention; dashed: infinitely many tokens, in closed form\n"
        f"Error bars: standard deviation over {size['seeds']} samples, and over {size['trainings']} trainings"
    )
    figure = distribution_figure(measured["rows"], measured["slopes"], measured["nearness"]["matrices"], title=title)
    options = {"suite": settings.suite, "seed": settings.seed, "quick": settings.quick, **size}
    return "distribution.json", {"settings": options, **measured}, {"distribution.png": figure}


def show(result: Measured, console: Console) -> None:
    """Print the moments of the largest samples, and how near the score matrices are."""
    _, measured = result
    headers = ["method", "step", "entropy", "closed form", "mean shift", "closed form", "eigenvalues", "moved"]
    largest = token_moments.COUNTS[-1]
    for law in dict.fromkeys(row["law"] for row in measured["rows"]):
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
            for row in measured["rows"]
            if row["law"] == law and row["tokens"] == largest
        ]
        print_tables(console, cut_tables(f"{law}, {largest} tokens", headers, cells, console.width))
    names = ["method", "cosine", "distance at the best scale", "cosine, whitened"]
    cells = [
        [row["matrix"], *(f"{row[name]:.3f} +- {row[f'{name}_std']:.3f}" for name in trained_layer.NEARNESS)]
        for row in measured["nearness"]["matrices"]
    ]
    title = "W_q^T W_k and the inverse covariance of its tokens"
    print_tables(console, cut_tables(title, names, cells, console.width))
    for gain in measured["entropy_gains"]:
        console.print(f"{gain['law']}: {line(gain)}", style="bold", markup=False)
    for slope in measured["slopes"]:
        text = f"{slope['law']}, {slope['way']}: {slope['quantity']} ~ N^{slope['slope']:.2f}"
        console.print(text, style="dim", markup=False)
    less = measured["nearness"]["trained_less_rotated"]["alignment"]
    text = f"cosine of trained less rotated matrices: {less['mean']:.3f}, standard error {less['standard_error']:.3f}"
    console.print(text, style="bold", markup=False)
    console.print()
