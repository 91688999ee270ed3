"""How the models of the puzzles are trained, and how an answer is found and judged."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from implicit_attention import Equilibrium, Picard
from implicit_attention.adjoints import Adjoint
from implicit_attention.solvers import Solver

from .models import IGNORED, Examples, Model, Shape

#: Relative residual at which a state counts as settled, and most evaluations of a puzzle.
RTOL, CAP = 1e-3, 300
#: Tokens that are solved at once.
AT_ONCE = 32_768


class Task(Protocol):
    """A puzzle with its data."""

    shape: Shape

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        """Puzzles to learn from; the same generator gives every model the same ones."""

    def test(self, name: str, count: int) -> Examples:
        """The first `count` held-out puzzles of a set."""


#: What a loss is taken at; with a term to add to that loss where it is a pair.
State: TypeAlias = Tensor | tuple[Tensor, Tensor]


class Training(Protocol):
    """The part of a recipe that says at which states of a puzzle there is a loss."""

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[State]:
        """States (B, N, dim), or several (S, B, N, dim), with their graph; each time there is an optimiser step.

        done: the part of all updates that has been made.
        """


@dataclasses.dataclass(frozen=True)
class Loop:
    """`steps` blocks in turn; drawn for every batch where it is a range (which makes states settle beyond them).

    every: a loss at the last state and at each `every`th before it, back to the middle; None for the last alone.
    noise: normal noise of this size that every step adds to the state: what is to last must be held with a margin.
    settle: weight of the last step's relative change in the loss, which asks the state to come to rest. It grows from 0
        in the third quarter of the updates: asked for at once, states come to rest before they answer anything.
    half: a loss at half of the steps too.
    """

    steps: int | range
    every: int | None = None
    noise: float = 0.0
    settle: float = 0.0
    half: bool = False

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[State]:
        x, edges = model.embed(batch.inputs), batch.edges
        steps = draw.choice(self.steps) if isinstance(self.steps, range) else self.steps
        z = last = torch.zeros_like(x)
        kept = []
        for index in range(steps):
            last, z = z, model.blocks[index % len(model.blocks)](z, x, edges)
            z = z + self.noise * torch.randn_like(z) if self.noise else z
            left = steps - 1 - index
            regular = self.every is not None and left % self.every == 0 and 2 * (index + 1) >= steps
            if left == 0 or regular or (self.half and left == steps // 2):
                kept.append(z)
        states = kept[0] if len(kept) == 1 else torch.stack(kept)
        weight = self.settle * min(max(4 * done - 2, 0.0), 1.0)
        if weight:
            change, size = (t.flatten(1).norm(dim=1) for t in (z - last, z.detach()))
            yield states, weight * (change / size).mean()
        else:
            yield states


@dataclasses.dataclass(frozen=True)
class Progressive:
    """The progressive loss of deep-thinking networks: a number of steps without a graph, then some with one.

    steps: of both together, at most. share: of this loss; the rest is that of the last of `steps` steps.
    """

    steps: int
    share: Literal[0.5, 1.0] = 1.0

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[State]:
        x, edges = model.embed(batch.inputs), batch.edges
        begun = draw.randrange(self.steps)
        with torch.no_grad():
            z = model.steps(torch.zeros_like(x), x, edges, begun)
        z = model.steps(z, x, edges, draw.randint(1, self.steps - begun))
        # Both have the same share: the mean of two losses.
        yield z if self.share == 1 else torch.stack([z, model.steps(torch.zeros_like(x), x, edges, self.steps)])


@dataclasses.dataclass(frozen=True)
class Segments:
    """`count` times `steps` steps, each from where the one before has ended, without its graph.

    start: size of the normal numbers to start from, 0 for zeros. noise: of the normal numbers that every segment adds
    to its start. keep: the part of the way that a step goes, 1 for all of it.
    """

    steps: int
    count: int
    start: float = 0.0
    noise: float = 0.0
    keep: float = 1.0

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[State]:
        z = self.start * torch.randn_like(model.embed(batch.inputs))
        for _ in range(self.count):
            # The weights have been changed since.
            x = model.embed(batch.inputs)
            z = z.detach() + self.noise * torch.randn_like(z)
            for _ in range(self.steps):
                z = z.lerp(model.block(z, x, batch.edges), self.keep)
            yield z


@dataclasses.dataclass(frozen=True)
class Settled:
    """The fixed point, differentiated by an adjoint of this library."""

    adjoint: Adjoint
    solver: Solver = dataclasses.field(default_factory=lambda: Picard(rtol=RTOL, max_steps=40))

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[Tensor]:
        settled = Equilibrium(model.block, solver=self.solver, adjoint=self.adjoint, on_failure="ignore")
        yield settled(model.embed(batch.inputs), batch.edges)


@dataclasses.dataclass(frozen=True)
class TorchDEQLayer:
    """torchdeq's layer around the same block, with its implicit gradient or its phantom one (`grad` steps)."""

    solver: str = "anderson"
    implicit: bool = True
    grad: int = 1
    most: int = 40

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[Tensor]:
        from torchdeq import get_deq

        ways = {"solver": self.solver, "tol": RTOL, "stop_mode": "rel", "max_iter": self.most}
        options = {f"{way}_{key}": value for way in "fb" for key, value in ways.items()}
        deq: Any = get_deq(ift=self.implicit, grad=self.grad, **options)
        deq.train()
        x, edges = model.embed(batch.inputs), batch.edges
        yield deq(lambda z: model.block(z, x, edges), torch.zeros_like(x))[0][-1]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """AdamW with one cycle of the learning rate, gradients clipped at norm 1.

    updates: of the weights.
    """

    training: Training
    updates: int
    batch: int = 64
    rate: float = 3e-3
    weight_decay: float = 0.01

    def quick(self) -> Recipe:
        return dataclasses.replace(self, updates=min(self.updates, 4), batch=8)


