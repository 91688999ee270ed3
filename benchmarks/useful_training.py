"""The training and the test of models of `usefulness`: the same samples in the same order, the same optimiser."""

from __future__ import annotations

import dataclasses
import io
import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from implicit_attention import Picard, Status

from .useful_models import RTOL, Block, Model, counted_flops, forward_flops
from .useful_tasks import IGNORED, Examples, Task

#: Parameters with one number for each head; spins have no anchor.
SCALARS = ("anchor", "beta")
#: Held-out examples that are scored at once.
AT_ONCE = 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """The training of every model of a task.

    The first seed is trained with every learning rate; the best one by the validation part is used for all seeds.
    """

    steps: int
    batch: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    #: Held-out examples in each part; None for all there are.
    held: int | None = None

    def quick(self) -> Plan:
        """A look: one seed, one rate, few steps."""
        return dataclasses.replace(self, steps=10, rates=self.rates[-1:], seeds=self.seeds[:1], held=64)


def learned(task: Task, model: Model, plan: Plan) -> tuple[dict[str, Any], bytes]:
    """Return the numbers of one model for a row, and the weights of its first seed."""
    trained = {rate: trial(task, model, plan, plan.seeds[0], rate) for rate in plan.rates}
    best = max(trained, key=lambda rate: trained[rate][1]["validation"] * (1 if task.score == "accuracy" else -1))
    block, *runs = trained[best][0], trained[best][1]
    runs += [trial(task, model, plan, seed, best)[1] for seed in plan.seeds[1:]]
    counted = counted_flops(block, first_batch(task, plan).inputs)
    of_batch = forward_flops(model, task.shape, evaluations_of(block)[0])
    scores = [run["score"] for run in runs]
    evaluations = statistics.mean(run["evaluations_mean"] for run in runs)
    evidence = {
        "score": statistics.mean(scores),
        "score_std": statistics.stdev(scores) if len(scores) > 1 else None,
        "evaluations_mean": evaluations,
        "evaluations_max": max(run["evaluations_max"] for run in runs),
        "converged": statistics.mean(run["converged"] for run in runs) if not model.explicit else None,
        "training_seconds": statistics.mean(run["seconds"] for run in runs),
    }
    found = {
        "model": {**dataclasses.asdict(model), "name": model.name},
        "parameters": sum(parameter.numel() for parameter in block.parameters()),
        "forward_flops": forward_flops(model, task.shape, evaluations),
        "flops_of_one_batch": {"formula": of_batch, "counted": counted},
        "learning_rate": best,
        "validation_by_rate": {f"{rate:g}": run["validation"] for rate, (_, run) in trained.items()},
        "runs": runs,
        "evidence": evidence,
        "ratios": {task.score: evidence["score"]},
    }
    weights = io.BytesIO()
    torch.save(block.state_dict(), weights)
    return found, weights.getvalue()


def trial(task: Task, model: Model, plan: Plan, seed: int, rate: float) -> tuple[Block, dict[str, Any]]:
    """One training from one seed, and its scores."""
    torch.manual_seed(seed)
    block = Block(model, task.shape)
    optimizer = torch.optim.AdamW(block.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=plan.steps)
    generator, begin = torch.Generator().manual_seed(seed), time.perf_counter()
    failed, norms = [0, 0], []
    for _ in range(plan.steps):
        optimizer.zero_grad()
        loss(block, task.draw(plan.batch, generator)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        failed = [total + more for total, more in zip(failed, failures(block), strict=True)]
    seconds = time.perf_counter() - begin
    block.eval()
    validation, score = (scored(task, block, part) for part in (task.validation, task.test))
    return block, {
        "seed": seed,
        "score": score["score"],
        "loss": score["loss"],
        "validation": validation["score"],
        "seconds": seconds,
        "gradient_norm": statistics.mean(norms),
        "failed_in_training": {"forward": failed[0], "backward": failed[1]},
        **{name: score[name] for name in ("evaluations_mean", "evaluations_max", "converged")},
        "anchor_and_beta": None
        if block.model.explicit
        else [
            [torch.as_tensor(getattr(a, name)()).tolist() for name in SCALARS if hasattr(a, name)]
            for a in block.attention
        ],
    }


def loss(block: Block, examples: Examples) -> Tensor:
    """Mean cross-entropy over what is asked for."""
    return F.cross_entropy(block(examples.inputs).flatten(0, -2), examples.targets.flatten(), ignore_index=IGNORED)


def first_batch(task: Task, plan: Plan) -> Examples:
    return task.draw(plan.batch, torch.Generator().manual_seed(plan.seeds[0]))


@torch.no_grad()
def scored(task: Task, block: Block, examples: Examples) -> dict[str, Any]:
    """Score and mean cross-entropy over all examples, evaluations of a query, and the part within tolerance.

    A model with a fixed budget stops at no tolerance: it is solved again with one, in as many evaluations.
    """
    hits = asked = surprise = 0.0
    means, most, converged = [], 0, []
    for inputs, targets in zip(*(part.split(AT_ONCE) for part in examples), strict=True):
        scores, wanted = block(inputs).flatten(0, -2), targets.flatten()
        scores, wanted = scores[wanted != IGNORED], wanted[wanted != IGNORED]
        hits += float((scores.argmax(-1) == wanted).sum())
        surprise += float(F.cross_entropy(scores, wanted, reduction="sum"))
        asked += len(wanted)
        mean, largest = evaluations_of(block)
        means.append(mean * len(inputs))
        most = max(most, largest)
        if block.model.kind == "budget":
            block(inputs, solver=Picard(rtol=RTOL, max_steps=block.model.count - 1), on_failure="ignore")
        if not block.model.explicit:
            converged.append(float(block.attention[0].last_solve.converged.double().mean()) * len(inputs))
    mean_loss = surprise / asked
    return {
        "score": hits / asked if task.score == "accuracy" else mean_loss / math.log(2),
        "loss": mean_loss,
        "evaluations_mean": sum(means) / len(examples.inputs),
        "evaluations_max": most,
        "converged": None if block.model.explicit else sum(converged) / len(examples.inputs),
    }


def evaluations_of(block: Block) -> tuple[float, int]:
    """Mean and largest number of evaluations of a query in the last call; 0 for explicit steps."""
    if not block.attention:
        return 0.0, 0
    counts = block.attention[0].last_solve.num_evals
    return float(counts.double().mean()), int(counts.max())


def failures(block: Block) -> tuple[int, int]:
    """Solves of the last batch that did not reach their tolerance, forward and backward; a fixed budget has none."""
    if not block.model.stops:
        return 0, 0
    evidence = block.attention[0].last_solve
    backward = evidence.adjoint.status
    return int(evidence.failed.sum()), 0 if backward is None else int((backward > Status.UNSTABLE).sum())


def restored(model: Model, task: Task, weights: bytes) -> Block:
    """The block that `learned` trained."""
    block = Block(model, task.shape)
    block.load_state_dict(torch.load(io.BytesIO(weights)))
    return block.eval()
