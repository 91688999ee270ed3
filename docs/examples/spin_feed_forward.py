"""Could a feed-forward net stand for what couplings that depend on the field add to a magnetization?

python docs/examples/spin_feed_forward.py

A stack of spin blocks learns digits with the exact answer m = -dF/dh, in which J(h) has the part
1/2 sum_mn <s_m . s_n> dJ_mn/dh_i, a function of all tokens. Nets that see one token are fitted to it afterwards, on the
images that the stack has learned from, and judged on others. `--write` makes three full runs, and writes
`spin_feed_forward.json` beside this file, the shares of `docs/examples.md` and the picture of `docs/spin_layers.md`.
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
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from implicit_attention.layers import SpinTransformer
from implicit_attention.plotting import decomposition_figure
from implicit_attention.spins import Decomposition

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "spin_feed_forward.json", HERE.parent / "examples.md"
PICTURE = HERE.parent / "spin_layers" / "stack.png"
START = "<!-- table of spin_feed_forward: python docs/examples/spin_feed_forward.py --write -->\n"
END = "<!-- end of the table of spin_feed_forward -->"
DIM, HEADS, BLOCKS, PATCHES = 32, 2, 3, 16
#: What is fitted to the J(h) part of a token.
CONSTANT, LINEAR, NET, CONTROL = "constant", "linear map", "net", "net with the mean field"
FITS = (CONSTANT, LINEAR, NET, CONTROL)


class Plan(NamedTuple):
    """How long is trained: the stack on images, the nets on its tokens."""

    epochs: int = 12
    fit_epochs: int = 40
    images: int | None = None


QUICK = Plan(epochs=1, fit_epochs=3, images=400)


class Classifier(nn.Module):
    """Patches of 2 x 2 pixels, spin blocks, and the mean over patches: what a patch is alone tells little."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, DIM)
        self.positions = nn.Parameter(torch.randn(PATCHES, DIM) / 2)
        self.blocks = SpinTransformer(DIM, HEADS, blocks=BLOCKS, derivative="total")
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, 10)

    def tokens(self, images: Tensor) -> Tensor:
        return self.embed(images) + self.positions

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(images))).mean(-2))


def data(seed: int, count: int | None) -> tuple[Tensor, ...]:
    """Patches, (count, 16, 4), and labels: three quarters to learn from, the rest to test."""
    images, labels = (torch.from_numpy(array)[:count] for array in load_digits(return_X_y=True))
    patches = (images.float() / 16).reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, PATCHES, 4)
    train, test = train_test_split(torch.arange(len(labels)), test_size=0.25, random_state=seed, stratify=labels)
    return patches[train], labels[train], patches[test], labels[test]


def train(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Any, epochs: int, lr: float, batch: int) -> None:
    """Minimise the loss with AdamW, in one cycle of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    steps = epochs * -(-len(inputs) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(epochs):
        for index in torch.randperm(len(inputs)).split(batch):
            optimizer.zero_grad()
            loss(model(inputs[index]), targets[index]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def observed(model: Classifier, images: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Decomposition]]:
    """For every block the fields of tokens and what J(h) adds to them, (images, 16, DIM), and all parts."""
    x, pairs = model.tokens(images), []
    parts = model.blocks.decompose(x)
    for block, found in zip(model.blocks.blocks, parts, strict=True):
        field = block.spins.system(block.norm(x)).field
        pairs.append(tuple(t.transpose(-3, -2).flatten(-2) for t in (field, found.coupling_function)))
        x = block(x)
    return pairs, parts


def with_mean(field: Tensor) -> Tensor:
    """A token's field beside the mean over its image."""
    return torch.cat([field, field.mean(-2, keepdim=True).expand_as(field)], -1)


