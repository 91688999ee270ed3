"""Mazes: a block learns 5 x 5 mazes in a loop, and solves larger ones by iterating until its answer has settled.

python docs/examples/mazes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _puzzles import arguments, compare, train
from torch import Tensor, nn

from implicit_attention import EquilibriumTransformer, Picard
from implicit_attention.studies.mazes import FEATURES, Mazes, mazes

DIM, HEADS = 32, 2
TRAINED, SIZES = 5, (5, 9, 13, 17)


class Solver(nn.Module):
    """One transformer block, repeated: on each side a cell attends to the cell beside it, or to a wall."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, DIM), nn.Linear(DIM, 2)
        solver = Picard(rtol=1e-3, max_steps=500)
        self.layer = EquilibriumTransformer(DIM, HEADS, solver=solver, on_failure="ignore")

    def forward(self, inputs: Tensor, mask: Tensor, steps: int | None = None) -> Tensor:
        return self.head(self.layer(self.embed(inputs), mask, steps=steps))

    def loss(self, inputs: Tensor, mask: Tensor, targets: Tensor, done: float) -> Tensor:
        """A loop of 8 to 16 steps; it is to be right at every second state of its later half, and then to rest."""
        x, steps, z, states = self.embed(inputs), int(torch.randint(8, 17, ())), None, []
        for count in (steps - steps // 4 * 2, *[2] * (steps // 4)):
            z = self.layer(x, mask, steps=count, start=z)
            states.append(z)
        logits = self.head(torch.stack(states, 1)).flatten(0, -2)
        wrong = F.cross_entropy(logits, targets.unsqueeze(1).expand(-1, len(states), -1).flatten())
        # Rest is asked for late: asked for at once, states come to rest before they answer anything.
        change = (self.layer(x, mask, steps=1, start=z) - z).flatten(1).norm(dim=1) / z.detach().flatten(1).norm(dim=1)
        return wrong + 0.5 * min(max(4 * done - 2, 0), 1) * change.mean()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv)
    torch.manual_seed(given.seed)
    # Cells with four ways out are rare in these mazes: a third of every batch has one.
    plain, crossed = (
        mazes("depth-first", TRAINED, 100 if given.quick else count, f"to train {given.seed}", crossed=only)
        for count, only in ((6000, False), (200, True))
    )

    def batch() -> tuple[tuple[Tensor, Tensor], Tensor]:
        some = [(pool, torch.randint(len(pool.targets), (count,))) for pool, count in ((plain, 43), (crossed, 21))]
        drawn = Mazes(*(torch.cat(parts) for parts in zip(*([t[i] for t in pool] for pool, i in some), strict=True)))
        return (drawn.inputs, drawn.mask), drawn.targets

    solver = Solver()
    seconds = train(solver, batch, updates=5 if given.quick else 600, rate=2e-3, loss=solver.loss)
    known = {maze.tobytes() for pool in (plain, crossed) for maze in pool.edges.numpy()}
    sets = {}
    for size in SIZES[: 2 if given.quick else None]:
        test = mazes("depth-first", size, 8 if given.quick else 100, "to test")
        new = torch.tensor([maze.tobytes() not in known for maze in test.edges.numpy()])
        test = Mazes(*(part[new] for part in test))
        sets[f"{size} x {size}"] = (test.inputs, test.mask), test.targets
    return {"seconds": seconds} | compare("mazes", solver, sets, loop=12)


if __name__ == "__main__":
    main()
