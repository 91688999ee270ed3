"""Layers of every kind that solves, and what a watch must tell of them, gathered call by call from `last_solve`."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from implicit_attention import (
    AttentionPooling,
    EnergyTransformer,
    Equilibrium,
    EquilibriumTransformer,
    ImplicitAttention,
    MemoryLookup,
    Status,
)
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention
from implicit_attention.integrations.timm import EquilibriumAttention
from implicit_attention.integrations.xtransformers import EquilibriumAttend
from implicit_attention.layers import MeanFieldAttention, SpinAttention
from implicit_attention.testing.numerics import random
from implicit_attention.training import watch

ROWS, TOKENS, DIM, HEADS = 2, 5, 8, 2
FAILING = ("MAX_STEPS", "STALLED", "DIVERGED", "NONFINITE", "OUT_OF_RANGE")


class Step(nn.Module):
    """One step of an `Equilibrium`."""

    def __init__(self):
        super().__init__()
        self.mix, self.read = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.mix(z) + self.read(x))


class Multihead(ImplicitMultiheadAttention):
    """Called like the other layers."""

    def forward(self, x):
        return super().forward(x, x, x)[0]


class Attend(EquilibriumAttend):
    """The same, with queries, keys and values of one tensor."""

    def forward(self, x):
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return super().forward(heads, 0.5 * heads, heads)[0]


LAYERS = {
    "attention": lambda **o: ImplicitAttention(DIM, HEADS, anchor=0.75, **o),
    "causal attention, shared keys": lambda **o: ImplicitAttention(DIM, HEADS, kv_heads=1, causal=True, **o),
    "memory": lambda **o: MemoryLookup(DIM, size=6, learned=True, beta=2.0, anchor=0.3, **o),
    "pooling": lambda **o: AttentionPooling(DIM, HEADS, queries=3, **o),
    "equilibrium": lambda **o: Equilibrium(Step(), **o),
    "equilibrium transformer": lambda **o: EquilibriumTransformer(DIM, HEADS, **o),
    "energy transformer": lambda **o: EnergyTransformer(DIM, HEADS, head_dim=4, memories=6, **o),
    "published": lambda **o: EnergyTransformer(DIM, HEADS, head_dim=4, memories=6, mode="published", **o),
    "causal energy transformer": lambda **o: EnergyTransformer(DIM, HEADS, head_dim=4, memories=6, causal=True, **o),
    "spins": lambda **o: SpinAttention(DIM, HEADS, **o),
    "mean field": lambda **o: MeanFieldAttention(DIM, HEADS, **o),
    "multihead": lambda **o: Multihead(DIM, HEADS, batch_first=True, **o),
    "timm": lambda **o: EquilibriumAttention(DIM, HEADS, **o),
    "x-transformers": lambda **o: Attend(heads=HEADS, **o),
}


def layer_of(name="attention", seed=0, **options):
    torch.manual_seed(seed)
    return LAYERS[name](**options)


def model_of(count=2, **options):
    return nn.Sequential(*(layer_of("attention", seed, **options) for seed in range(count)))


def tokens(seed=0, rows=ROWS, count=TOKENS, scale=1.0, dtype=torch.float32):
    return scale * random(rows, count, DIM, seed=seed, dtype=dtype)


def solving(model):
    """The layers of a model that remember a solve, by name."""
    # Pooling shows the solve of the attention that it holds.
    named = [(name, module) for name, module in model.named_modules() if not isinstance(module, AttentionPooling)]
    return {name: module for name, module in named if hasattr(type(module), "last_solve")}


class Gathered:
    """Lists of all that was solved, read from the layers after every call."""

    def __init__(self, model):
        self.layers = solving(model)
        self.found = {(name, side): [] for name in self.layers for side in ("forward", "backward")}

    def forward(self):
        for name, layer in self.layers.items():
            if (report := layer.last_solve) is not None:
                fields = (report.status, report.num_evals, report.residual, report.tolerance)
                self.found[name, "forward"].append([field.flatten().tolist() for field in fields])

    def backward(self):
        for name, layer in self.layers.items():
            if layer.last_solve is not None and (told := layer.last_solve.adjoint).status is not None:
                fields = (told.status, told.num_steps, told.residual, told.tolerance)
                self.found[name, "backward"].append([field.flatten().tolist() for field in fields])

    def step(self, model, x):
        """A call, and the gradient of a loss."""
        output = model(x)
        self.forward()
        output.square().sum().backward()
        self.backward()

    def expected(self, side, name=None):
        """Of one layer or of all."""
        calls = [
            call
            for (who, which), found in self.found.items()
            for call in found
            if which == side and name in (None, who)
        ]
        return summary(calls)

    def check(self, observed):
        assert [seen.layer for seen in observed.layers] == list(self.layers)
        for seen, name in [*zip(observed.layers, self.layers, strict=True), (observed.total, None)]:
            for side in ("forward", "backward"):
                assert_same(getattr(seen, side), self.expected(side, name))


def summary(calls):
    """What lists (status, evaluations, residual, tolerance) of calls come to, one number at a time."""
    statuses, evaluations, residuals, tolerances = ([n for call in calls for n in call[i]] for i in range(4))
    told = {"calls": len(calls), "problems": len(statuses), "most": max(evaluations, default=0)}
    told["failures"] = {name: sum(Status(code).name == name for code in statuses) for name in FAILING}
    told["mean"] = told["p99"] = math.nan
    if statuses:
        told["mean"] = sum(evaluations) / len(evaluations)
        share = [Fraction(sum(n <= e for n in evaluations), len(evaluations)) for e in range(told["most"] + 1)]
        told["p99"] = next(e for e, reached in enumerate(share) if reached >= Fraction(99, 100))
    told["worst"] = 0.0
    for code, residual, tolerance in zip(statuses, residuals, tolerances, strict=True):
        if Status(code) in (Status.EXPLICIT, Status.BUDGET) or residual == 0:
            continue
        ratio = residual / max(tolerance, 1e-300)
        told["worst"] = max(told["worst"], ratio if math.isfinite(ratio) else math.inf)
    return told


def assert_same(side, told):
    for name, value in told.items():
        found = getattr(side, name)
        if name == "worst":
            # The quotient is taken in the precision of the solve.
            assert math.isclose(found, value, rel_tol=1e-6), (name, found, value)
        else:
            assert found == value or (found != found and value != value), (name, found, value)
    assert side.failed == sum(told["failures"].values())


def assert_counts(found, expected):
    """The same counts; kernels of a graph may round otherwise, which shows in residuals and seldom in evaluations."""
    for seen, known in zip((*found.layers, found.total), (*expected.layers, expected.total), strict=True):
        assert seen.layer == known.layer
        for side in ("forward", "backward"):
            ours, theirs = getattr(seen, side), getattr(known, side)
            assert (ours.calls, ours.problems, ours.failures, ours.lost) == (
                theirs.calls,
                theirs.problems,
                theirs.failures,
                theirs.lost,
            )
            if theirs.problems:
                assert ours.mean == pytest.approx(theirs.mean, abs=0.1)
                assert abs(ours.most - theirs.most) <= 1
                assert ours.worst == pytest.approx(theirs.worst, rel=0.3)


def observed(model, steps):
    with watch(model) as seen:
        steps(model)
        return seen.take()
