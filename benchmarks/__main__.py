"""`python -m benchmarks solve` and other suites measure; `report` rewrites the tables in README.md."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console

from . import attention as attention_suite
from . import card_tables, compiled_kernels, gathering, guides
from . import energy_transformer as energy_transformer_suite
from . import native as native_suite
from . import potentials as potentials_suite
from . import report as reports
from . import scale as scale_suite
from . import solve as solve_suite
from . import spin_layers as spin_layers_suite
from . import spins as spins_suite
from . import train as train_suite
from . import usefulness as usefulness_suite
from .environment import environment
from .looped import guide as looped_guide
from .puzzles import guide
from .targets import Row

#: A suite is a module with METRICS, TARGETS, NOTES, settings_of(quick) and run(settings, metrics=..., repeats=...);
#: with tables(run) unless its rows look like those of `solve`; figures(run, folder) if it has any; and COMPOSED if the
#: newest run of each metric is reported on its own.
SUITES: dict[str, ModuleType] = {
    "solve": solve_suite,
    "native": native_suite,
    "attention": attention_suite,
    "train": train_suite,
    "spins": spins_suite,
    "spin_layers": spin_layers_suite,
    "potentials": potentials_suite,
    "energy_transformer": energy_transformer_suite,
    "scale": scale_suite,
    "usefulness": usefulness_suite,
}

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

Quick = Annotated[bool, typer.Option("--quick", help="Fewer settings and rounds; written only with --out.")]
Only = Annotated[str | None, typer.Option(help="Metrics to measure, such as C1,C3; written only with --out.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Rounds of the interleaved timing; default 5, quick 2.")]
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder for the raw JSON [default: benchmarks/results].")
]

Keep = Annotated[
    Path | None,
    typer.Option(
        file_okay=False, help="Folder that keeps trainings on puzzles and of LOOPED; what it has is not trained again."
    ),
]


@app.command()
def solve(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """C1, C2, C3, C5 and C7: forward solve and training step of equilibrium attention on a CPU, and the import."""
    measure("solve", quick=quick, only=only, repeats=repeats, out=out)


@app.command()
def native(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """SHORT, THREADS, CONTENDED, NEIGHBOUR, SETS: short calls, threads, neighbours and instruction sets on a CPU."""
    measure("native", quick=quick, only=only, repeats=repeats, out=out)


@app.command()
def attention(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """LENGTH, STEPS and C4: what a solve costs by length, evaluations and memory."""
    measure("attention", quick=quick, only=only, repeats=repeats, out=out)


@app.command()
def train(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """STEP, LENGTH, BLOCK and others: training steps beside explicit attention, unrolling and torchdeq."""
    measure("train", quick=quick, only=only, repeats=repeats, out=out)


@app.command()
def spins(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """C6, SCALING, RANDOM, SMALL, FRAMES: the saddle point against inverses; methods by size; failures; overhead."""
    measure("spins", quick=quick, only=only, repeats=repeats, out=out)


@app.command("spin_layers")
def spin_layers(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """SPIN, GROWTH, LONG: the spin layer beside explicit attention, by parts and by memory."""
    measure("spin_layers", quick=quick, only=only, repeats=repeats, out=out)


@app.command()
def potentials(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """FUSED, UNFUSED, KERNEL: the other potentials beside log-sum-exp. DIGITS: layers trained with each."""
    measure("potentials", quick=quick, only=only, repeats=repeats, out=out)


@app.command("energy_transformer")
def energy_transformer(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """EVALUATION, LONG, SOLVE, TRAINING: a block with an energy beside autograd and an explicit block."""
    measure("energy_transformer", quick=quick, only=only, repeats=repeats, out=out)


@app.command()
def scale(quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None) -> None:
    """EVALUATION, SOLVE, TRAINING, COLLECTIVE: keys that several processes hold together."""
    measure("scale", quick=quick, only=only, repeats=repeats, out=out)


@app.command()
def usefulness(
    quick: Quick = False, only: Only = None, repeats: Repeats = None, out: Out = None, keep: Keep = None
) -> None:
    """MAZES, SUDOKU, SUDOKU6, SUDOKU9, PREFIX, PATHS, RECIPES: a block repeated until it settles.

    MAZES_IMAGE, ARITHMETIC: convolutions that do. DIGITS, RETRIEVAL, TEXT: attention repeated, where none pays.
    INPAINT: blocks that descend an energy. LOOPED: a language model of two layers that are repeated.
    """
    measure("usefulness", quick=quick, only=only, repeats=repeats, out=out, keep=keep)


@app.command()
def kernels(
    compile: Annotated[
        str | None,
        typer.Option(help="The GPU: sm_80 (A100), sm_90a (H100, H200), sm_100a (B200); none has to be there."),
    ] = None,
    out: Out = None,
) -> None:
    """Registers, memory and loops of the Triton kernels, as Triton compiles them.

    Without a GPU to compile for: the evaluations that tiles make for queries that have ended.
    """
    console = Console(stderr=True, highlight=False)
    suite: Any = gathering
    if compile is not None:
        suite = compiled_kernels
        if compile not in compiled_kernels.ARCHES:
            required = f"must be one of {', '.join(compiled_kernels.ARCHES)}"
            raise typer.BadParameter(f"{required}, got {compile}", param_hint="--compile")

    def progress(row: Row) -> None:
        console.print(f"{row['name']}: {suite.told(row)}", markup=False)

    folder = reports.RESULTS if out is None else out
    run, path = suite.run(compile, folder, progress) if suite is compiled_kernels else suite.run(folder, progress)
    reports.show(run, suite.NOTES, Console(highlight=False, width=200), suite.tables)
    typer.echo(f"written: {path}")


@app.command()
def report() -> None:
    """Rewrite, from the newest runs, tables and figures of the README beside this, five lines and a table of the top
    one, and the tables of the guides (equilibrium blocks, recurrent depth, costs, energy minimization) and of the pages
    of potentials, the Energy Transformer and scale."""
    for name, suite in SUITES.items():
        path = reports.rewrite(name, suite.NOTES, **options_of(suite))
        typer.echo(f"{name}: no complete run yet" if path is None else f"{name}: table written from {path.name}")
    path = card_tables.rewrite()
    typer.echo("card: no run yet" if path is None else f"card: tables written from {path.name}")
    guide.rewrite()
    guides.rewrite()
    pages = (guide, looped_guide, potentials_suite, energy_transformer_suite, scale_suite)
    for page in pages[1:]:
        page.rewrite()
    names = ", ".join(page.name for page in (*(page.PAGE for page in pages), guides.COSTS, guides.STEPS))
    typer.echo(f"five lines written to {guides.README.name}, tables to {names}")


def measure(
    name: str, *, quick: bool, only: str | None, repeats: int | None, out: Path | None, **more: Any
) -> dict[str, Any]:
    """Run a suite, print it, and keep it where asked; `more` is for this suite alone."""
    suite = SUITES[name]
    metrics = suite.METRICS if only is None else tuple(part.strip().upper() for part in only.split(","))
    unknown = [metric for metric in metrics if metric not in suite.METRICS]
    if unknown:
        raise typer.BadParameter(
            f"must be among {', '.join(suite.METRICS)}, got {', '.join(unknown)}", param_hint="--only"
        )
    rounds = repeats or (2 if quick else 5)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    settings, begin = suite.settings_of(quick), time.perf_counter()
    where = environment(_device(settings))
    # Settings that belong to one metric are left out with it.
    total, done = sum(getattr(setting, "metric", metrics[0]) in metrics for setting in settings), 0

    def progress(row: Row) -> None:
        nonlocal done
        done += "evidence" in row
        ratios = ", ".join(
            f"{key} {'-' if value is None else format(value, '.2f')}" for key, value in row["ratios"].items()
        )
        console.print(f"[{done}/{total}] {row['name']}: {ratios} ({row['wall_seconds']:.0f} s)", markup=False)

    limit = 1.0 if quick else 3.0
    rows = suite.run(settings, metrics=metrics, repeats=rounds, max_seconds=limit, progress=progress, **more)
    complete = not quick and set(metrics) == set(suite.METRICS)
    options = {"metrics": list(metrics), "repeats": rounds, "max_seconds": limit, "settings": total}
    run = reports.document(name, rows, suite.TARGETS, complete=complete, quick=quick, options=options, where=where)
    output = Console(highlight=False) if Console().is_terminal else Console(highlight=False, width=200)
    reports.show(run, suite.NOTES, output, _tables(suite))
    if complete or out is not None:
        path = reports.write(run, reports.RESULTS if out is None else out)
        output.print(f"written: {path}", markup=False, soft_wrap=True)
    output.print(f"{time.perf_counter() - begin:.0f} s", markup=False)
    return run


def _device(settings: tuple[Any, ...]) -> str:
    """Where these settings are measured."""
    problems = [getattr(setting, "problem", setting) for setting in settings]
    return next((device for problem in problems if (device := getattr(problem, "device", "cpu")) != "cpu"), "cpu")


def options_of(suite: ModuleType) -> dict[str, Any]:
    """Return the options of `report.rewrite` for a suite."""
    by_metric = suite.METRICS if getattr(suite, "COMPOSED", False) else ()
    return {"tables": _tables(suite), "figures": getattr(suite, "figures", None), "by_metric": by_metric}


def _tables(suite: ModuleType) -> reports.Tables:
    found: reports.Tables = getattr(suite, "tables", reports.tables_of_settings)
    return found


if __name__ == "__main__":
    app()
