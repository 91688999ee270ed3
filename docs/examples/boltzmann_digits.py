"""A restricted Boltzmann machine learns digits, by the exact gradient and by contrastive divergence.

python docs/examples/boltzmann_digits.py

64 visible units are the pixels of an 8 x 8 image, ink 1 and paper -1; 16 hidden units are 1 or -1, so that log Z is a
sum of 2^16 terms and every log-likelihood is exact. Both machines begin as independent pixels, the model that they are
measured against. `--write` makes three full runs, and writes `boltzmann_digits.json` beside this file, the table of
`docs/examples.md` and the picture of samples.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor

from implicit_attention.potentials import (
    RestrictedBoltzmannMachine,
    SignUnits,
    contrastive_divergence,
    exact_gradient,
)

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "boltzmann_digits.json", HERE.parent / "examples.md"
PICTURE = HERE.parent / "boltzmann" / "digits.png"
START = "<!-- table of boltzmann_digits: python docs/examples/boltzmann_digits.py --write -->\n"
END = "<!-- end of the table of boltzmann_digits -->"
INDEPENDENT, EXACT, CD = "independent pixels", "exact gradient", "CD-1"
MODELS = (INDEPENDENT, EXACT, CD)
#: Hidden units; an image above this is ink.
HIDDEN, INK = 16, 7.5


class Plan(NamedTuple):
    """How long is trained, and how samples are drawn."""

    hidden: int = HIDDEN
    exact_steps: int = 300
    cd_epochs: int = 300
    lr: float = 0.02
    batch: int = 64
    decay: float = 1e-3
    gibbs_steps: int = 2000


QUICK = Plan(hidden=8, exact_steps=60, cd_epochs=6, gibbs_steps=50)


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Images of 1 and -1, (count, 64): three quarters to learn from, the rest held out."""
    images = torch.from_numpy(load_digits().data)
    spins = torch.where(images > INK, 1.0, -1.0)
    order = torch.randperm(len(spins), generator=torch.Generator().manual_seed(seed))
    cut = 3 * len(spins) // 4
    return spins[order[:cut]], spins[order[cut:]]


def independent_field(images: Tensor) -> Tensor:
    """The field of every pixel alone, with one image of ink and one of paper added: some pixels never have ink."""
    mean = images.sum(0) / (len(images) + 2)
    return torch.atanh(mean)


def log_likelihood(weights: Tensor, field: Tensor, images: Tensor) -> float:
    """Mean log p per image, exact, in double precision."""
    with torch.no_grad():
        machine = RestrictedBoltzmannMachine(weights.double(), field.double(), SignUnits(), SignUnits())
        return float(machine.log_prob(images.double()).mean())


