"""A trained Llama, converted from softmax attention to equilibria, beside the same model fine-tuned without conversion.

python docs/examples/convert_llama.py

The model is tiny and predicts the next character of the manual that comes with Python. `--write` runs three seeds,
writes `convert_llama.json` beside this file and the tables of `docs/examples.md`; `--check` compares those two.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import implicit_attention
from implicit_attention.integrations.transformers import convert, last_solves

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "convert_llama.json", HERE.parent / "examples.md"
START = "<!-- tables of convert_llama: python docs/examples/convert_llama.py --write -->\n"
END = "<!-- end of the tables of convert_llama -->"

TRAINED, AT_ONCE, CONVERTED, CONTROL = "softmax", "converted at once", "converted, fine-tuned", "softmax, fine-tuned"
#: What each model is compared with: the control has had the same training as the converted one.
AGAINST = {AT_ONCE: TRAINED, CONTROL: TRAINED, CONVERTED: CONTROL}


class Plan(NamedTuple):
    """Sizes, and how long is trained: at every anchor of the schedule, then with the last one."""

    hidden: int = 96
    context: int = 128
    batch: int = 16
    held: int | None = None  # sequences to measure on; None: all that were held out
    steps: int = 1000
    lr: float = 3e-3
    schedule: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    steps_per_anchor: int = 30
    steps_after: int = 150

    @property
    def fine_tuning(self) -> int:
        return len(self.schedule) * self.steps_per_anchor + self.steps_after


QUICK = Plan(
    hidden=32,
    context=64,
    batch=8,
    held=64,
    steps=300,
    lr=1e-2,
    schedule=(0.75, 0.5),
    steps_per_anchor=10,
    steps_after=20,
)


class Text(NamedTuple):
    """Codes of the characters to train on, (length,), and sequences that were held out, (count, context)."""

    train: Tensor
    held: Tensor
    symbols: int
    about: dict[str, Any]


def load_text(context: int, count: int | None = None) -> Text:
    # Topics repeat each other: what is held out must not be part of what is trained on.
    paragraphs = [paragraph for topic in topics.values() for paragraph in topic.strip("\n").split("\n\n")]
    text = "\n\n".join(dict.fromkeys(paragraphs))
    symbols = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([symbols[character] for character in text])
    train, held = codes.tensor_split([len(codes) * 9 // 10])
    held = held[: len(held) // context * context].view(-1, context)[:count]
    # It differs between versions of Python.
    digest = hashlib.sha256(text.encode()).hexdigest()
    about = {"characters": len(text), "symbols": len(symbols), "held out": held.numel(), "sha256": digest}
    return Text(train, held, len(symbols), about)


def make_model(plan: Plan, symbols: int) -> LlamaForCausalLM:
    """Two layers, four heads that share the keys of two."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=symbols,
            hidden_size=plan.hidden,
            intermediate_size=3 * plan.hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=plan.context,
            tie_word_embeddings=True,
            # The symbols of the text are all characters: there is none that begins or ends it.
            bos_token_id=None,
            eos_token_id=None,
        )
    )


class Training:
    """AdamW over one cycle of the learning rate, which may be run in parts, on batches that the seed decides."""

    def __init__(self, what: str, model: LlamaForCausalLM, text: Text, plan: Plan, steps: int, seed: int) -> None:
        self.what, self.model, self.text, self.plan = what, model, text, plan
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, plan.lr, total_steps=steps)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps, self.seconds, self.failed = 0, 0.0, 0

    def run(self, steps: int) -> None:
        start, console = time.process_time(), Console(file=sys.stderr)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            for _ in progress.track(range(steps), description=self.what):
                batch = self._batch()
                loss = self.model(input_ids=batch, labels=batch).loss
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.failed += failures(self.model)
        self.steps += steps
        self.seconds += time.process_time() - start

    def _batch(self) -> Tensor:
        context = self.plan.context
        starts = torch.randint(len(self.text.train) - context, (self.plan.batch, 1), generator=self.generator)
        return self.text.train[starts + torch.arange(context)]

    def cost(self) -> dict[str, Any]:
        return {"steps": self.steps, "seconds": round(self.seconds, 1), "failed": self.failed}


