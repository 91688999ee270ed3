"""The options, the training and the report that the commands `train ...` share."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..studies.errors import InputError
from .command import Command, Progress, seed_option
from .errors import writable

if TYPE_CHECKING:
    from torch import nn

    from ..studies.training import Loss, Trained

#: Minutes of a training by default, and updates with --quick.
MINUTES, QUICK_UPDATES = 5.0, 10


@dataclasses.dataclass(frozen=True)
class TrainCommand(Command):
    """The options and the work that all trainings have in common."""

    minutes: Annotated[
        float | None,
        Option(
            min=0.01,
            max=10_000,
            help="Time to train, turned into a number of updates by timing a few.",
            show_default="5; with --quick 10 updates",
        ),
    ] = None
    updates: Annotated[int | None, Option(min=1, help="Updates to train, in place of --minutes.")] = None
    rate: Annotated[float | None, Option(help="Peak learning rate.", show_default="of the data")] = None
    seed: Annotated[int, seed_option("weights and batches")] = 0
    resume: Annotated[bool, Option("--resume", help="Go on from the last checkpoint in --out.")] = False
    quick: Annotated[bool, Option("--quick", help="Hardly train: a look at the command, with bad answers.")] = False

    def check(self) -> None:
        if self.minutes is not None and self.updates is not None:
            raise InputError("`--minutes` must be left out beside --updates, got both; give one of them")
        if self.resume and (self.minutes is not None or self.updates is not None):
            required = "be left out beside --resume, which ends as the earlier run was to end"
            raise InputError(f"`--minutes` and `--updates` must {required}, got one of them; leave it out")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise InputError(f"`--rate` must be > 0 and finite, got {self.rate:g}; leave it out for the usual one")

    def train(
        self, model: nn.Module, loss_of: Loss, epoch: int, rate: float, progress: Progress, identity: dict[str, Any]
    ) -> Trained:
        """Train the model, or go on with it, as the options say; checkpoints are in `--out`."""
        import torch

        from ..studies.training import TrainingPlan, planned, train

        def plan() -> TrainingPlan:
            if self.updates is not None or (self.quick and self.minutes is None):
                return TrainingPlan(self.updates or QUICK_UPDATES, epoch, rate)
            return planned(model, loss_of, epoch, rate, minutes=self.minutes or MINUTES, progress=progress)

        assert self.out is not None
        origin: dict[str, Any] = {"checkpoint": self.out / "checkpoint.pt", "resume": self.resume, "identity": identity}
        generator = torch.Generator().manual_seed(self.seed)
        with writable("--out", self.out, "folder"):
            return train(model, loss_of, plan, progress, generator=generator, **origin)


def numbers(trained: Trained) -> dict[str, Any]:
    """Return the numbers of a training for a JSON file."""
    plan = trained.plan._asdict()
    return {**plan, "resumed_after": trained.resumed_after, "seconds": trained.seconds, "losses": trained.losses}


def updates(trained: Trained) -> str:
    """Return the words on the number of updates, and their time."""
    first = trained.resumed_after + 1
    return f"{trained.plan.updates} updates, those from {first} on in {trained.seconds:.0f} s"
