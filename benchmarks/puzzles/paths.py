"""Lengths of shortest paths in graphs, modulo 3: messages along edges learn small graphs, and settle on large ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from implicit_attention.models.reasoners import GraphReasoner

from .contenders import Contender
from .larger import Larger
from .models import NONE, Examples, Model, Shape
from .training import Loop, Recipe

#: Nodes of graphs to learn from.
NODES = 16
#: A node is joined to one of this many before it, with the chance `TWICE` to a second one, and so grow paths with the
#: number of nodes. It belongs to a part that no path from the source reaches with the chance `APART`.
BEFORE, TWICE, APART = 3, 0.3, 0.25
#: The most neighbours of a node: two before it, and two edges of each of as many behind it.
MOST_NEIGHBOURS = 2 + 2 * BEFORE
#: Classes: lengths 0, 1, 2 modulo 3, and nodes that no path reaches. Neighbours differ by one at most, so that three
#: classes tell who is nearer.
MODULUS, UNREACHED = 3, 3
#: Most evaluations of a graph: several times as many as a path has edges, and as settled states took.
MOST = 300


class Lists(Examples):
    """Graphs, whose lists of neighbours are what both attention and messages read."""

    def dense(self) -> Examples:
        return self


def graphs(count: int, nodes: int, generator: torch.Generator) -> Lists:
    """Undirected graphs of two long parts, node 0 of one of which is the source; a node's list begins with itself."""

    def drawn(high: int) -> Tensor:
        return torch.randint(high, (count, nodes), generator=generator)

    part = (torch.rand(count, nodes, generator=generator) < APART).long()
    part[:, 0] = 0
    # Which node has which rank within its part.
    rank = torch.where(part == 0, (part == 0).cumsum(-1), (part == 1).cumsum(-1)) - 1
    place = torch.zeros(count, 2 * nodes, dtype=torch.long)
    place.scatter_(1, part * nodes + rank, torch.arange(nodes).expand(count, -1))
    near = torch.zeros(count, nodes, nodes, dtype=torch.bool)
    second = torch.rand(count, nodes, generator=generator) < TWICE
    for wanted in (rank > 0, (rank > 0) & second):
        to = place.gather(1, part * nodes + (rank - 1 - drawn(BEFORE)).clamp(min=0))
        near |= torch.zeros_like(near).scatter_(2, to[..., None], wanted[..., None])
    # The source is anywhere in its part, and the numbers of other nodes say nothing.
    order = torch.rand(count, nodes, generator=generator).argsort(-1)
    near = (near | near.mT).gather(1, order[..., None].expand_as(near)).gather(2, order[:, None].expand_as(near))
    source = (part.gather(1, order) == 0).long().argmax(-1)
    return _asked(near, source)


def _asked(near: Tensor, source: Tensor) -> Lists:
    """Graphs with neighbours `near` (B, N, N), and how far every node is from the source (B,)."""
    count, nodes = near.shape[:2]
    front = torch.nn.functional.one_hot(source, nodes).bool()
    inputs, length = front.float()[..., None], torch.full((count, nodes), -1)
    for step in range(nodes):
        length[front] = step
        front = (near & front[:, None, :]).any(-1) & (length < 0)
    order = (~near).to(torch.int8).argsort(dim=-1, stable=True)[..., :MOST_NEIGHBOURS]
    others = order.where(near.gather(-1, order), NONE)
    own = torch.arange(nodes).expand(count, -1)[..., None]
    targets = torch.where(length < 0, UNREACHED, length % MODULUS)
    return Lists(inputs, torch.cat([own, others], -1), targets)


class Paths:
    """How far is each node from the source, modulo 3?"""

    shape = Shape(features=1, classes=MODULUS + 1)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return graphs(count, NODES, generator)

    def test(self, name: str, count: int) -> Examples:
        """Of the set `k nodes`: of other seeds; among graphs of 16 nodes hardly any is drawn twice."""
        nodes = int(name.split()[0])
        return graphs(count, nodes, torch.Generator().manual_seed(2**31 + nodes))


class Messages(nn.Module):
    """The block of `GraphReasoner` on lists of neighbours."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = GraphReasoner(dim).block

    def forward(self, z: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        others = edges[..., 1:]
        own = torch.arange(edges.shape[1], device=edges.device)[:, None].expand(others.shape)
        pairs = torch.stack([others, own.where(others != NONE, NONE)], -1).flatten(1, 2)
        out: Tensor = self.block(z, x, pairs)
        return out


class Passing(Model):
    """Embedding, blocks of messages in turn (one is tied), and a linear head."""

    def __init__(self, shape: Shape, blocks: int = 1, dim: int | None = None) -> None:
        shape = dataclasses.replace(shape, dim=dim or shape.dim)
        super().__init__(shape, blocks=0)
        self.blocks.extend(Messages(shape.dim) for _ in range(blocks))

    def flops(self, tokens: int, edges: int, steps: float) -> float:
        shape = self.shape
        # Two maps of nodes before messages, one of each message, and three behind; a node is not its own neighbour.
        step = 2 * shape.dim**2 * (5 + edges - 1)
        return tokens * (steps * step + 2 * shape.dim * (shape.features + shape.classes))


def all_unreached(examples: Examples) -> Tensor:
    """No node but the source is reached."""
    return torch.where(examples.inputs[..., 0] > 0, 0, UNREACHED)


STEPS = range(8, 17)
LARGER = Larger(
    "PATHS",
    Paths(),
    f"how far is each node from the source, modulo {MODULUS}? Long random graphs, trained on {NODES} nodes.",
    "messages",
    Passing,
    narrow=9,
    steps=STEPS,
    recipe=Recipe(Loop(STEPS, half=True, settle=0.5), updates=1200, batch=64, rate=2e-3),
    sets=("16 nodes", "32 nodes", "64 nodes", "128 nodes"),
    most=MOST,
    trivial=("no other is reached", all_unreached),
)

PLAN = LARGER.plan(
    Contender("attention, tied, 8 to 16 steps drawn", LARGER.recipe, (LARGER.solved, LARGER.loops[0]), LARGER.few),
    claims=(
        ("solved", "128 nodes", ">=", 0.9, "exact"),
        ("12 steps", "128 nodes", "<=", 0.1, "exact"),
    ),
    notes=(
        f"Paths: a node is joined to one or two of the {BEFORE} before it, so that paths grow with the graph; "
        f"{APART:.0%} of the nodes are in a part that no path reaches. A step of messages is `GraphReasoner`'s, with "
        "2 d^2 (4 + K) FLOPs for a node whose list has K places, itself among them.",
    ),
)
