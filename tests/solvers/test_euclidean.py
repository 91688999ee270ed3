"""Problems without a metric are solved and differentiated as before there were metrics.

The fixture was written before solvers and adjoints knew of metrics, by `python tests/solvers/test_euclidean.py`. When
they learned of them every bit was kept. Products, elementary functions and fused operations round otherwise with
another torch, on another processor or after a change of theirs: numbers are compared to rounding, evaluations and
verdicts exactly.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    EnergyFunction,
    FixedPointMap,
    GradientDescent,
    Implicit,
    LogSumExp,
    NewtonKrylov,
    Picard,
    SelfAttentionEnergy,
    solve,
)
from implicit_attention.linear import CG, GMRES
from implicit_attention.problem import Problem
from implicit_attention.testing.numerics import random

FIXTURE = Path(__file__).parent / "fixtures" / "euclidean.json"

SOLVERS = {
    "anderson": Anderson(rtol=1e-9),
    "anderson5": Anderson(rtol=1e-9, history=5, plain_steps=1),
    "residual": Anderson(rtol=1e-9, guard="residual"),
    "broyden": Broyden(rtol=1e-9),
    "newton": NewtonKrylov(rtol=1e-9),
    "picard": Picard(rtol=1e-9),
    "descent": GradientDescent(step_size=0.5, rtol=1e-6),
}


def problems() -> dict[str, tuple[Problem, torch.Tensor]]:
    keys, query = random(2, 12, 5, seed=1), random(2, 7, 5, seed=2)
    clusters = keys[:, :3].repeat(1, 4, 1) + 0.1 * random(2, 12, 5, seed=3)
    tokens = random(3, 4, 5, seed=4)
    mixing = random(5, 5, seed=5)
    wells = random(6, 3, seed=6)
    return {
        "anchored": (AnchoredEnergy(LogSumExp(keys.requires_grad_(), 0.5), query, anchor=0.5), query),
        "memory": (AnchoredEnergy(LogSumExp(clusters.requires_grad_(), 2.0), query, anchor=0.05), query),
        "tokens": (SelfAttentionEnergy(tokens.requires_grad_(), beta=1.0, anchor=0.4, weight=0.5), tokens.detach()),
        "map": (FixedPointMap(lambda z, w: torch.tanh(z @ w + 0.5), mixing.requires_grad_(), event_ndim=1), query),
        "wells": (
            EnergyFunction(lambda z, a: ((z * z - 1).square() + a * z).sum(-1), wells.requires_grad_(), event_ndim=1),
            0.3 * wells.detach(),
        ),
    }


def measured() -> dict[str, dict[str, Any]]:
    found = {}
    for name, (problem, start) in problems().items():
        for method, solver in SOLVERS.items():
            if method == "descent" and not problem.has_energy:
                continue
            # The fixture has gradients of this accuracy, whatever that of the state.
            adjoint = Implicit((CG if problem.symmetric else GMRES)(rtol=1e-10))
            solution = solve(problem, start, solver=solver, adjoint=adjoint, on_failure="ignore")
            (tensor,) = (t for t in problem.tensors() if t.requires_grad)
            (gradient,) = torch.autograd.grad((solution.value * random(*start.shape, seed=9)).sum(), tensor)
            found[f"{name} {method}"] = {
                "value": [number.hex() for number in solution.value.detach().flatten().tolist()],
                "gradient": [number.hex() for number in gradient.flatten().tolist()],
                "evaluations": solution.num_evals.flatten().tolist(),
                "status": solution.status.flatten().tolist(),
            }
    return found


def numbers(hexes: list[str]) -> torch.Tensor:
    return torch.tensor([float.fromhex(h) for h in hexes], dtype=torch.float64)


@pytest.fixture(scope="module")
def now() -> dict[str, dict[str, Any]]:
    return measured()


@pytest.mark.parametrize("part", ["value", "gradient"])
def test_problems_without_a_metric_keep_their_numbers(now: dict[str, dict[str, Any]], part: str) -> None:
    for name, solve_before in json.loads(FIXTURE.read_text()).items():
        torch.testing.assert_close(
            numbers(now[name][part]), numbers(solve_before[part]), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("part", ["evaluations", "status"])
def test_problems_without_a_metric_take_the_same_steps(now: dict[str, dict[str, Any]], part: str) -> None:
    before = json.loads(FIXTURE.read_text())
    assert {name: one[part] for name, one in now.items()} == {name: one[part] for name, one in before.items()}


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(measured()) + "\n")
