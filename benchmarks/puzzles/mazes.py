"""Perfect mazes as graphs: cells are tokens, passages are edges, the one path from start to goal is the answer."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from implicit_attention import Implicit, OneStep, Phantom, Picard, RepeatedSelfAttention
from implicit_attention.solvers import TorchDEQ

from .contenders import Claim, Contender, Plan
from .models import IGNORED, NONE, Block, Examples, Model, Shape, mask_of
from .training import CAP, RTOL, Fixed, Loop, Recipe, Settled, Solved, TorchDEQLayer, Training

#: The four ways out of a cell, as (rows, columns): up, down, left, right.
WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))

Parents = list[int]


def around(cell: int, size: int) -> list[int]:
    """The cells beside one in the grid, walls or not."""
    row, column = divmod(cell, size)
    return [
        (row + down) * size + column + right
        for down, right in WAYS
        if 0 <= row + down < size and 0 <= column + right < size
    ]


def depth_first(size: int, draw: random.Random) -> Parents:
    """Walk to a cell not seen before until there is none, then back: long winding ways with few branches."""
    first = draw.randrange(size * size)
    parent, way = [-1] * size**2, [first]
    parent[first] = first
    while way:
        free = [cell for cell in around(way[-1], size) if parent[cell] < 0]
        if not free:
            way.pop()
            continue
        cell = draw.choice(free)
        parent[cell] = way[-1]
        way.append(cell)
    return parent


def prim(size: int, draw: random.Random) -> Parents:
    """Open a wall drawn from all that border what is reached, again and again: short ways with many branches."""
    first = draw.randrange(size * size)
    parent = [-1] * size**2
    parent[first] = first
    walls = [(first, cell) for cell in around(first, size)]
    while walls:
        index = draw.randrange(len(walls))
        walls[index], walls[-1] = walls[-1], walls[index]
        known, cell = walls.pop()
        if parent[cell] < 0:
            parent[cell] = known
            walls += [(cell, other) for other in around(cell, size) if parent[other] < 0]
    return parent


def wilson(size: int, draw: random.Random) -> Parents:
    """Random walks without their loops, from every cell to what is reached: every spanning tree is as likely."""
    parent = [-1] * size**2
    first = draw.randrange(size * size)
    parent[first] = first
    for begin in range(size * size):
        cell, last = begin, {}
        while parent[cell] < 0:
            last[cell] = draw.choice(around(cell, size))
            cell = last[cell]
        cell = begin
        while parent[cell] < 0:
            parent[cell] = last[cell]
            cell = last[cell]
    return parent


#: Each draws a spanning tree of the grid, as the parent of every cell (the root is its own).
GENERATORS: dict[str, Callable[[int, random.Random], Parents]] = {
    "depth-first": depth_first,
    "Prim": prim,
    "Wilson": wilson,
}


def path(parent: Parents, start: int, goal: int) -> list[int]:
    """The cells from start to goal: up from both to where their ways meet."""
    up = [start]
    while parent[up[-1]] != up[-1]:
        up.append(parent[up[-1]])
    places, down = {cell: index for index, cell in enumerate(up)}, [goal]
    while down[-1] not in places:
        down.append(parent[down[-1]])
    return up[: places[down[-1]]] + down[::-1]


#: What is known of a token: whether it is the start, the goal, a wall.
FEATURES = 3
#: Mazes to learn from: of one size, of one generator. Batches are drawn from them.
TRAIN_SIZE, TRAIN_GENERATOR, TRAIN_MAZES = 5, "depth-first", 10_000
SIZES = (5, 7, 9, 13, 17)


def mazes(generator: str, size: int, count: int, seed: str) -> Examples:
    """`count` mazes of size x size cells from one corner to the opposite one; class 1 is the path.

    Behind the cells stand four walls, a token for each side. A cell attends on each side to the cell beside it, or to
    the wall: always four tokens, so that their mean counts, whatever the number of ways out. A wall attends to itself.
    The first mazes of a larger count are those of a smaller one.
    """
    draw, cells, sides = random.Random(f"{generator}, {size} x {size}, {seed}"), size * size, len(WAYS)
    inputs, edges = torch.zeros(count, cells + sides, FEATURES), torch.full((count, cells + sides, sides), NONE)
    walls = torch.arange(cells, cells + sides)
    inputs[:, 0, 0] = inputs[:, cells - 1, 1] = 1
    inputs[:, cells:, 2] = 1
    edges[:, :cells], edges[:, cells:, 0] = walls, walls
    targets = torch.zeros(count, cells + sides, dtype=torch.long)
    targets[:, cells:] = IGNORED
    side = {down * size + right: place for place, (down, right) in enumerate(WAYS)}
    for index in range(count):
        parent = GENERATORS[generator](size, draw)
        passages = [(cell, other) for cell, other in enumerate(parent) if cell != other]
        both = passages + [(other, cell) for cell, other in passages]
        here, there = (list(ends) for ends in zip(*both, strict=True))
        edges[index, here, [side[other - cell] for cell, other in both]] = torch.tensor(there)
        targets[index, path(parent, 0, cells - 1)] = 1
    return Examples(inputs, edges, targets)


@functools.cache
def learnt() -> Examples:
    return mazes(TRAIN_GENERATOR, TRAIN_SIZE, TRAIN_MAZES, "to train")


@functools.cache
def masked() -> Examples:
    return learnt().dense()


@functools.cache
def held_out(generator: str, size: int, count: int) -> Examples:
    """The first `count` mazes to test with; none that is learnt from."""
    if size != TRAIN_SIZE:
        return mazes(generator, size, count, "to test")
    known, drawn = {drawing(maze) for maze in learnt().edges}, mazes(generator, size, 2 * count, "to test")
    new = [index for index, maze in enumerate(drawn.edges) if drawing(maze) not in known]
    return drawn.at(torch.tensor(new[:count]))


def drawing(edges: Tensor) -> bytes:
    """What tells a maze from others."""
    found: bytes = edges.numpy().tobytes()
    return found


class Mazes:
    """Trained on 5 x 5 mazes of one generator, tested on larger ones and on those of other generators."""

    shape = Shape(features=FEATURES, classes=2, heads=2)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return masked().at(torch.randint(TRAIN_MAZES, (count,), generator=generator))

    def test(self, name: str, count: int) -> Examples:
        """Of the set `generator size`."""
        generator, size = name.rsplit(" ", 1)
        return held_out(generator, int(size), count)


def no_cell(examples: Examples) -> Tensor:
    """The majority's class: nothing is on the path."""
    return torch.zeros_like(examples.targets)


