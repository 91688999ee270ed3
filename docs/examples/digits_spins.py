"""Handwritten digits as a bag of patches, in which one layer is all that lets patches meet: spins or attention?

python docs/examples/digits_spins.py

Patches of 2 x 2 pixels are embedded linearly, one layer answers, and their mean is classified linearly. Without a layer
that is a linear classifier of the mean patch. Every layer takes the better of two learning rates, by images that are
held out of the training.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from _common import arguments, mean_and_std
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from implicit_attention import ImplicitAttention
from implicit_attention.layers import SpinAttention
from implicit_attention.spins import AmosResponse, KineticPlefka, MeanField

DIM, HEADS, HEAD_DIM, BATCH = 32, 4, 16, 128
RATES = (4e-3, 1.6e-2)


def spins(method: type[MeanField] | type[KineticPlefka], **options: Any) -> SpinAttention:
    options |= {"head_dim": HEAD_DIM, "method": method(response=AmosResponse(), rtol=None if options else 1e-3)}
    return SpinAttention(DIM, HEADS, **options)


#: What may stand between the patches; all have the same width, heads and width of a head.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "softmax": partial(ImplicitAttention, DIM, HEADS, head_dim=HEAD_DIM, max_steps=0),
    "one step of spins": partial(spins, KineticPlefka, steps=1),
    "spins": partial(spins, KineticPlefka),
    "spins in equilibrium": partial(spins, MeanField),
}


class Classifier(nn.Module):
    """The mean over patches of what a layer adds to them, and a linear head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(4, DIM), layer
        self.positions = nn.Parameter(torch.randn(16, DIM) / 10)
        self.head = nn.Linear(DIM, 10)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches) + self.positions
        return self.head((x + self.layer(x)).mean(-2))


def patches(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Patches, (images, 16, 4), and labels: three fifths to learn from, one to choose by, one to test."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images / 8 - 1).float().view(-1, 4, 2, 4, 2).transpose(2, 3).flatten(3).flatten(1, 2)
    labels = torch.from_numpy(labels)
    rest, test = train_test_split(torch.arange(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    train, valid = train_test_split(rest, test_size=0.25, random_state=seed, stratify=labels[rest])
    parts = {"train": train, "valid": valid, "test": test}
    return {name: (pixels[index], labels[index]) for name, index in parts.items()}


def trained(
    layer: Callable[[], nn.Module], data: dict[str, tuple[Tensor, Tensor]], rate: float, epochs: int, seed: int
) -> Classifier:
    torch.manual_seed(seed)
    model, (x, labels) = Classifier(layer()), data["train"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * -(-len(labels) // BATCH))
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(labels), generator=order).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Classifier, part: tuple[Tensor, Tensor]) -> float:
    return float((model(part[0]).argmax(-1) == part[1]).double().mean())


def run(name: str, seed: int, epochs: int) -> dict[str, Any]:
    """The layer at the rate that is better on the images to choose by, on the images to test."""
    torch.set_num_threads(1)
    data, begin = patches(seed), time.perf_counter()
    models = {rate: trained(LAYERS[name], data, rate, epochs, seed) for rate in RATES}
    rate, model = max(models.items(), key=lambda pair: accuracy(pair[1], data["valid"]))
    found = {
        "layer": name,
        "seed": seed,
        "accuracy": round(accuracy(model, data["test"]), 4),
        "tests": len(data["test"][1]),
        "rate": rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    if isinstance(model.layer, SpinAttention) and model.layer.steps is None:
        report = model.layer.last_solve
        found["evaluations"] = round(float(report.num_evals.double().mean()), 1)
        found["converged"] = float(report.converged.double().mean())
    return found


def gain(runs: Sequence[dict[str, Any]], ours: str, theirs: str) -> tuple[float, float]:
    """Points that one layer gains over another, and two standard errors: the larger of seeds' and test images'."""
    a, b = ([run["accuracy"] for run in runs if run["layer"] == name] for name in (ours, theirs))
    share, count = statistics.mean(a + b), len(a)
    error = math.sqrt(2 * share * (1 - share) / (runs[0]["tests"] * count))
    if count > 1:
        error = max(error, statistics.stdev([x - y for x, y in zip(a, b, strict=True)]) / math.sqrt(count))
    return 100 * (statistics.mean(a) - statistics.mean(b)), 200 * error


def verdict(runs: Sequence[dict[str, Any]], ours: str, theirs: str) -> str:
    points, error = gain(runs, ours, theirs)
    word = "as good as" if abs(points) <= error else "better than" if points > 0 else "worse than"
    return f"{ours}: {word} {theirs} ({points:+.1f} +- {error:.1f} points)"


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each layer: what it costs, how good it is, and what the spins gain over it."""
    rows = [("layer", "parameters", "accuracy, %", "evaluations", "spins gain, points")]
    for name in LAYERS:
        runs = [run for run in results["runs"] if run["layer"] == name]
        evaluations = f"{statistics.mean(run['evaluations'] for run in runs):.1f}" if "evaluations" in runs[0] else "-"
        points = "-" if name == "spins" else "{:+.1f} +- {:.1f}".format(*gain(results["runs"], "spins", name))
        shares = mean_and_std([run["accuracy"] for run in runs])
        rows.append((name, str(runs[0]["parameters"]), shares, evaluations, points))
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv)
    epochs, found, console = 2 if given.quick else 20, {}, Console(file=sys.stderr)
    order = [(name, seed) for seed in given.seeds for name in LAYERS]
    # Of one thread each: at these sizes threads wait for each other longer than they work.
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("digits_spins", total=len(order))
        jobs = {pool.submit(run, name, seed, epochs): (name, seed) for name, seed in order}
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            progress.advance(task)
    runs = [found[key] for key in order]
    for each in runs:
        print("  seed {seed}  {layer:<20}  accuracy {accuracy:6.1%}  {seconds:5.1f} s".format(**each))
    said = [verdict(runs, "spins", other) for other in LAYERS if other != "spins"]
    print("\n".join(f"  {line}" for line in said))
    return {"title": "digits as a bag of patches: one layer", "epochs": epochs, "runs": runs}


if __name__ == "__main__":
    main()
