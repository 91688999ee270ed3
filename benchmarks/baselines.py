"""What is compared: the library and its rivals, each as a function without arguments made for one setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import implicit_attention as ia

from .problems import ATOL, RTOL, Data

#: Iterations after which torchdeq, the unrolled iteration and the count of Picard's evaluations give up.
TORCHDEQ_CAP = 100
UNROLLED_CAP = 200
PICARD_CAP = 1000


class Run(NamedTuple):
    """What a contender returns: the state, and per query (or for all at once) the evaluations of f spent on it."""

    state: Tensor
    evaluations: Tensor
    gradients: tuple[Tensor, Tensor] | None = None


class PicardCounts(NamedTuple):
    """Evaluations of f after which each query has reached the tolerance, and the part that never does."""

    mean: float
    most: int
    for_99_percent: int
    unfinished: float


@dataclasses.dataclass(frozen=True)
class Contender:
    """Label for the table, and how to make the timed function; `solves` unless it is one explicit attention."""

    label: str
    make: Callable[[Data, PicardCounts], Callable[[], Run]]
    solves: bool = True


def sdpa(data: Data, z: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(z, keys, keys, scale=data.setting.beta)


def step(data: Data, z: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """f(z) by scaled_dot_product_attention."""
    anchor = data.setting.anchor
    return sdpa(data, z, keys) if anchor == 0 else anchor * queries + (1 - anchor) * sdpa(data, z, keys)


@torch.no_grad()
def picard_counts(data: Data) -> PicardCounts:
    """Repeat f on all queries and note when each reaches the tolerance."""
    z = data.queries
    counts = torch.full(z.shape[:-1], PICARD_CAP)
    active = torch.ones_like(counts, dtype=torch.bool)
    for index in range(1, PICARD_CAP + 1):
        f = step(data, z, data.queries, data.keys)
        small = torch.linalg.vector_norm(f - z, dim=-1) <= ATOL + RTOL * torch.linalg.vector_norm(f, dim=-1)
        counts[active & small] = index
        active &= ~small
        if not active.any():
            break
        z = f
    ordered = counts.flatten().sort().values
    rank = min(int(0.99 * len(ordered)), len(ordered) - 1)
    return PicardCounts(
        float(counts.double().mean()), int(ordered[-1]), int(ordered[rank]), float(active.double().mean())
    )


def _training(data: Data, forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[], Run]:
    """Forward, the fixed loss, and its gradient for queries and keys."""
    queries, keys = (t.clone().requires_grad_() for t in (data.queries, data.keys))

    def run() -> Run:
        queries.grad = keys.grad = None
        state, evaluations = forward(queries, keys)
        (state * data.cotangent).sum().backward()
        gradients = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in (queries, keys))
        return Run(state, evaluations, gradients)  # type: ignore[arg-type]

    return run


ONE = torch.ones(())


def _sdpa_forward(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    def run() -> Run:
        with torch.no_grad():
            return Run(sdpa(data, data.queries, data.keys), ONE)

    return run


def _sdpa_training(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    return _training(data, lambda queries, keys: (sdpa(data, queries, keys), ONE))


def _solve(data: Data, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    energy = ia.AnchoredEnergy(ia.LogSumExp(keys, data.setting.beta), queries, data.setting.anchor)
    solution = ia.solve(energy, queries, solver=ia.Anderson(rtol=RTOL, atol=ATOL), on_failure="ignore")
    return solution.value, solution.num_evals


def _ours_forward(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    def run() -> Run:
        with torch.no_grad():
            return Run(*_solve(data, data.queries, data.keys))

    return run


def _ours_training(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    return _training(data, lambda queries, keys: _solve(data, queries, keys))


def _torchdeq(name: str, *, per_query: bool) -> Callable[[Data, PicardCounts], Callable[[], Run]]:
    """A torchdeq solver: as its users call it, everything behind the batch axis one vector, or with a row per query.

    The first stops by the norm over a batch entry, which leaves single queries above the tolerance. The second asks
    what ours asks, the tolerance for every query.
    """

    def make(data: Data, counts: PicardCounts) -> Callable[[], Run]:
        from torchdeq.solver import get_solver

        solver: Any = get_solver(name)
        queries = data.queries
        start = queries.flatten(0, -2) if per_query else queries

        def run() -> Run:
            evaluations = 0

            def f(z: Tensor) -> Tensor:
                nonlocal evaluations
                evaluations += 1
                return step(data, z.view_as(queries), queries, data.keys).view_as(z)

            with torch.no_grad():
                state, _, _ = solver(f, start, max_iter=TORCHDEQ_CAP, tol=RTOL, stop_mode="rel")
            return Run(state.view_as(queries), torch.tensor(evaluations))

        return run

    return make


def unrolled(data: Data, steps: int) -> Callable[[], Run]:
    """The training step of z = f(z) repeated `steps` times under autograd."""

    def forward(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        z = queries
        for _ in range(steps):
            z = step(data, z, queries, keys)
        return z, torch.tensor(steps)

    return _training(data, forward)


CONTENDERS = {
    "sdpa_forward": Contender("one SDPA, forward", _sdpa_forward, solves=False),
    "ours_forward": Contender("solve(), forward", _ours_forward),
    "torchdeq_anderson": Contender(
        "torchdeq anderson, forward, a row per query", _torchdeq("anderson", per_query=True)
    ),
    "torchdeq_fixed_point_iter": Contender(
        "torchdeq fixed_point_iter, forward, a row per query", _torchdeq("fixed_point_iter", per_query=True)
    ),
    "torchdeq_anderson_entry": Contender(
        "torchdeq anderson, forward, a row per batch entry", _torchdeq("anderson", per_query=False)
    ),
    "torchdeq_fixed_point_iter_entry": Contender(
        "torchdeq fixed_point_iter, forward, a row per batch entry", _torchdeq("fixed_point_iter", per_query=False)
    ),
    "sdpa_training": Contender("one SDPA, training step", _sdpa_training, solves=False),
    "ours_training": Contender("solve() and Implicit(), training step", _ours_training),
    "unrolled": Contender(
        "unrolled autograd, training step, all queries converged",
        lambda data, counts: unrolled(data, min(counts.most, UNROLLED_CAP)),
    ),
}