def train(method: str, images: Tensor, plan: Plan, seed: int) -> tuple[Tensor, Tensor]:
    """Weights and field: all images in each exact step, minibatches in CD-1, the same optimiser."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.05 * torch.randn(64, plan.hidden, generator=generator)
    field = independent_field(images).to(weights)
    optimizer = torch.optim.Adam([weights, field], lr=plan.lr, maximize=True)
    batches = -(-len(images) // plan.batch)
    steps = plan.exact_steps if method == EXACT else plan.cd_epochs * batches
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    order: tuple[Tensor, ...] = ()
    for _ in track(range(steps), f"{method}, seed {seed}", console=Console(stderr=True), transient=True):
        machine = RestrictedBoltzmannMachine(weights, field, SignUnits(), SignUnits())
        if method == EXACT:
            gradient = exact_gradient(machine, images)
        else:
            order = order or torch.randperm(len(images), generator=generator).split(plan.batch)
            gradient = contrastive_divergence(machine, images[order[0]], generator=generator)
            order = order[1:]
        weights.grad, field.grad = gradient.weights - plan.decay * weights, gradient.field
        optimizer.step()
        schedule.step()
    return weights, field


def run(plan: Plan, seed: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The log-likelihoods of all models with one seed, and samples of each, (40, 64)."""
    images, held = (x.float() for x in data(seed))
    rows, samples = [], {}
    for name in MODELS:
        begin = time.process_time()
        if name == INDEPENDENT:
            weights, field = torch.zeros(64, 1), independent_field(images)
        else:
            weights, field = train(name, images, plan, seed)
        seconds = round(time.process_time() - begin, 1)
        found = {part: round(log_likelihood(weights, field, x), 3) for part, x in (("train", images), ("held", held))}
        rows.append({"model": name, "seed": seed, **found, "seconds": seconds})
        machine = RestrictedBoltzmannMachine(weights, field, SignUnits(), SignUnits())
        generator = torch.Generator().manual_seed(seed)
        samples[name] = machine.sample(40, steps=plan.gibbs_steps, generator=generator)
    return rows, {"data": held[:40], **samples}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and two standard errors of it."""
    error = 2 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.mean(values), error


def shown(mean: float, error: float) -> str:
    return f"{mean:.2f}" + ("" if math.isinf(error) else f" +- {error:.2f}")


def table(results: dict[str, Any]) -> str:
    """Markdown: log-likelihoods of every model, and what the machines gain over independent pixels, seed by seed."""
    lines = ["| model | train, nats | held out, nats | gain, nats | seconds a run |", "|---" * 5 + "|"]
    base = [row["held"] for row in results["runs"] if row["model"] == INDEPENDENT]
    for name in MODELS:
        rows = [row for row in results["runs"] if row["model"] == name]
        train, held = ([row[part] for row in rows] for part in ("train", "held"))
        gain = shown(*mean_and_error([a - b for a, b in zip(held, base, strict=True)])) if name != INDEPENDENT else "-"
        seconds = f"{statistics.mean(row['seconds'] for row in rows):.0f}"
        lines.append(
            f"| {name} | {shown(*mean_and_error(train))} | {shown(*mean_and_error(held))} | {gain} | {seconds} |"
        )
    return "\n".join(lines)


def updated(page: str, content: str) -> str:
    before, rest = page.split(START)
    return f"{before}{START}\n{content}\n\n{END}{rest.split(END)[1]}"


def picture(samples: dict[str, Tensor], path: Path) -> None:
    """Rows of images: data, and what each model draws."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 * len(samples)), layout="constrained")
    for axes, (name, drawn) in zip(figure.subplots(len(samples)), samples.items(), strict=True):
        grid = torch.nn.functional.pad(drawn.reshape(2, 20, 8, 8), (1, 1, 1, 1)).transpose(1, 2).reshape(20, 200)
        axes.imshow(-grid.numpy(), cmap="gray", vmin=-1, vmax=1)
        axes.set_title("held-out digits" if name == "data" else f"samples: {name}", loc="left", fontsize=10)
        axes.set_axis_off()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=90)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: 8 hidden units, hardly any training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of all models each (default 0)")
    parser.add_argument("--write", action="store_true", help="three full runs, the table of the page and the picture")
    parser.add_argument("--picture", type=Path, help="where to draw samples of the first seed")
    parser.add_argument("--check", action="store_true", help="only compare the table of the page with the results")
    given = parser.parse_args(argv)
    if given.check:
        page, results = PAGE.read_text(), json.loads(RESULTS.read_text())
        if updated(page, table(results)) != page:
            sys.exit(f"the table of {PAGE.name} is not that of {RESULTS.name}: run with --write")
        return results
    plan = QUICK if given.quick and not given.write else Plan()
    torch.set_num_threads(1)  # the table's seconds are those of one core
    found = [run(plan, seed) for seed in ([0, 1, 2] if given.write else given.seeds)]
    results = {"plan": plan._asdict(), "runs": [row for rows, _ in found for row in rows]}
    print(table(results))
    if where := PICTURE if given.write else given.picture:
        picture(found[0][1], where)
    if given.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(updated(PAGE.read_text(), table(results)))
    return results


if __name__ == "__main__":
    main()
