"""What the puzzles share: train in a loop, then compare the loop with the equilibrium of the same weights."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from implicit_attention import Equilibrium

#: What a model is called with, and the class of every cell (below 0: not asked for).
Examples = tuple[tuple[Tensor, ...], Tensor]


def arguments(description: str | None, argv: Sequence[str] | None, picture: str | None = None) -> argparse.Namespace:
    """The options of an example; `picture` says what its option --picture FILE does."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: hardly any training, few tests")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and what is learnt from (default 0)")
    if picture is not None:
        parser.add_argument("--picture", type=Path, metavar="FILE", help=picture)
    return parser.parse_args(argv)


def train(
    model: nn.Module,
    batch: Callable[[], Examples],
    updates: int,
    rate: float = 3e-3,
    loss: Callable[..., Tensor] | None = None,
) -> float:
    """Train with AdamW, in one cycle of the learning rate; the seconds of the processor.

    loss: of the inputs of a batch, its targets, and the part of all updates that has been made; else cross-entropy.
    """
    torch.set_num_threads(1)  # at these sizes threads wait for each other longer than they work
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=updates, pct_start=0.15)
    begin, console = time.process_time(), Console(file=sys.stderr)
    model.train()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=updates)
        for update in range(updates):
            inputs, targets = batch()
            if loss is None:
                found = F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten())
            else:
                found = loss(*inputs, targets, update / updates)
            optimizer.zero_grad()
            found.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1, description=f"training, loss {found.item():.3f}")
    return round(time.process_time() - begin, 1)


@torch.no_grad()
def compare(name: str, model: nn.Module, sets: Mapping[str, Examples], loop: int) -> dict[str, Any]:
    """Print and return, for every set, how many puzzles are wholly right: after `loop` steps, and solved."""
    model.eval()
    layer = next(module for module in model.modules() if isinstance(module, Equilibrium))
    count = sum(p.numel() for p in model.parameters())
    print(f"{name}: {count} parameters, share of puzzles that are wholly right")
    print(f"{'':12} {f'loop of {loop}':>11} {'solved':>8} {'converged':>10} {'right if conv.':>15} {'evaluations':>12}")
    rows = []
    for title, (inputs, targets) in sets.items():
        # Targets below 0 are not asked for.
        looped = ((model(*inputs, steps=loop).argmax(-1) == targets) | (targets < 0)).all(-1).double()
        solved = ((model(*inputs).argmax(-1) == targets) | (targets < 0)).all(-1).double()
        report = layer.last_solve
        converged, evaluations = report.converged, report.num_evals.double()
        row = {
            "set": title,
            "puzzles": len(targets),
            "loop": float(looped.mean()),
            "solved": float(solved.mean()),
            "converged": float(converged.double().mean()),
            "right if converged": float(solved[converged].mean()) if converged.any() else None,
            "evaluations": round(float(evaluations.mean()), 1),
            "most evaluations": int(evaluations.max()),
        }
        right = "-" if row["right if converged"] is None else f"{row['right if converged']:.3f}"
        shares = f"{row['loop']:11.3f} {row['solved']:8.3f} {row['converged']:10.3f} {right:>15}"
        print(f"{title:12} {shares} {row['evaluations']:7.1f} mean, at most {row['most evaluations']}", flush=True)
        rows.append(row)
    return {"parameters": count, "loop": loop, "rows": rows}
