"""The models of the puzzles: one post-norm transformer block with the puzzle added at every step, tied or stacked.

    z <- norm(z + x + attention(z)),  z <- norm(z + mlp(z)),  from z = 0; x = embed(inputs)

Attention is over the tokens that a token may see (its edges) and knows no positions: what a cell is told is its own
input, and which cells are beside it. So the same weights answer puzzles of every size.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from implicit_attention.studies.mazes import IGNORED as IGNORED
from implicit_attention.studies.mazes import NONE as NONE
from implicit_attention.studies.mazes import mask_of as mask_of


class Examples(NamedTuple):
    """Puzzles of one size.

    inputs: (B, N, features), what is known of every token.
    edges: which tokens a token attends to, one at least: a boolean mask (B, N, N), or the lists of their numbers,
        (B, N, K), filled up with `NONE`.
    targets: (B, N), the class of every token.
    """

    inputs: Tensor
    edges: Tensor
    targets: Tensor

    def at(self, index: Tensor | slice) -> Examples:
        """Some of the puzzles."""
        return Examples(*(part[index] for part in self))

    def dense(self) -> Examples:
        """The same with a mask, by which torch's attention trains faster where tokens are few."""
        return self if self.edges.dtype == torch.bool else self._replace(edges=mask_of(self.edges))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a task asks of its models."""

    features: int
    classes: int
    dim: int = 32
    heads: int = 4
    #: Width of the feed-forward part in units of `dim`.
    wide: int = 2


class Attention(nn.Module):
    """Softmax attention of every token over its edges."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, z: Tensor, edges: Tensor) -> Tensor:
        queries, keys, values = self.project(z).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if edges.dtype == torch.bool:
            read = F.scaled_dot_product_attention(
                *(part.transpose(-2, -3) for part in (queries, keys, values)), attn_mask=edges.unsqueeze(-3)
            ).transpose(-2, -3)
        else:
            read = over_lists(queries, keys, values, edges)
        out: Tensor = self.out(read.flatten(-2))
        return out


def over_lists(queries: Tensor, keys: Tensor, values: Tensor, edges: Tensor) -> Tensor:
    """Attention (B, N, heads, d) over lists of edges (B, N, K): N K scores and not N^2."""
    batch, tokens, *size = queries.shape
    first = tokens * torch.arange(batch, device=edges.device)[:, None, None]
    places = (edges.clamp(min=0) + first).flatten()
    near = (t.reshape(batch * tokens, *size).index_select(0, places) for t in (keys, values))
    keys, values = (t.view(*edges.shape, *size) for t in near)
    scores = (queries[:, :, None] * keys).sum(-1) * size[-1] ** -0.5
    weights = scores.masked_fill((edges == NONE)[..., None], -torch.inf).softmax(2)
    return (weights[..., None] * values).sum(2)


class Block(nn.Module):
    """One step of the state z (B, N, dim) of a puzzle x (B, N, dim) with its edges."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, wide = shape.dim, shape.wide * shape.dim
        self.attention = Attention(dim, shape.heads)
        self.mlp = nn.Sequential(nn.Linear(dim, wide), nn.GELU(), nn.Linear(wide, dim))
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, z: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        z = self.attention_norm(z + x + self.attention(z, edges))
        out: Tensor = self.mlp_norm(z + self.mlp(z))
        return out


class Model(nn.Module):
    """Embedding, `blocks` blocks in turn (one is tied, and may be run as often as one likes), and a linear head."""

    def __init__(self, shape: Shape, blocks: int = 1) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Linear(shape.features, shape.dim)
        self.head = nn.Linear(shape.dim, shape.classes)
        # Made last: with the same seed the rest, and the first block, begins with the same weights.
        self.blocks = nn.ModuleList(Block(shape) for _ in range(blocks))

    @property
    def block(self) -> nn.Module:
        """The one that is tied."""
        (only,) = self.blocks
        return only

    def flops(self, tokens: int, edges: int, steps: float) -> float:
        """Multiplications and additions of matrix products of one puzzle with `edges` for each of its `tokens`."""
        return flops(self.shape, tokens, edges, steps)

    def steps(self, z: Tensor, x: Tensor, edges: Tensor, count: int) -> Tensor:
        """`count` blocks in turn from z."""
        for index in range(count):
            z = self.blocks[index % len(self.blocks)](z, x, edges)
        return z


def flops(shape: Shape, tokens: int, edges: int, steps: float) -> float:
    """Multiplications and additions of matrix products of one puzzle: `steps` blocks, embedding and head.

    steps N (8 d^2 + 4 w d^2 + 4 K d) + 2 N d (features + classes), with K edges per token; masked ones count.
    """
    dim = shape.dim
    block = 8 * dim**2 + 4 * shape.wide * dim**2 + 4 * edges * dim
    return tokens * (steps * block + 2 * dim * (shape.features + shape.classes))
