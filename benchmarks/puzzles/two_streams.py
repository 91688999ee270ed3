"""9 x 9 Sudoku by recursive reasoners of two streams: a draft that is refined some times for each step of an answer."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from implicit_attention.models.reasoners import TwoStreamReasoner

from .contenders import Contender
from .larger import Larger
from .models import Block, Model, Shape, flops
from .sudoku import LARGE, NAKED, Sudoku, givens
from .training import Loop, Recipe, Segments

#: Steps of the low stream for each of the high one.
CYCLES = 2


class Net(nn.Module):
    """A transformer block of one stream, which reads no input of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = Block(shape)

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.block(h, h.new_zeros(()), edges)
        return out


class Streams(nn.Module):
    """The block of `TwoStreamReasoner` on states (B, N, 2 dim): high, from which the answer is read, then low.

    x (B, N, 2 dim) has zeros behind the input.
    """

    def __init__(self, shape: Shape, cycles: int) -> None:
        super().__init__()
        # One net serves both streams, as in tiny recursion.
        self.block = TwoStreamReasoner(Net(shape), cycles=cycles).block

    def forward(self, state: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        high, low = state.chunk(2, -1)
        return torch.cat(self.block((high, low), x.chunk(2, -1)[0], None, edges), -1)


class Widened(nn.Linear):
    """A linear map, and as many zeros behind what it makes."""

    def forward(self, inputs: Tensor) -> Tensor:
        made = super().forward(inputs)
        return torch.cat([made, torch.zeros_like(made)], -1)


class OfFirst(nn.Linear):
    """A linear map of the first half."""

    def forward(self, state: Tensor) -> Tensor:
        return super().forward(state.chunk(2, -1)[0])


class Reasoner(Model):
    """Embedding, steps of two streams in turn (one is tied), and a linear head of the high one."""

    def __init__(self, shape: Shape, blocks: int = 1, dim: int | None = None, cycles: int = CYCLES) -> None:
        shape = dataclasses.replace(shape, dim=dim or shape.dim)
        super().__init__(shape, blocks=0)
        self.cycles = cycles
        self.embed, self.head = Widened(shape.features, shape.dim), OfFirst(shape.dim, shape.classes)
        self.blocks.extend(Streams(shape, cycles) for _ in range(blocks))

    def flops(self, tokens: int, edges: int, steps: float) -> float:
        return flops(self.shape, tokens, edges, steps * (self.cycles + 1))


TASK = Sudoku(LARGE, (36, 40, 44, 48, 54))
#: Each of three blocks.
STEPS = range(2, 7)
LARGER = Larger(
    "SUDOKU9_STREAMS",
    TASK,
    "9 x 9 grids as in SUDOKU9, by two streams around one transformer block; trained with 36 to 54 givens.",
    "two streams",
    Reasoner,
    narrow=16,
    steps=STEPS,
    recipe=Recipe(Loop(STEPS, half=True, settle=0.5), updates=700, batch=32, rate=3e-3),
    sets=("50 givens", "40 givens", "34 givens", "32 givens"),
    most=100,
    trivial=("givens, and the first digit", givens),
    # Starts with noise take as many evaluations as there may be.
    checked=False,
)
#: Deep supervision: gradients go through half as many steps, and there are twice as many updates.
SEGMENTS = dataclasses.replace(LARGER.recipe, training=Segments(2, 4), updates=1400)
WAYS = LARGER.solved, *LARGER.loops

SEGMENTED = Contender("the same, deep supervision, detached carries", SEGMENTS, WAYS, LARGER.few, make=Reasoner)

PLAN = LARGER.plan(
    SEGMENTED,
    NAKED,
    claims=(
        ("solved", "34 givens", ">=", 0.9, "exact"),
        ("solved", "34 givens", ">=", 0.95, "converged"),
    ),
    notes=(
        "Two streams: a step is `TwoStreamReasoner`'s with cycles=2, low <- net(low + high + x) twice and then high <- "
        "net(high + low), so three transformer blocks; FLOPs count them.",
    ),
    puzzles=300,
    drawn=(SEGMENTED,),
)