def explained(train_pair: tuple[Tensor, Tensor], test_pair: tuple[Tensor, Tensor], plan: Plan) -> dict[str, float]:
    """R^2 on held-out tokens, one number for all components: 1 - sum |t - fit|^2/sum |t - mean|^2."""
    (field, target), (held_field, held) = train_pair, test_pair
    shift = target.flatten(0, 1).mean(0)
    spread = (target - shift).square().mean().sqrt()
    total = (held - held.flatten(0, 1).mean(0)).square().sum()

    def share(fitted: Tensor) -> float:
        return float(1 - (held - fitted).square().sum() / total)

    def affine(x: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0).double()

    weights = torch.linalg.lstsq(affine(field).flatten(0, 1), target.double().flatten(0, 1)).solution
    found = {CONSTANT: share(shift), LINEAR: share((affine(held_field) @ weights).float())}
    for name, seen in ((NET, lambda x: x), (CONTROL, with_mean)):
        inputs = seen(field).flatten(0, 1)
        net = nn.Sequential(nn.Linear(inputs.shape[-1], 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        # In one unit for all components, which count by their variance, as in R^2.
        train(net, inputs, ((target - shift) / spread).flatten(0, 1), F.mse_loss, plan.fit_epochs, 4e-3, 512)
        with torch.no_grad():
            found[name] = share(shift + spread * net(seen(held_field)))
    return found


def run(plan: Plan, seed: int) -> tuple[dict[str, Any], list[Decomposition]]:
    """One stack, and R^2 of every fit in every block."""
    torch.manual_seed(seed)
    images, labels, held, held_labels = data(seed, plan.images)
    begin = time.process_time()
    model = Classifier()
    train(model, images, labels, F.cross_entropy, plan.epochs, 4e-3, 64)
    with torch.no_grad():
        accuracy = float((model(held).argmax(-1) == held_labels).double().mean())
    (ours, _), (theirs, parts) = observed(model, images), observed(model, held)
    rows = []
    for pair, held_pair, found in zip(ours, theirs, parts, strict=True):
        size = float(found.coupling_function.square().sum().sqrt() / found.total.square().sum().sqrt())
        rows.append({"size": round(size, 3)} | {k: round(v, 4) for k, v in explained(pair, held_pair, plan).items()})
    return {"seed": seed, "accuracy": accuracy, "seconds": round(time.process_time() - begin, 1), "blocks": rows}, parts


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and two standard errors of it."""
    error = 2 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.mean(values), error


def numbers(runs: Sequence[dict[str, Any]], name: str, block: int | None = None) -> list[float]:
    """One number for every seed: of one block, or the mean over all of them."""
    blocks = slice(None) if block is None else slice(block, block + 1)
    return [statistics.mean(row[name] for row in run["blocks"][blocks]) for run in runs]


def verdict(runs: Sequence[dict[str, Any]]) -> str:
    """What a net that sees one token can stand for, by means over blocks and two standard errors of the seeds."""
    if len(runs) < 2:
        return "one seed decides nothing"
    share, error = mean_and_error(numbers(runs, NET))
    if share - error > 0.9:
        could = "could stand for the answer of J(h)"
    elif share + error < 0.5:
        could = "could not stand for the answer of J(h)"
    else:
        could = "could stand for a part of the answer of J(h) only"
    said = [f"a feed-forward net of the usual width {could}: it explains {percent(share, error)} of its variance"]
    for other in (LINEAR, CONTROL):
        gap, noise = mean_and_error([b - a for a, b in zip(numbers(runs, NET), numbers(runs, other), strict=True)])
        better = "as much, within the error" if abs(gap) <= noise else "more" if gap > 0 else "less"
        said.append(f"a {other} explains {better}, {percent(*mean_and_error(numbers(runs, other)))}")
    return "; ".join(said)


def percent(share: float, error: float) -> str:
    return f"{_digits(share)}" + ("" if math.isinf(error) else f" +- {_digits(error)}") + " %"


def _digits(share: float) -> str:
    # No -0.0.
    return f"{round(100 * share, 1) + 0.0:.1f}"


def rows_of(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table: a row for every block, and one for all."""
    rows = [("block", "size, of m", *(f"{name}, %" for name in FITS))]
    for block in (*range(BLOCKS), None):
        shares = (percent(*mean_and_error(numbers(runs, name, block))).removesuffix(" %") for name in FITS)
        size = f"{statistics.mean(numbers(runs, 'size', block)):.2f}"
        rows.append(("all" if block is None else str(block + 1), size, *shares))
    return rows


def shown(runs: Sequence[dict[str, Any]]) -> Table:
    heading, *rows = rows_of(runs)
    table = Table(*heading, title="What J(h) adds, and R^2 of fits to it on held-out tokens, +- two standard errors")
    for row in rows:
        table.add_row(*row)
    return table


def page_table(results: dict[str, Any]) -> str:
    """A paragraph of Markdown with what the table says."""
    runs = results["runs"]
    accuracy = percent(*mean_and_error([run["accuracy"] for run in runs]))
    return f"The stack itself is right on {accuracy}. By these numbers {verdict(runs)}."


def updated(page: str, content: str) -> str:
    before, rest = page.split(START)
    return f"{before}{START}\n{content}\n\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: fewer images, hardly any training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one stack each (default 0 1 2)")
    parser.add_argument("--write", action="store_true", help="full runs, and the table and picture of the pages")
    parser.add_argument("--check", action="store_true", help="only compare the table of the page with the results")
    given = parser.parse_args(argv)
    if given.check:
        page, results = PAGE.read_text(), json.loads(RESULTS.read_text())
        if updated(page, page_table(results)) != page:
            sys.exit(f"the table of {PAGE.name} is not that of {RESULTS.name}: run with --write")
        return results
    plan = QUICK if given.quick and not given.write else Plan()
    torch.set_num_threads(1)  # at these sizes threads wait for each other longer than they work
    seeds = [0, 1, 2] if given.write else given.seeds
    found = [run(plan, seed) for seed in track(seeds, "seeds", console=Console(stderr=True), transient=True)]
    runs = [each for each, _ in found]
    results = {"plan": plan._asdict(), "runs": runs}
    Console().print(shown(runs))
    print(f"accuracy {percent(*mean_and_error([each['accuracy'] for each in runs]))}, {runs[0]['seconds']} s a seed")
    print(verdict(runs))
    if given.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(updated(PAGE.read_text(), page_table(results)))
        PICTURE.parent.mkdir(exist_ok=True)
        decomposition_figure(found[0][1], title="A trained stack on held-out digits").savefig(PICTURE)
    return results


if __name__ == "__main__":
    main()
