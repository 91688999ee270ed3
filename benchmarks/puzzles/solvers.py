"""The same trained block solved by many solvers: what they need, where they end, and whether they end at the same."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from implicit_attention.solvers import Anderson, Broyden, NewtonKrylov, Picard, Solver, TorchDEQ

from .models import Examples, Model
from .training import CAP, RTOL, Answer, Solved, answered, scored

SOLVERS: dict[str, Solver] = {
    "Picard": Picard(rtol=RTOL, max_steps=CAP),
    "Picard, damping 0.3": Picard(rtol=RTOL, max_steps=CAP, damping=0.3),
    "Anderson, history 1": Anderson(history=1, rtol=RTOL, max_steps=CAP),
    "Anderson, history 5": Anderson(history=5, rtol=RTOL, max_steps=CAP),
    "Broyden": Broyden(rtol=RTOL, max_steps=CAP),
    # Each of its steps takes ten evaluations or more.
    "NewtonKrylov": NewtonKrylov(rtol=RTOL, max_steps=CAP // 10),
    "torchdeq anderson": TorchDEQ("anderson", rtol=RTOL, max_steps=CAP),
    "torchdeq fixed_point_iter": TorchDEQ("fixed_point_iter", rtol=RTOL, max_steps=CAP),
}
#: Two settled states of a puzzle are two fixed points if they differ by this part of their size (100 tolerances).
APART = 100 * RTOL
#: Seeds of random states that Picard starts from, beside zeros.
STARTS = (1, 2, 3)


def compared_solvers(model: Model, examples: Examples) -> dict[str, Any]:
    """Per solver its scores, and the fixed points of a puzzle that were found from zeros and from random states."""
    found: dict[str, Any] = {}
    ends: list[Answer] = []
    runs = [(name, solver, None) for name, solver in SOLVERS.items()]
    runs += [(f"Picard, random start {seed}", SOLVERS["Picard"], seed) for seed in STARTS]
    for name, solver, start in runs:
        begin = time.process_time()
        answer, right = answered(model, examples, Solved(solver, name), start=start)
        seconds = time.process_time() - begin
        found[name] = scored(answer, right, examples.targets) | {"process_seconds": seconds}
        if ends:
            both = ends[0].converged & answer.converged
            away = apart(ends[0].state, answer.state)[both].double()
            found[name]["elsewhere"] = float(away.mean()) if len(away) else None
        ends.append(answer)
    count = distinct(ends)
    found["distinct"] = {"mean": float(count.double().mean()), "max": int(count.max())}
    return found


def apart(a: Tensor, b: Tensor) -> Tensor:
    """Which puzzles have different states."""
    return (a - b).flatten(1).norm(dim=1) > APART * b.flatten(1).norm(dim=1)


def distinct(ends: list[Answer]) -> Tensor:
    """Per puzzle, how many fixed points are among the settled states."""
    count = torch.zeros(len(ends[0].converged), dtype=torch.long)
    for index, end in enumerate(ends):
        new = end.converged.clone()
        for earlier in ends[:index]:
            new &= ~earlier.converged | apart(earlier.state, end.state)
        count += new
    return count