def failures(model: LlamaForCausalLM) -> int:
    """Solves of the last batch, forward and backward, that did not reach their tolerance."""
    count = 0
    for one in last_solves(model).values():
        count += int(one.failed.sum())
        if one.adjoint.status is not None:  # not `failed`, which has the forward solves that failed a second time
            count += int((one.adjoint.status > implicit_attention.Status.UNSTABLE).sum())
    return count


class Measured(NamedTuple):
    """Bits per character of every sequence held out, (count,), and what the solves of them took."""

    bits: Tensor
    solves: dict[str, Any]


@torch.no_grad()
def measure(model: LlamaForCausalLM, text: Text) -> Measured:
    model.eval()
    bits, evals, converged = [], [], []
    for batch in text.held.split(64):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none")
        bits.append(losses.double().mean(1) / math.log(2))
        for found in last_solves(model).values():
            evals.append(found.num_evals.flatten())
            converged.append(found.converged.flatten())
    model.train()
    if not evals:
        return Measured(torch.cat(bits), {})
    every = torch.cat(evals).double()
    return Measured(
        torch.cat(bits),
        {
            "evaluations": round(float(every.mean()), 2),
            "most evaluations": int(every.max()),
            "converged": float(torch.cat(converged).double().mean()),
        },
    )


def run(plan: Plan, text: Text, seed: int) -> list[dict[str, Any]]:
    """Train one model, go on from it in three ways, and measure all four."""
    torch.manual_seed(seed)
    model = make_model(plan, text.symbols)
    training = Training(f"training, seed {seed}", model, text, plan, plan.steps, seed)
    training.run(plan.steps)
    found = {TRAINED: measure(model, text)}
    more = {TRAINED: training.cost()}

    def fine_tuning(name: str, model: LlamaForCausalLM) -> Training:
        what = f"{name}, seed {seed}"
        return Training(what, model, text, plan, plan.fine_tuning, seed + 1000)

    control = copy.deepcopy(model)
    training = fine_tuning(CONTROL, control)
    training.run(plan.fine_tuning)
    found[CONTROL], more[CONTROL] = measure(control, text), training.cost()

    sample = {"input_ids": text.held[:16]}
    quietly: Any = {"inputs": sample, "on_failure": "ignore"}  # failures are counted instead
    at_once = copy.deepcopy(model)
    jump = convert(at_once, schedule=plan.schedule[-1:], **quietly)
    found[AT_ONCE] = measure(at_once, text)
    more[AT_ONCE] = {"stages": [dataclasses.asdict(stage) for stage in jump.stages]}

    training = fine_tuning(CONVERTED, model)
    slow = convert(
        model,
        schedule=plan.schedule,
        fine_tune=lambda model, stage: training.run(plan.steps_per_anchor),
        **quietly,
    )
    training.run(plan.steps_after)
    found[CONVERTED] = measure(model, text)
    more[CONVERTED] = {**training.cost(), "stages": [dataclasses.asdict(stage) for stage in slow.stages]}

    rows = [_result(name, seed, found) | more[name] for name in (TRAINED, AT_ONCE, CONTROL, CONVERTED)]
    for row in rows:
        print(_row(row), flush=True)
    print(slow)
    return rows


def _result(name: str, seed: int, found: dict[str, Measured]) -> dict[str, Any]:
    bits = found[name].bits
    result = {"model": name, "seed": seed, "bits": round(float(bits.mean()), 4), **found[name].solves}
    if name in AGAINST:
        gaps = bits - found[AGAINST[name]].bits
        result["difference"] = round(float(gaps.mean()), 5)
        result["standard error"] = round(float(gaps.std()) / math.sqrt(len(gaps)), 5)
    return result


def _row(run: dict[str, Any]) -> str:
    row = f"  seed {run['seed']}  {run['model']:<21}  {run['bits']:.3f} bits per character"
    if "seconds" in run:
        row += f"  {run['steps']} steps in {run['seconds']:.1f} s"
    if "converged" in run:
        evals = f"{run['evaluations']:.1f} evaluations a query (at most {run['most evaluations']})"
        row += f"\n{'':10}{evals}, {run['converged']:.2%} converged, {run.get('failed', 0)} failed in training"
    return row


