"""The contenders: the library and its rivals, each as a function without arguments for one setting."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import implicit_attention as ia

from .problems import ATOL, Data

#: Iterations after which torchdeq, the unrolled iteration and the count of Picard's evaluations give up.
TORCHDEQ_CAP = 100
UNROLLED_CAP = 200
PICARD_CAP = 1000
#: torch's own attention kernels, by short names.
BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}


class Run(NamedTuple):
    """The result of a contender: the state, and per query (or for all at once) the evaluations of f spent on it.

    The library says as well how each query ended.
    """

    state: Tensor
    evaluations: Tensor
    status: Tensor | None = None
    gradients: tuple[Tensor, Tensor] | None = None


class PicardCounts(NamedTuple):
    """Evaluations of f after which each query has reached the tolerance, and the part that never does."""

    mean: float
    most: int
    for_99_percent: int
    unfinished: float


@dataclasses.dataclass(frozen=True)
class Contender:
    """Label for the table, how to make the timed function, and the tests that must pass before it is timed.

    It `solves` unless it is one explicit attention.
    """

    label: str
    make: Callable[[Data, PicardCounts], Callable[[], Run]]
    solves: bool = True
    tests: tuple[str, ...] = ()


def sdpa(data: Data, z: Tensor, keys: Tensor) -> Tensor:
    """One explicit attention in the precision of the keys, for states that may have a finer one."""
    causal, scale = data.setting.causal, data.setting.beta
    return F.scaled_dot_product_attention(z.to(keys.dtype), keys, keys, is_causal=causal, scale=scale).to(z.dtype)


def step(data: Data, z: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """f(z) by scaled_dot_product_attention."""
    anchor = data.setting.anchor
    return sdpa(data, z, keys) if anchor == 0 else anchor * queries + (1 - anchor) * sdpa(data, z, keys)


@torch.no_grad()
def picard_counts(data: Data, cap: int = PICARD_CAP) -> PicardCounts:
    """Repeat f on all queries and note when each reaches the tolerance."""
    z, rtol = data.queries, data.setting.rtol
    counts = torch.full(z.shape[:-1], cap, device=z.device)
    active = torch.ones_like(counts, dtype=torch.bool)
    for index in range(1, cap + 1):
        f = step(data, z, data.queries, data.keys)
        small = torch.linalg.vector_norm(f - z, dim=-1) <= ATOL + rtol * torch.linalg.vector_norm(f, dim=-1)
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


def training_step(data: Data, forward: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> Callable[[], Run]:
    """Forward, the fixed loss, and its gradient for queries and keys."""
    queries, keys = (t.clone().requires_grad_() for t in (data.queries, data.keys))

    def run() -> Run:
        queries.grad = keys.grad = None
        found = Run(*forward(queries, keys))
        (found.state * data.cotangent).sum().backward()
        gradients = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in (queries, keys))
        # What is left from this call must not be freed by the next one, whose memory may be measured.
        queries.grad = keys.grad = None
        return found._replace(gradients=gradients)

    return run


ONE = torch.ones(())


def _sdpa_forward(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    def run() -> Run:
        with torch.no_grad():
            return Run(sdpa(data, data.queries, data.keys), ONE)

    return run


def _sdpa_by(backend: str) -> Callable[[Data, PicardCounts], Callable[[], Run]]:
    """One of torch's kernels; where it does not run, it raises."""

    def make(data: Data, counts: PicardCounts) -> Callable[[], Run]:
        def run() -> Run:
            # On a GPU a kernel that cannot do it says why in warnings, and then raises.
            with torch.no_grad(), warnings.catch_warnings(), sdpa_kernel(SDPBackend.__members__[backend]):
                warnings.simplefilter("ignore")
                return Run(sdpa(data, data.queries, data.keys), ONE)

        return run

    return make


