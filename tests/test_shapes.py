"""The jaxtyping annotations of public functions hold when they are checked at run time."""

import inspect

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from implicit_attention import (
    AnchoredEnergy,
    LogSumExp,
    Picard,
    RepeatedSelfAttention,
    SelfAttentionEnergy,
    SquaredScores,
    diagnostics,
    equilibrium_attention,
    solve,
)
from implicit_attention.testing.numerics import random

METHODS = {
    LogSumExp: ("__init__", "value", "mean", "covariance_product"),
    SquaredScores: ("__init__", "value", "mean", "covariance_product"),
    AnchoredEnergy: ("__init__", "energy", "fixed_point_map"),
    SelfAttentionEnergy: ("__init__", "energy", "fixed_point_map", "probabilities"),
    RepeatedSelfAttention: ("__init__", "fixed_point_map", "probabilities"),
}
FUNCTIONS = (
    "spectral_radius",
    "smallest_curvature",
    "distinct_fixed_points",
    "effective_keys",
    "certified_error",
)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    for owner, names in [*METHODS.items(), (diagnostics, FUNCTIONS)]:
        for name in names:
            monkeypatch.setattr(owner, name, jaxtyped(inspect.unwrap(getattr(owner, name)), typechecker=beartype))


def test_annotations_hold():
    keys, x = random(2, 7, 5), random(2, 3, 5, seed=1)
    beta, anchor = torch.tensor([0.5, 0.7], dtype=torch.float64), torch.tensor([0.2, 0.3], dtype=torch.float64)
    mask = random(2, 3, 7, seed=2) > -1
    for potential in (
        LogSumExp(keys, 0.5),
        LogSumExp(keys, beta, mask=mask, bias=random(7)),
        SquaredScores(0.1 * keys, beta),
    ):
        for energy in (AnchoredEnergy(potential, x, 0.5), AnchoredEnergy(potential, x, anchor)):
            potential.covariance_product(x, potential.mean(x))
            energy.energy(x)
            solution = solve(energy, x)
            for ask in (diagnostics.spectral_radius, diagnostics.smallest_curvature):
                ask(energy, solution.value)
            diagnostics.certified_error(energy, solution)
            diagnostics.distinct_fixed_points(solution.value)
            if isinstance(potential, LogSumExp):
                diagnostics.effective_keys(potential, solution.value)

    for problem in (SelfAttentionEnergy(x, beta, 0.9, bias=random(3, 3)), RepeatedSelfAttention(x, 0.1, anchor)):
        problem.probabilities(solve(problem, x, solver=Picard()).value)
    checked_attention = jaxtyped(equilibrium_attention, typechecker=beartype)
    checked_attention(x[:, None], keys[:, None], random(2, 1, 7, 4), mask[:, None], scale=beta[:, None], anchor=0.5)


def test_the_check_checks():
    with pytest.raises(TypeCheckError):
        LogSumExp(random(2, 7, 5), 0.5).mean(torch.zeros(5))