def no_dead_ends(examples: Examples) -> Tensor:
    """All cells but those with one way out that are neither start nor goal."""
    tokens = examples.edges.shape[1]
    ways = (examples.edges < tokens - len(WAYS)).sum(-1)
    return ((examples.inputs[..., :2].sum(-1) > 0) | (ways > 1)).long()


class Convex(Block):
    """The map of `RepeatedSelfAttention`: anchor x + (1 - anchor) attention of z to itself, learned temperature."""

    def __init__(self, shape: Shape) -> None:
        nn.Module.__init__(self)
        self.log_beta, self.anchor_logit = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-2.0))

    def forward(self, z: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        mask = edges if edges.dtype == torch.bool else mask_of(edges)
        anchor = self.anchor_logit.sigmoid()
        problem = RepeatedSelfAttention(x, self.log_beta.exp(), anchor, mask=mask)
        return problem.fixed_point_map(z)


class Repeated(Model):
    """Its own best: what it is not given inside the loop it has before and behind it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, blocks=0)
        dim = shape.dim
        self.embed = nn.Sequential(nn.Linear(shape.features, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, shape.classes))
        self.blocks.append(Convex(shape))


# ------------------------------------------------------------------ who competes

#: Steps of the loop in training: numbers that are drawn, and a loss on the last change, make states settle.
STEPS, MEAN_STEPS, SETTLE = range(8, 17), 12, 0.3
#: Blocks of the stack that costs what solving 9 x 9 mazes costs.
DEEP = 40
SHOWN = tuple(f"{TRAIN_GENERATOR} {size}" for size in SIZES)
OTHERS = tuple(f"{name} {size}" for name in ("Prim", "Wilson") for size in SIZES)
FEW = (*SHOWN, "Prim 13", "Wilson 13")

RECIPE = Recipe(Loop(STEPS, settle=SETTLE), updates=500, batch=128, rate=1.5e-3)


def _with(training: Training) -> Recipe:
    return dataclasses.replace(RECIPE, training=training)


TIED = "tied, 8 to 16 steps, settling"
LOOPS = (Fixed(MEAN_STEPS), Fixed(8 * MEAN_STEPS))
#: Some states go to and fro between two by plain steps; damping ends that.
DAMPED = Solved(Picard(rtol=RTOL, max_steps=CAP, damping=0.3), "solved, damped")
BOTH = (DAMPED, Solved())
TORCHDEQ = Solved(TorchDEQ("anderson", rtol=RTOL, max_steps=CAP), "solved by torchdeq's anderson")

CONTENDERS = (
    Contender(TIED, RECIPE, (*BOTH, *LOOPS), solvers=True),
    Contender("tied, 8 to 16 steps", _with(Loop(STEPS)), BOTH, FEW, solvers=True),
    Contender("tied, 12 steps", _with(Loop(MEAN_STEPS)), (*BOTH, *LOOPS), FEW),
    Contender("stack of 12", _with(Loop(MEAN_STEPS)), (Fixed(MEAN_STEPS),), make=partial(Model, blocks=MEAN_STEPS)),
    Contender(f"stack of {DEEP}", _with(Loop(DEEP)), (Fixed(DEEP),), make=partial(Model, blocks=DEEP)),
    Contender("tied, one-step gradient", _with(Settled(OneStep())), BOTH, FEW),
    Contender("tied, phantom gradient (5)", _with(Settled(Phantom(5))), BOTH, FEW),
    Contender("tied, implicit gradient", _with(Settled(Implicit())), BOTH, FEW),
    Contender("torchdeq's layer, implicit", _with(TorchDEQLayer()), (DAMPED, TORCHDEQ), FEW),
    Contender("RepeatedSelfAttention", _with(Loop(MEAN_STEPS)), (Solved(),), FEW, make=Repeated),
    Contender("no cell", None, guess=no_cell),
    Contender("all but dead ends", None, guess=no_dead_ends),
)

PLAN = Plan(
    "MAZES",
    Mazes(),
    "perfect mazes as graphs of cells, from corner to corner, learnt from 5 x 5 ones by depth-first search.",
    CONTENDERS,
    (*SHOWN, *OTHERS),
    costs=f"{TRAIN_GENERATOR} 9",
    solver_set=f"{TRAIN_GENERATOR} 9",
    leader=(TIED, DAMPED.name),
    drawn=(
        (TIED, DAMPED.name),
        *((TIED, way.name) for way in LOOPS),
        ("stack of 12", "12 steps"),
        (f"stack of {DEEP}", f"{DEEP} steps"),
        ("all but dead ends", "guess"),
    ),
    claims=(
        Claim(TIED, DAMPED.name, f"{TRAIN_GENERATOR} 9", ">=", 0.95),
        Claim(TIED, DAMPED.name, f"{TRAIN_GENERATOR} 17", ">=", 0.85),
        Claim(TIED, DAMPED.name, "Prim 13", ">=", 0.65),
        Claim("stack of 12", "12 steps", f"{TRAIN_GENERATOR} 9", "<=", 0.1),
        Claim(f"stack of {DEEP}", f"{DEEP} steps", f"{TRAIN_GENERATOR} 9", "<=", 0.1),
    ),
)
