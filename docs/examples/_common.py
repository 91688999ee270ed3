"""What the examples share: train the same model with equilibria and with one step, and print both."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from implicit_attention import Anderson, Implicit, ImplicitAttention, Status
from implicit_attention.linear import CG
from implicit_attention.training import CSVFile, watch

# States within 1e-3 of their equilibria; a gradient that is more exact than its state would be work for nothing.
SOLVE: dict[str, Any] = {"solver": Anderson(rtol=1e-3), "adjoint": Implicit(CG(rtol=1e-3))}
#: The two models that are compared: max_steps=None solves, max_steps=0 is ordinary attention.
MODELS: dict[str, int | None] = {"equilibrium": None, "one step": 0}
#: Shares that are measured beside the accuracy in some examples.
EXTRAS = ("AUC", "finds the nine", "ten times as long")

#: About how often a run with --monitor is looked at.
LOOKS = 40


class Data(NamedTuple):
    """Inputs and labels; a model is called with the tensors of the inputs."""

    train: tuple[Tensor, ...]
    train_labels: Tensor
    test: tuple[Tensor, ...]
    test_labels: Tensor


class Plan(NamedTuple):
    """How a model is trained."""

    epochs: int
    lr: float = 4e-3
    batch: int = 64


def arguments(description: str | None, argv: Sequence[str] | None, *, monitor: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: less data, fewer epochs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of both models each (default 0)")
    if monitor:
        told = "watch the equilibrium model of the first seed: writes watch.csv and training.png into this folder"
        parser.add_argument("--monitor", type=Path, metavar="DIR", help=told)
    return parser.parse_args(argv)


def compare(
    title: str,
    make_data: Callable[[int], Data],
    make_model: Callable[[int | None], nn.Module],
    plan: Plan,
    seeds: Sequence[int],
    more: Callable[[nn.Module, Data], dict[str, float]] = lambda model, data: {},
    monitor: Path | None = None,
) -> dict[str, Any]:
    """Train and test both models with every seed, print a row for each, and return the numbers.

    Both begin with the same weights and see the same batches. `more` measures some of `EXTRAS`; `monitor` is a folder
    for what `watch` sees of the first model that solves.
    """
    print(title)
    torch.set_num_threads(1)  # at these sizes threads wait for each other longer than they work
    runs = []
    for seed in seeds:
        data = make_data(seed)
        for name, max_steps in MODELS.items():
            torch.manual_seed(seed)
            model = make_model(max_steps)
            watched = monitor if max_steps is None and seed == seeds[0] else None
            run = {"model": name, "seed": seed, **_train(f"{name}, seed {seed}", model, data, plan, seed, watched)}
            run |= _test(model, data) | more(model, data)
            print(_row(run), flush=True)
            runs.append(run)
    both = (f"{name} {mean_and_std(numbers(runs, name))} %" for name in MODELS)
    print(f"  accuracy: {', '.join(both)}: {verdict(runs)}")
    print("" if monitor is None else f"  watch.csv and training.png are in {monitor}\n")
    return {"title": title, "plan": plan._asdict(), "runs": runs}


def _train(
    what: str, model: nn.Module, data: Data, plan: Plan, seed: int, monitor: Path | None = None
) -> dict[str, Any]:
    """Minimise the cross-entropy with AdamW, in one cycle of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.01)
    count = len(data.train_labels)
    steps = plan.epochs * -(-count // plan.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, plan.lr, total_steps=steps)
    layer = attention(model)
    order = torch.Generator().manual_seed(seed)
    failed, start, console = 0, time.perf_counter(), Console(file=sys.stderr)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar as progress, _monitored(model, what, monitor, steps) as look:
        task = progress.add_task(what, total=steps)
        for _ in range(plan.epochs):
            for index in torch.randperm(count, generator=order).split(plan.batch):
                logits = model(*(t[index] for t in data.train))
                loss = nn.functional.cross_entropy(logits, data.train_labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                failed += _failures(layer)
                look()
                progress.advance(task)
    return {"seconds": round(time.perf_counter() - start, 2), "failed": failed}


@contextmanager
def _monitored(model: nn.Module, what: str, folder: Path | None, steps: int) -> Iterator[Callable[[], None]]:
    """What to call after every step: it writes what `watch` saw, `LOOKS` times, and all is drawn in the end."""
    if folder is None:
        yield lambda: None
        return
    from implicit_attention.plotting import training_figure

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "watch.csv"
    # A file that exists goes on, as that of a run that is resumed; this run is a new one.
    path.unlink(missing_ok=True)
    writer, done = CSVFile(path), itertools.count(1)
    with watch(model) as seen:

        def look() -> None:
            step = next(done)
            if step % max(1, steps // LOOKS) == 0:
                writer.write(seen.take(step))

        yield look
    training_figure(path, title=f"Solves of a training: {what}").savefig(folder / "training.png")


def _failures(layer: ImplicitAttention) -> int:
    """Solves of the last batch, forward and backward, that did not reach their tolerance."""
    evidence = layer.last_solve
    backward = evidence.adjoint
    return int(evidence.failed.sum()) + (
        0 if backward.status is None else int((backward.status > Status.UNSTABLE).sum())
    )


@torch.no_grad()
def _test(model: nn.Module, data: Data) -> dict[str, Any]:
    """Accuracy on what was held out, and what the solves of it took."""
    model.eval()
    layer = attention(model)
    right = model(*data.test).argmax(-1) == data.test_labels
    found = {"tests": len(right), "accuracy": round(float(right.double().mean()), 4)}
    if layer.options.explicit:
        return found
    evals = layer.last_solve.num_evals.double()
    return {
        **found,
        "evaluations": round(float(evals.mean()), 2),
        "most evaluations": int(evals.max()),
        "converged": float(layer.last_solve.converged.double().mean()),
        "anchor": [round(float(v), 3) for v in layer.anchor()],
        "beta": [round(float(v), 3) for v in layer.beta()],
    }


def attention(model: nn.Module) -> ImplicitAttention:
    """The one attention layer of a model."""
    (layer,) = (module for module in model.modules() if isinstance(module, ImplicitAttention))
    return layer


def _row(run: dict[str, Any]) -> str:
    row = f"  seed {run['seed']}  {run['model']:<11}  accuracy {run['accuracy']:6.1%}"
    row += "".join(f", {name} {run[name]:.1%}" for name in EXTRAS if name in run) + f"  {run['seconds']:5.1f} s"
    if "converged" not in run:
        return row
    evals = f"{run['evaluations']:.1f} evaluations a query (at most {run['most evaluations']})"
    anchor, beta = (" ".join(f"{value:.2f}" for value in run[name]) for name in ("anchor", "beta"))
    return f"{row}\n{'':23}{evals}, {run['converged']:.1%} converged, anchor {anchor}, beta {beta}"


def numbers(runs: Sequence[dict[str, Any]], model: str, key: str = "accuracy") -> list[float]:
    """One number for every seed."""
    return [run[key] for run in runs if run["model"] == model]


def mean_and_std(shares: Sequence[float]) -> str:
    """In percent; one seed has no spread."""
    return f"{100 * statistics.mean(shares):.1f}" + (
        f" +- {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
    )


def verdict(runs: Sequence[dict[str, Any]], key: str = "accuracy") -> str:
    """Which model is better, if seeds and tests can tell: by two standard errors, the larger of two kinds."""
    ours, theirs = (numbers(runs, name, key) for name in MODELS)
    count = len(ours)
    if count < 2:
        return "one seed decides nothing"
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    share = statistics.mean(ours + theirs)
    by_seeds = statistics.stdev(gains) / math.sqrt(count)
    by_tests = math.sqrt(2 * share * (1 - share) / (runs[0]["tests"] * count))
    gain = statistics.mean(gains)
    if abs(gain) <= 2 * max(by_seeds, by_tests):
        return "one step is as good"
    return "the equilibrium is better" if gain > 0 else "one step is better"
