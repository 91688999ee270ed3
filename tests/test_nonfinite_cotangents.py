"""A gradient from above that is NaN or infinite is no failure of a solve: nothing is told, and it stays as it is."""

import dataclasses
import functools
import math
import warnings

import pytest
import torch
from torch import nn

from implicit_attention import (
    AnchoredEnergy,
    ConvergenceError,
    ConvergenceWarning,
    Equilibrium,
    EquilibriumTransformer,
    FailurePolicy,
    FixedPointMap,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    MemoryLookup,
    equilibrium_attention,
    solve,
)
from implicit_attention.layers import EnergyTransformer, MeanFieldAttention, SpinAttention
from implicit_attention.linear import CG, GMRES, MINRES, Neumann
from implicit_attention.testing.numerics import random

WIDTH = 8
X = random(3, 5, WIDTH, dtype=torch.float32)
POLICIES = {
    "raise": "raise",
    "warn": "warn",
    "policy": FailurePolicy(tolerate=0.0, window=1),
    "window": FailurePolicy(tolerate=0.0, window=3),
    "zero": FailurePolicy(tolerate=0.0, window=1, backward="zero"),
}


@pytest.fixture(autouse=True)
def same_parameters():
    torch.manual_seed(0)


class Contraction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) / 2 + x)


def called(module, **options):
    return module, functools.partial(module, **options)


def attention(**options):
    return lambda given: called(ImplicitAttention(WIDTH, 2, on_failure=given), **options)


def of_keys(count, **options):
    def make(given):
        module = nn.Linear(WIDTH, WIDTH)

        def run(x):
            keys = module(random(3, count, WIDTH, seed=1, dtype=torch.float32))
            return equilibrium_attention(x, keys, keys, on_failure=given, **options)

        return module, run

    return make


def compiled(given):
    given = dataclasses.replace(given, over="warn") if isinstance(given, FailurePolicy) else given
    module = ImplicitAttention(WIDTH, 2, on_failure=given)
    return module, torch.compile(module, backend="aot_eager", fullgraph=True)


def memory(given):
    return called(MemoryLookup(WIDTH, learned=True, size=6, on_failure=given))


def free(given):
    """A map that is no energy, and depends on the state by products alone."""
    module = nn.Linear(WIDTH, WIDTH)

    def run(x):
        problem = FixedPointMap(lambda z, x, w: torch.tanh(z @ w / 3 + x), x, module.weight, event_ndim=1)
        return solve(problem, torch.zeros_like(x), on_failure=given).value

    return module, run


DOORS = {
    "native": attention(),
    "general": attention(adjoint=Implicit(CG())),
    "minres": attention(adjoint=Implicit(MINRES())),
    "neumann": attention(adjoint=Implicit(Neumann(max_steps=500))),
    "gmres": attention(adjoint=Implicit(GMRES())),
    "reference": attention(impl="reference"),
    "state": lambda given: called(ImplicitAttention(WIDTH, 2, readout="state", on_failure=given)),
    "function": of_keys(6),
    "more keys": of_keys(70, impl="reference"),
    "compiled": compiled,
    "memory": memory,
    "map": free,
    "block": lambda given: called(Equilibrium(Contraction(), event_ndim=2, on_failure=given)),
    "rows": lambda given: called(Equilibrium(Contraction(), event_ndim=1, on_failure=given)),
    "transformer": lambda given: called(EquilibriumTransformer(WIDTH, 2, on_failure=given)),
    "energy transformer": lambda given: called(EnergyTransformer(WIDTH, 2, 4, 6, on_failure=given)),
    "spins": lambda given: called(SpinAttention(WIDTH, 2, on_failure=given)),
    "mean field": lambda given: called(MeanFieldAttention(WIDTH, 2, on_failure=given)),
}


def run(name, given, bad):
    """The gradients of input and parameters, where a loss is `bad` in one number of the first sample."""
    torch.manual_seed(0)
    module, call = DOORS[name](given)
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        output = call(x)
        cotangent = random(*output.shape, seed=3, dtype=torch.float32)
        cotangent[0, 0, 0] = bad
        leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
        return torch.autograd.grad(output, leaves, cotangent, allow_unused=True)


#: A graph is compiled once for each policy, and what raises is no part of one.
CASES = [
    (name, policy, bad)
    for name in DOORS
    for policy in POLICIES
    for bad in (math.nan, math.inf, -math.inf)
    if name != "compiled" or (policy in ("warn", "policy", "zero") and math.isnan(bad))
]


@pytest.mark.parametrize(("name", "policy", "bad"), CASES)
def test_it_is_told_by_nothing_but_the_gradient(name, policy, bad):
    found, clean = run(name, POLICIES[policy], bad), run(name, POLICIES[policy], 1.0)
    # A scaler looks for what is not finite: neither number may have become another.
    assert not found[0][0].isfinite().all()
    # Other samples have their gradients, and what all share has none.
    torch.testing.assert_close(found[0][1:], clean[0][1:], rtol=1e-3, atol=1e-5)
    shared = [g for g in found[1:] if g is not None]
    assert len(shared) == sum(g is not None for g in clean[1:])
    assert not all(bool(g.isfinite().all()) for g in shared)


@pytest.mark.parametrize("name", [name for name in DOORS if name != "compiled"])
def test_large_numbers_are_no_failure(name):
    found = run(name, "raise", torch.finfo(torch.float32).max / 1e4)
    assert all(g is None or not g.isnan().any() for g in found)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["native", "block", "energy transformer", "spins", "memory"])
def test_a_scaler_that_overflows_skips_the_step_and_nothing_is_told(name, dtype):
    torch.manual_seed(0)
    module, call = DOORS[name]("raise")
    before = [p.detach().clone() for p in module.parameters()]
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    changed = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        for _ in range(2):
            optimiser.zero_grad()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = call(10 * X).float().square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
            changed.append(any(not torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True)))
            scaler.update(1.0)
    assert changed == [False, True]


def test_a_state_that_is_not_finite_is_a_failure_still():
    """Its gradient is NaN for a reason that the solve has, and that is told."""
    keys = random(6, 4)
    query = random(3, 4, seed=1).requires_grad_()

    def by_solve(query, **options):
        with_nan = query + torch.tensor([math.nan, 0.0, 0.0])[:, None]
        return solve(AnchoredEnergy(LogSumExp(keys, 1.0), with_nan, 0.5), with_nan, **options).value

    with pytest.raises(ConvergenceError, match="the problem reads a NaN"):
        by_solve(query)
    value = by_solve(query, on_failure="ignore")
    assert value.isfinite().all(-1).tolist() == [False, True, True]
    with pytest.warns(ConvergenceWarning, match="Anderson failed for 1 of 3"):
        value = by_solve(query, on_failure="warn")
    with pytest.warns(ConvergenceWarning, match="whose gradient is therefore wrong, failed for 1 of 3"):
        value.sum().backward()
    assert query.grad.isnan().any(-1).tolist() == [True, False, False]

    memory = MemoryLookup(4, anchor=0.5, beta=1.0, similarity="dot", dtype=torch.float64)
    memory.store(keys)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def recall(query):
        return memory.retrieve(query + torch.tensor([math.nan, 0.0, 0.0])[:, None])

    query.grad, value = None, recall(query)
    with pytest.warns(ConvergenceWarning, match="whose gradient is therefore wrong, failed for 1 of 3"):
        value.sum().backward()
    assert query.grad.isnan().any(-1).tolist() == [True, False, False]
    # One that the loss leaves out is none.
    query.grad = None
    recall(query)[1:].sum().backward()
    assert query.grad.isfinite().all()
