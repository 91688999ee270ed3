"""Solvers beside unrolled descent: what `compare` measures on digits, in the few columns that matter most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CODE = """\
import torch
import implicit_attention as ia
from implicit_attention.studies.data import draw, load_digits
task = draw(load_digits(), patterns=200, queries=200, noise=0.5, draws=8, seed=0).to("cpu", torch.float32).first(50)
energy = ia.AnchoredEnergy(ia.LogSumExp(task.keys.requires_grad_(), beta=8.0), task.queries, anchor=0.0)
solvers = [kind(rtol=1e-5) for kind in (ia.Picard, ia.Anderson, ia.Broyden, ia.NewtonKrylov)]
print(ia.compare_solvers(energy, task.queries, solvers))
ia.solve(energy, task.queries, solver=solvers[1]).value.sum().backward()  # the exact gradient, in task.keys.grad
"""


def solvers_experiment(
    rows: Sequence[dict[str, Any]], picture: Figure, settings: Mapping[str, Any], summary: str
) -> Experiment:
    """Return the part, from the rows and the figure of `compare`, its settings, and its summary of retrieval."""
    cells: list[tuple[str, ...]] = [
        (
            row["method"],
            f"{row['evaluations_median']:.0f} / {row['evaluations_max']:.0f}",
            f"{100 * row['converged']:.0f} %",
            str(row["saddles"]),
            f"{row['gradient_error']:.1e}",
            f"{1e3 * row['forward_seconds']:.1f}",
            f"{1e3 * row['backward_seconds']:.1f}",
        )
        for row in rows
        if "error" not in row
    ]
    return Experiment(
        name="solvers",
        title="Solvers, beside unrolled descent",
        text=f"{settings['patterns']} of scikit-learn's digits are stored, and {2 * settings['queries_per_task']} "
        "half-masked or noisy ones go down their energy. Each query is a problem of its own, and stops when its "
        "residual has reached the tolerance. The gradient of a solve comes from a linear solve at the answer; descent "
        "is differentiated step by step. For retrieval, one step is enough: "
        f"{summary.rpartition('; ')[2]}",
        picture=picture,
        ending="png",
        description="A panel for each solver: its residual against evaluations, of the median and of the worst query, "
        "on logarithmic axes, and the tolerance.",
        headers=(
            "method",
            "evaluations, median / most",
            "converged",
            "saddles",
            "gradient error",
            "forward, ms",
            "backward, ms",
        ),
        rows=cells,
        notes=(
            f"tolerance of all: |f(z) - z| <= {settings['atol']:g} + {settings['rtol']:g} |f(z)|, at most "
            f"{settings['max_steps']} steps",
            "gradient error: relative, beside the exact gradient in float64; a query that ends elsewhere counts as one",
            "times are of this run, on this machine",
            *(f"{row['method']} failed with {row['error']}: {row['message']}" for row in rows if "error" in row),
        ),
        code=CODE,
        further=("implicit-attention compare", "implicit-attention landscape --html"),
        numbers={"rows": list(rows), "summary": summary},
    )
