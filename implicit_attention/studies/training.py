"""Training by the published recipe, with progress, and checkpoints to resume from."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models.checkpoint import load_checkpoint, save_checkpoint
from .errors import InputError
from .progress import Listener

#: AdamW, gradient clipping and the shape of the learning rate as published (Hoover et al., 2023): a warm-up of 2 of 100
#: epochs, then a cosine down to 1/1000 of the peak.
BETAS, WEIGHT_DECAY, CLIP, WARM_UP, LOWEST = (0.9, 0.99), 0.05, 1.0, 0.02, 1e-3
#: To plan a training by its time at least so many updates are timed, for at least this part of the time, as solves grow
#: longer while weights grow; and the fewest updates of a plan.
TIMED, TIMED_PART, FEWEST = 4, 0.05, 10
#: Seconds between two lines where stderr is no terminal, and between two checkpoints within an epoch.
EVERY = 10.0

#: The loss of one batch, which it draws with the generator.
Loss = Callable[[nn.Module, torch.Generator], Tensor]


class TrainingPlan(NamedTuple):
    """The length of a training.

    Attributes:
        updates: their number.
        epoch: updates between two checkpoints.
        rate: peak learning rate.
    """

    updates: int
    epoch: int
    rate: float


class Trained(NamedTuple):
    """The description of a training run.

    Attributes:
        plan: of a resumed training that of the first run.
        losses: the mean loss of every epoch.
        resumed_after: updates that an earlier process had made.
        seconds: of the other updates.
    """

    plan: TrainingPlan
    losses: list[float]
    resumed_after: int
    seconds: float


def planned(
    model: nn.Module, loss_of: Loss, epoch: int, rate: float, *, minutes: float, progress: Listener
) -> TrainingPlan:
    """Return the number of updates that the minutes hold, from a few timed on a copy of the model.

    The number is kept in the checkpoint: a resumed training makes the updates that were planned at first.
    """
    progress.begin("timing a few updates")
    trial, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    optimizer, _ = _optimizer(trial, TrainingPlan(TIMED, epoch, rate))
    make_update(trial, loss_of(trial, generator), optimizer)
    seconds, begin, count, spent = 60 * minutes, time.perf_counter(), 0, 0.0
    while count < TIMED or spent < TIMED_PART * seconds:
        make_update(trial, loss_of(trial, generator), optimizer)
        count, spent = count + 1, time.perf_counter() - begin
    return TrainingPlan(max(FEWEST, int((seconds - spent) * count / spent)), epoch, rate)


def train(
    model: nn.Module,
    loss_of: Loss,
    make_plan: Callable[[], TrainingPlan],
    progress: Listener,
    *,
    generator: torch.Generator,
    checkpoint: Path,
    resume: bool,
    identity: dict[str, Any],
) -> Trained:
    """Train the model in place, with a checkpoint at the end of every epoch, and every few seconds.

    A training that was killed and is resumed ends with the same weights, to the bit, as one that was not.

    Args:
        model: in the state it begins with.
        loss_of: the loss of a batch.
        make_plan: makes the plan, unless a training is resumed.
        progress: gets the reports.
        generator: of all random numbers of the training.
        checkpoint: the file.
        resume: go on from the file, else begin, and refuse a file that exists.
        identity: settings that a resumed training must share.

    Raises:
        InputError: a file that is missing, in the way, damaged or of other settings; a loss that is not finite.
    """
    if resume:
        record = _read(checkpoint, model, identity)
        plan, losses = TrainingPlan(**record["plan"]), list(record["losses"])
    elif checkpoint.exists():
        required, remedy = "hold no checkpoint", "go on with --resume, choose another folder, or delete the file"
        raise InputError(f"`--out` must {required} of another training, got {checkpoint.name} there; {remedy}")
    else:
        plan, losses = make_plan(), []
    optimizer, schedule = _optimizer(model, plan)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    state["generators"] = {"data": generator}
    done, of_epoch, begin = 0, 0.0, time.perf_counter()
    if resume:
        done, _ = load_checkpoint(checkpoint, **state)
        of_epoch = record.get("of_epoch", 0.0)
    name = f"training {sum(p.numel() for p in model.parameters())} parameters"
    reported, saved = begin, -math.inf
    model.train()
    for update in range(done + 1, plan.updates + 1):
        loss = make_update(model, loss_of(model, generator), optimizer)
        if not math.isfinite(loss):
            remedy = "lower --rate; the last checkpoint is from before"
            raise InputError(f"training stopped at update {update}: the loss must be finite, got {loss}; {remedy}")
        schedule.step()
        of_epoch += loss
        progress.begin(f"{name}, loss {loss:.3f}", update, plan.updates)
        if update % plan.epoch == 0 or update == plan.updates:
            losses.append(of_epoch / ((update - 1) % plan.epoch + 1))
            of_epoch, saved = 0.0, -math.inf
        now = time.perf_counter()
        if now - saved > EVERY:
            extra = {"identity": identity, "plan": plan._asdict(), "losses": losses, "of_epoch": of_epoch}
            save_checkpoint(checkpoint, **state, step=update, extra=extra)
            saved = now
        if update == plan.updates or (now - reported > EVERY and not progress.has_bar):
            reported = now
            progress.end(name, {"line": f"update {update} of {plan.updates}, loss {loss:.3f}, {now - begin:.0f} s"})
    model.eval()
    return Trained(plan, losses, done, time.perf_counter() - begin)


def _optimizer(model: nn.Module, plan: TrainingPlan) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    warm = max(1, round(WARM_UP * plan.updates))

    def factor(done: int) -> float:
        if done < warm:
            return (done + 1) / warm
        part = min((done - warm) / max(1, plan.updates - warm), 1.0)
        return LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * part)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _read(checkpoint: Path, model: nn.Module, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the record saved beside the weights; raise `InputError` where it is of another training."""
    try:
        _, record = load_checkpoint(checkpoint, model=model)
    except FileNotFoundError:
        required = "find a checkpoint of an earlier run in --out"
        raise InputError(f"`--resume` must {required}, got no {checkpoint.name} there; leave --resume out") from None
    except ValueError as error:
        raise InputError(f"`--resume` cannot use {checkpoint.name} in --out: {error}") from None
    saved = {name: record["identity"].get(name) for name in identity}
    differing = [f"{name} {saved[name]} instead of {value}" for name, value in identity.items() if saved[name] != value]
    if differing:
        required = f"have the settings of the earlier run, which has {', '.join(differing)}"
        raise InputError(f"`--resume` must {required}; give the same ones")
    return dict(record)


def make_update(model: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Make one update with clipped gradients, and return the loss as a number."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return float(loss.detach())