def rows_of(runs: Sequence[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """One row for every seed."""
    return [run for run in runs if run["model"] == model]


def difference(runs: Sequence[dict[str, Any]], model: str) -> tuple[float, float]:
    """The mean over seeds of a model's bits less those of the one it is compared with, and its standard error.

    Seeds vary, and so do the sequences that were held out, which are the same for all seeds: the larger error counts.
    """
    rows = rows_of(runs, model)
    gaps = [row["difference"] for row in rows]
    by_seeds = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    return statistics.mean(gaps), max(by_seeds, statistics.mean(row["standard error"] for row in rows))


def verdict(runs: Sequence[dict[str, Any]], model: str) -> str:
    """Whether a model is better than the one it is compared with, if seeds and held-out text can tell."""
    gap, error = difference(runs, model)
    if math.isinf(error):
        return "one seed decides nothing"
    if abs(gap) <= 2 * error:
        return f"as good as {AGAINST[model]}"
    return f"{'better' if gap < 0 else 'worse'} than {AGAINST[model]}"


def tables(results: dict[str, Any]) -> str:
    """Bits per character and costs, in Markdown; all solves of held-out text converge."""
    runs = results["runs"]
    table = [("model", "bits per character", "difference", "steps", "seconds", "evaluations (at most)", "failed")]
    for name in (TRAINED, AT_ONCE, CONTROL, CONVERTED):
        rows = rows_of(runs, name)
        share, gap = _mean_and_std([row["bits"] for row in rows]), ""
        if name in AGAINST:
            gap = "{:+.3f} +- {:.3f}".format(*difference(runs, name))
        steps = seconds = evals = failed = ""
        if "steps" in rows[0]:
            steps, seconds = str(rows[0]["steps"]), f"{statistics.mean(row['seconds'] for row in rows):.0f}"
        if "converged" in rows[0]:
            failed = str(sum(row["failed"] for row in rows)) if steps else ""
            most = max(row["most evaluations"] for row in rows)
            evals = f"{statistics.mean(row['evaluations'] for row in rows):.1f} ({most})"
        table.append((name, share, gap, steps, seconds, evals, failed))
    return f"{_markdown(table)}\n"


def _mean_and_std(bits: Sequence[float]) -> str:
    return f"{statistics.mean(bits):.3f}" + (f" +- {statistics.stdev(bits):.3f}" if len(bits) > 1 else "")


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def updated(page: str, content: str) -> str:
    before, rest = page.split(START)
    return f"{before}{START}\n{content}\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: a smaller model, fewer steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each (default 0)")
    parser.add_argument("--write", action="store_true", help="three seeds in full, and the tables of the page")
    parser.add_argument("--check", action="store_true", help="only compare the tables of the page with the results")
    given = parser.parse_args(argv)
    if given.check:
        page, results = PAGE.read_text(), json.loads(RESULTS.read_text())
        if updated(page, tables(results)) != page:
            sys.exit(f"the tables of {PAGE.name} are not those of {RESULTS.name}: run with --write")
        return results
    plan, seeds = (Plan(), [0, 1, 2]) if given.write else (QUICK if given.quick else Plan(), given.seeds)
    torch.set_num_threads(1)  # at these sizes threads wait for each other longer than they work
    text = load_text(plan.context, plan.held)
    print(f"{text.about['characters']} characters, {text.about['symbols']} symbols, sha256 {text.about['sha256'][:12]}")
    runs = [row for seed in seeds for row in run(plan, text, seed)]
    for name, reference in AGAINST.items():
        gap = difference(runs, name)[0]
        print(f"  {name} less {reference}: {gap:+.3f} bits per character: {verdict(runs, name)}")
    versions = {
        "implicit_attention": implicit_attention.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    results = {"versions": versions, "text": text.about, "plan": plan._asdict(), "runs": runs}
    if given.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(updated(PAGE.read_text(), tables(results)))
    return results


if __name__ == "__main__":
    main()