def _sdpa_training(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    return training_step(data, lambda queries, keys: (sdpa(data, queries, keys), ONE))


def _solve(data: Data, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    energy = ia.AnchoredEnergy(ia.LogSumExp(keys, data.setting.beta), queries, data.setting.anchor)
    solver = ia.Anderson(rtol=data.setting.rtol, atol=ATOL)
    solution = ia.solve(energy, queries, solver=solver, on_failure="ignore")
    return solution.value, solution.num_evals, solution.status


def limited(data: Data, evaluations: int, *, training: bool) -> Callable[[], Run]:
    """Ours with so many evaluations for every query, converged or not, to see what they cost."""
    # The first evaluation belongs to no step. An exact gradient wants a tolerance; this one is never reached.
    solver = ia.Anderson(rtol=0, atol=1e-30, max_steps=evaluations - 1)

    def forward(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        energy = ia.AnchoredEnergy(ia.LogSumExp(keys, data.setting.beta), queries, data.setting.anchor)
        solution = ia.solve(energy, queries, solver=solver, on_failure="ignore")
        return solution.value, solution.num_evals

    def run() -> Run:
        with torch.no_grad():
            return Run(*forward(data.queries, data.keys))

    return training_step(data, forward) if training else run


def _ours_forward(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    def run() -> Run:
        with torch.no_grad():
            return Run(*_solve(data, data.queries, data.keys))

    return run


def _ours_training(data: Data, counts: PicardCounts) -> Callable[[], Run]:
    return training_step(data, lambda queries, keys: _solve(data, queries, keys))


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
                state, _, _ = solver(f, start, max_iter=TORCHDEQ_CAP, tol=data.setting.rtol, stop_mode="rel")
            return Run(state.view_as(queries), torch.tensor(evaluations))

        return run

    return make


def _torchdeq_training(name: str) -> Callable[[Data, PicardCounts], Callable[[], Run]]:
    """torchdeq's implicit gradient, a row per query, forward and backward by the same solver to the same tolerance."""

    def make(data: Data, counts: PicardCounts) -> Callable[[], Run]:
        from torchdeq import get_deq

        limits = {"max_iter": TORCHDEQ_CAP, "tol": data.setting.rtol, "stop_mode": "rel", "solver": name}
        deq: Any = get_deq(ift=True, **{f"{way}_{key}": value for way in "fb" for key, value in limits.items()})
        deq.train()

        def forward(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            evaluations = 0

            def f(z: Tensor) -> Tensor:
                nonlocal evaluations
                evaluations += 1
                return step(data, z.view_as(queries), queries, keys).view_as(z)

            states, _ = deq(f, queries.detach().flatten(0, -2))
            return states[-1].view_as(queries), torch.tensor(evaluations)

        return training_step(data, forward)

    return make


def picard(data: Data, steps: int) -> Callable[[], Run]:
    """z = f(z) repeated `steps` times for all queries, without a gradient."""

    def run() -> Run:
        with torch.no_grad():
            z = data.queries
            for _ in range(steps):
                z = step(data, z, data.queries, data.keys)
            return Run(z, torch.tensor(steps))

    return run


def unrolled(data: Data, steps: int) -> Callable[[], Run]:
    """The training step of z = f(z) repeated `steps` times under autograd."""

    def forward(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        z = queries
        for _ in range(steps):
            z = step(data, z, queries, keys)
        return z, torch.tensor(steps)

    return training_step(data, forward)


#: The tests of the default solver and its gradient.
OURS = ("tests/test_solve.py", "tests/energies/test_anchored.py", "tests/adjoints/test_rounding.py")

CONTENDERS = {
    "sdpa_forward": Contender("one SDPA, forward", _sdpa_forward, solves=False),
    **{
        f"sdpa_{label}": Contender(f"one SDPA, forward, {label} kernel", _sdpa_by(backend), solves=False)
        for label, backend in BACKENDS.items()
    },
    "ours_forward": Contender("solve(), forward", _ours_forward, tests=OURS),
    "picard": Contender(
        "Picard, forward, until the slowest query has converged",
        lambda data, counts: picard(data, counts.most),
    ),
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
    "ours_training": Contender("solve() and Implicit(), training step", _ours_training, tests=OURS),
    "unrolled": Contender(
        "unrolled autograd, training step, all queries converged",
        lambda data, counts: unrolled(data, min(counts.most, UNROLLED_CAP)),
    ),
    "torchdeq_training_anderson": Contender(
        "torchdeq anderson, implicit gradient, training step", _torchdeq_training("anderson")
    ),
    "torchdeq_training_fixed_point_iter": Contender(
        "torchdeq fixed_point_iter, implicit gradient, training step", _torchdeq_training("fixed_point_iter")
    ),
}
