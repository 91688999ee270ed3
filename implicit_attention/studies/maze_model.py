"""The model that solves mazes: one weight-tied block that is iterated until the path through a maze has settled."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import EquilibriumTransformer, Picard, Solution
from .course import course_of
from .mazes import FEATURES, IGNORED, Mazes, mazes
from .progress import Listener, reporter
from .training import make_update

DIM, HEADS = 32, 2
#: Mazes to learn from, of one size and one generator, and so many more with a crossing, which is rare.
TRAIN_SIZE, TRAIN_GENERATOR, TRAIN_MAZES, TRAIN_CROSSED = 5, "depth-first", 6000, 200
#: Mazes of a batch, and how many of them have a crossing.
BATCH, CROSSED = 64, 21
#: Steps of the loop in training, drawn anew for every batch, which makes states settle. Every second state of the
#: later half has a loss, which keeps training from collapsing.
STEPS, EVERY = range(8, 17), 2
#: Weight of the last step's relative change in the loss. It grows in the third quarter of training: from the start, it
#: would bring states to rest before they answer anything.
SETTLE = 0.5
RTOL, RATE = 1e-3, 2e-3


class SolvedMaze(NamedTuple):
    """A solve of one maze of N cells.

    Attributes:
        solution: with status, residual and evaluations.
        paths: after every evaluation, for each cell how sure it is to be on the path, (N,) each.
        residuals: |f(z) - z| / |f(z)| that each evaluation measures.
    """

    solution: Solution
    paths: list[Tensor]
    residuals: list[float]


class MazeModel(nn.Module):
    """Embedding, one tied block, linear head, for mazes of every size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, DIM), nn.Linear(DIM, 2)
        self.layer = EquilibriumTransformer(DIM, HEADS, solver=Picard(rtol=RTOL, max_steps=1000))

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Return two logits for every token (B, N, 2); the second is for being on the path."""
        logits: Tensor = self.head(self.layer(self.embed(inputs), mask))
        return logits

    def course(self, inputs: Tensor, mask: Tensor, steps: int) -> list[Tensor]:
        """Return the states after 0, 1, ... `steps` steps, (B, N, DIM) each."""
        x, heads = self.embed(inputs), mask.unsqueeze(-3)
        states = [torch.zeros_like(x)]
        for _ in range(steps):
            states.append(self.layer.block(states[-1], x, heads))
        return states

    @torch.no_grad()
    def solved(self, maze: Mazes) -> SolvedMaze:
        """Solve the one maze of a batch, and keep the states on the way."""
        solution, states, residuals = course_of(self.layer, self.embed(maze.inputs), maze.mask)
        paths = [self.head(z)[0, : maze.cells].softmax(-1)[:, 1] for z in states]
        return SolvedMaze(solution, paths, residuals)


def trained(updates: int, progress: Listener) -> MazeModel:
    """Train the model with a line of progress: always the same one, whatever torch's generator would draw."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MazeModel()
        count = sum(p.numel() for p in model.parameters())
        name = f"training {count} parameters on {TRAIN_SIZE} x {TRAIN_SIZE} mazes"
        train(model, updates, reporter(progress, name, updates))
    return model


def loss_of(model: MazeModel, batch: tuple[Tensor, Tensor, Tensor], steps: int, settle: float) -> Tensor:
    """Return the cross-entropy at every second state of the later half + `settle` times the last relative change."""
    inputs, mask, targets = batch
    states = model.course(inputs, mask, steps)
    judged = torch.stack(states[: (steps - 1) // 2 : -EVERY])
    wanted = targets.expand(len(judged), -1, -1).flatten()
    wrong = F.cross_entropy(model.head(judged).flatten(0, -2), wanted, ignore_index=IGNORED)
    change, size = (t.flatten(1).norm(dim=1) for t in (states[-1] - states[-2], states[-1].detach()))
    loss: Tensor = wrong + settle * (change / size).mean()
    return loss


def train(model: MazeModel, updates: int, report: Callable[[int, float], None]) -> None:
    """Train by AdamW with one cycle of the learning rate; `report` gets the number of every update and its loss."""
    counts, pools = (BATCH - CROSSED, CROSSED), []
    for count, crossed in ((TRAIN_MAZES, False), (TRAIN_CROSSED, True)):
        drawn = mazes(TRAIN_GENERATOR, TRAIN_SIZE, count, "to train", crossed=crossed)
        pools.append((drawn.inputs, drawn.mask, drawn.targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=updates, pct_start=0.15)
    draw = random.Random(0)
    model.train()
    for done in range(1, updates + 1):
        chosen = [torch.randint(len(pool[0]), (count,)) for pool, count in zip(pools, counts, strict=True)]
        inputs, mask, targets = (
            torch.cat([part[some] for part, some in zip(parts, chosen, strict=True)])
            for parts in zip(*pools, strict=True)
        )
        settle = SETTLE * min(max(4 * (done - 1) / updates - 2, 0.0), 1.0)
        loss = make_update(model, loss_of(model, (inputs, mask, targets), draw.choice(STEPS), settle), optimizer)
        schedule.step()
        report(done, loss)
    model.eval()