def loss(model: Model, state: State, targets: Tensor) -> Tensor:
    """Mean cross-entropy over what is asked for, and over all states where there are several of every puzzle."""
    if isinstance(state, tuple):
        z, more = state
        return loss(model, z, targets) + more
    z = state
    wanted = targets.expand(z.shape[:-1]).flatten()
    return F.cross_entropy(model.head(z).flatten(0, -2), wanted, ignore_index=IGNORED)


def train(
    task: Task, model: Model, recipe: Recipe, seed: int, progress: Callable[[int], None] = lambda update: None
) -> dict[str, float]:
    """Train a model in place; its seconds of processor and its last losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=recipe.updates, pct_start=0.15)
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    begin, update, losses = time.process_time(), 0, []
    model.train()
    while update < recipe.updates:
        batch = task.draw(recipe.batch, generator).dense()
        states = iter(recipe.training.states(model, batch, draw, update / recipe.updates))
        for z in states:
            found = loss(model, z, batch.targets)
            optimizer.zero_grad()
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(found.detach()))
            update += 1
            progress(update)
            if update == recipe.updates:
                break
    model.eval()
    last = losses[-50:]
    return {"seconds": time.process_time() - begin, "loss": sum(last) / len(last)}


# ------------------------------------------------------------------ answers


class Answer(NamedTuple):
    """States (B, N, dim), and per puzzle (B,) the evaluations of the block and whether it settled."""

    state: Tensor
    evaluations: Tensor
    converged: Tensor


class Way(Protocol):
    """How the state of a puzzle is found with weights that are trained."""

    @property
    def name(self) -> str: ...

    def answer(self, model: Model, x: Tensor, edges: Tensor, start: Tensor) -> Answer: ...


@dataclasses.dataclass(frozen=True)
class Fixed:
    """`count` blocks in turn; settled is what one more changes by less than the tolerance."""

    count: int

    @property
    def name(self) -> str:
        return f"{self.count} steps"

    def answer(self, model: Model, x: Tensor, edges: Tensor, start: Tensor) -> Answer:
        z = model.steps(start, x, edges, self.count)
        if len(model.blocks) > 1:
            settled = torch.zeros(len(x), dtype=torch.bool)
        else:
            change, size = (t.flatten(1).norm(dim=1) for t in (model.steps(z, x, edges, 1) - z, z))
            settled = change <= RTOL * size
        return Answer(z, torch.full((len(x),), self.count), settled)


@dataclasses.dataclass(frozen=True)
class Solved:
    """Solved to the tolerance."""

    solver: Solver = dataclasses.field(default_factory=lambda: Picard(rtol=RTOL, max_steps=CAP))
    label: str = "solved"

    @property
    def name(self) -> str:
        return self.label

    def answer(self, model: Model, x: Tensor, edges: Tensor, start: Tensor) -> Answer:
        settle = Equilibrium(model.block, solver=self.solver, on_failure="ignore")
        state, found = settle(x, edges, start=start, return_solution=True)
        return Answer(state, found.num_evals, found.converged)


@torch.no_grad()
def answered(model: Model, examples: Examples, way: Way, *, start: int | None = None) -> tuple[Answer, Tensor]:
    """The answers to all puzzles, and for each token whether it is right (or not asked for).

    start: the seed of random states to start from; zeros without one.
    """
    parts, right = [], []
    at_once = max(AT_ONCE // examples.inputs.shape[1], 1)
    for begin in range(0, len(examples.inputs), at_once):
        inputs, edges, targets = examples.at(slice(begin, begin + at_once))
        x = model.embed(inputs)
        z = torch.zeros_like(x)
        if start is not None:
            z = torch.randn(x.shape, generator=torch.Generator().manual_seed(start + begin))
        parts.append(way.answer(model, x, edges, z))
        right.append((model.head(parts[-1].state).argmax(-1) == targets) | (targets == IGNORED))
    return Answer(*(torch.cat(list(t)) for t in zip(*parts, strict=True))), torch.cat(right)


def scored(answer: Answer, right: Tensor, targets: Tensor) -> dict[str, Any]:
    """What a set of puzzles says about a way to answer; None where there is nothing to take a mean of."""
    exact, asked = right.all(-1), targets != IGNORED
    evaluations = answer.evaluations.double()

    def share(which: Tensor) -> float | None:
        return float(exact[which].double().mean()) if which.any() else None

    return {
        "exact": float(exact.double().mean()),
        "cells": float((right & asked).sum() / asked.sum()),
        "evaluations_mean": float(evaluations.mean()),
        "evaluations_p99": float(evaluations.quantile(0.99)),
        "evaluations_max": int(evaluations.max()),
        "converged": float(answer.converged.double().mean()),
        "exact_converged": share(answer.converged),
        "exact_unconverged": share(~answer.converged),
        "puzzles": len(exact),
    }
