"""What `maze` trains: one weight-tied block that is iterated until the path through a maze has settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import Equilibrium, Picard, Solution
from .mazes import FEATURES, Mazes, mazes

DIM, HEADS = 32, 4
#: Mazes to learn from, of one size and one generator.
TRAIN_SIZE, TRAIN_GENERATOR, TRAIN_MAZES = 5, "depth-first", 10_000
#: Steps of the loop in training, drawn for every batch: numbers that are drawn make states settle.
STEPS = range(12, 25)
RTOL = 1e-3


class Block(nn.Module):
    """z <- norm(z + x + attention(z)), z <- norm(z + mlp(z)), with attention to the cells beside that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])

    def forward(self, z: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        first, second = self.norms
        q, k, v = (t.transpose(-2, -3) for t in self.project(z).unflatten(-1, (3, HEADS, -1)).unbind(-3))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(-3))
        z = first(z + x + self.out(read.transpose(-2, -3).flatten(-2)))
        answer: Tensor = second(z + self.mlp(z))
        return answer


class Solved(NamedTuple):
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
    """Embedding, one tied block, linear head: 8834 parameters for mazes of every size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, DIM), nn.Linear(DIM, 2)
        self.layer = Equilibrium(Block(), steps=STEPS, solver=Picard(rtol=RTOL, max_steps=1000))

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Two logits for every cell (B, N, 2); the second is for being on the path."""
        logits: Tensor = self.head(self.layer(self.embed(inputs), mask))
        return logits

    @torch.no_grad()
    def solved(self, maze: Mazes) -> Solved:
        """The one maze of a batch, with what the state was on its way."""
        x, mask = self.embed(maze.inputs), maze.mask
        state, solution = self.layer(x, mask, return_solution=True, on_failure="ignore")
        paths, residuals, z = [], [], torch.zeros_like(x)
        # Picard's steps are plain: made once more, one by one, they pass through the same states.
        for _ in range(int(solution.num_evals)):
            before, z = z, self.layer.block(z, x, mask)
            residuals.append(float((z - before).norm() / z.norm()))
            paths.append(self.head(z)[0].softmax(-1)[:, 1])
        paths[-1] = self.head(state)[0].softmax(-1)[:, 1]
        return Solved(solution, paths, residuals)


def train(model: MazeModel, updates: int, told: Callable[[int, float], None]) -> None:
    """AdamW with one cycle of the learning rate; `told` hears the number of every update and its loss."""
    examples = mazes(TRAIN_GENERATOR, TRAIN_SIZE, TRAIN_MAZES, "to train")
    inputs, mask, targets = examples.inputs, examples.mask, examples.targets
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=updates, pct_start=0.15)
    model.train()
    for update in range(1, updates + 1):
        some = torch.randint(TRAIN_MAZES, (64,))
        loss = F.cross_entropy(model(inputs[some], mask[some]).flatten(0, 1), targets[some].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        told(update, float(loss.detach()))
    model.eval()
