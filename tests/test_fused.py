"""What is done by a fused operation, what by the solvers' loop, and that both do the same."""

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    FixedPointMap,
    Implicit,
    LogSumExp,
    Picard,
    SolveOptions,
    Status,
    Unrolled,
    UnsupportedImplementation,
    solve,
)
from implicit_attention.kernels import hopfield_solve
from implicit_attention.linear import CG
from implicit_attention.potentials import SoftcapLogSumExp
from implicit_attention.testing.numerics import random
from implicit_attention.testing.problems import hopfield_energy


def energy(m=70, anchor=0.2, dtype=torch.float64, **pairs):
    keys, field = random(2, m, 6, seed=1, dtype=dtype), random(2, 9, 6, dtype=dtype)
    return AnchoredEnergy(LogSumExp(keys, 0.8, **pairs), field, anchor)


def number(shape, seed):
    return random(*shape, seed=seed).sigmoid().requires_grad_()


CASES = {
    "plain": {},
    "masked": {"mask": random(9, 70, seed=5) > -0.4},
    "biased": {"bias": random(9, 70, seed=6)},
    "masked and biased": {"mask": random(9, 70, seed=5) > -0.4, "bias": random(9, 70, seed=6)},
    "nobody reads": {"mask": torch.arange(9)[:, None].expand(9, 70) > 2},
}


def same(found, expected):
    assert torch.equal(found.status, expected.status)
    assert torch.equal(found.num_steps, expected.num_steps)
    assert torch.equal(found.num_evals, expected.num_evals)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.residual, expected.residual, rtol=1e-4, atol=1e-13)
    torch.testing.assert_close(found.tolerance, expected.tolerance, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("rtol", [0.0, 1e-6], ids=["fixed", "to a tolerance"])
@pytest.mark.parametrize("method", [Anderson, Picard])
@pytest.mark.parametrize("budget", range(7))
def test_the_loop_and_the_operations_return_the_same_state_when_a_budget_is_used_up(budget, method, rtol):
    solver = method(rtol=rtol, atol=0.0, max_steps=budget)
    for problem in (energy(), hopfield_energy(sharpness=3.0, clustered=True, keys=70)):
        expected, found = (
            solve(problem, problem.field, solver=solver, impl=i, adjoint=Implicit(), on_failure="ignore")
            for i in ("reference", "auto")
        )
        assert (expected.status == Status.EXPLICIT).all() or budget > 0
        same(found, expected)


def test_a_residual_may_rise_while_the_energy_falls():
    """If this fails, the test above cannot tell the last state from the one with the smallest residual."""
    problem = hopfield_energy(sharpness=3.0, clustered=True, keys=70)
    residuals = torch.stack(
        [
            solve(problem, problem.field, solver=Anderson(rtol=1e-6, max_steps=k), on_failure="ignore").residual
            for k in range(7)
        ]
    )
    assert bool((residuals.diff(dim=0) > 0).any())


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_written_out_loop(case):
    gradients = []
    for i in ("reference", "auto"):
        tensors = [random(2, 70, 6, seed=1), number((2,), 3), random(2, 9, 6), number((2,), 4)]
        keys, beta, field, anchor = (t.detach().requires_grad_() for t in tensors)
        problem = AnchoredEnergy(LogSumExp(keys, beta, **CASES[case]), field, anchor)
        solution = solve(problem, field, solver=Anderson(rtol=1e-11), impl=i)
        gradients.append(torch.autograd.grad(solution.value.square().sum(), (keys, beta, field, anchor)))
        assert solution.adjoint.status.max() == 0
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


SADDLES = {
    "plain": lambda: {},
    "causal": lambda: {"query_offset": 19},
    "mask of pairs": lambda: {"mask": (random(9, 35, seed=5) > -0.8).repeat_interleave(2, -1)},
    "mask of keys": lambda: {"mask": torch.arange(70) < 50},
    "bias of each key": lambda: {"bias": random(35, seed=6).repeat_interleave(2).requires_grad_()},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", SADDLES)
def test_queries_at_saddles_are_finished_in_their_places(case, dtype):
    """Keys in pairs, 2 and -2 along an axis, and queries half-way between, more of one set: kernels give these up."""
    found = []
    for impl in ("auto", "reference"):
        keys, field = random(2, 35, 6, seed=1).repeat_interleave(2, -2), random(2, 9, 6)
        keys[..., 0] = torch.tensor([2.0, -2.0]).repeat(35)
        field[0, ::2, 0] = field[1, 4, 0] = 0.0
        given = {
            name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for name, t in SADDLES[case]().items()
        }
        leaves = [t.to(dtype).requires_grad_() for t in (keys, field)]
        if "bias" in given:
            given["bias"] = given["bias"].detach().requires_grad_()
            leaves.append(given["bias"])
        problem = AnchoredEnergy(LogSumExp(leaves[0], 1.5 / 3.6, **given), leaves[1], 0.1)
        solution = solve(problem, leaves[1].detach(), solver=Anderson(rtol=1e-6), impl=impl, on_failure="ignore")
        gradients = torch.autograd.grad(solution.value.square().sum() + solution.value.sum(), leaves)
        found.append((solution.adjoint.status == Status.UNSTABLE, solution.value.detach(), *gradients))
    assert found[1][0].any()
    assert not found[1][0].all()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)


def test_a_bias_that_requires_grad_gets_it_from_the_linear_solvers():
    bias = random(9, 70, seed=6).requires_grad_()
    problem = energy(bias=bias)
    found, expected = (
        torch.autograd.grad(solve(problem, problem.field, solver=Anderson(rtol=1e-11), impl=i).value.sum(), bias)[0]
        for i in ("auto", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_the_reference_of_any_other_problem_is_the_loop():
    keys, field = random(2, 7, 6, seed=1), random(2, 9, 6)
    softcap = AnchoredEnergy(SoftcapLogSumExp(keys, 0.8, cap=5.0), field, 0.3)
    cosine = FixedPointMap(torch.cos, event_ndim=1)
    for problem in (softcap, cosine):
        plain, reference = (solve(problem, field, impl=impl).value for impl in ("auto", "reference"))
        torch.testing.assert_close(plain, reference, rtol=1e-10, atol=1e-10)


class Own(LogSumExp):
    """A potential that may compute something else."""


class OwnEnergy(AnchoredEnergy):
    """An energy that may compute something else."""


def with_attribute():
    problem = energy()
    problem.potential.other = random(1)
    return problem


@pytest.mark.parametrize(
    "problem",
    [
        lambda: AnchoredEnergy(Own(random(2, 70, 6), 0.8), random(2, 9, 6)),
        lambda: OwnEnergy(LogSumExp(random(2, 70, 6), 0.8), random(2, 9, 6)),
        lambda: AnchoredEnergy(SoftcapLogSumExp(random(2, 70, 6), 0.8, cap=5.0), random(2, 9, 6)),
        lambda: FixedPointMap(torch.cos, event_ndim=1),
        with_attribute,
    ],
)
def test_only_exact_types_are_lowered(problem):
    problem = problem()
    with pytest.raises(UnsupportedImplementation, match=r"`impl='native'`: .*; use impl='auto'"):
        solve(problem, random(2, 9, 6), impl="native")


@pytest.mark.parametrize(
    ("match", "change", "options"),
    [
        ("there is no kernel for Broyden with these options; use Anderson", {}, {"solver": Broyden()}),
        ("no kernel for Picard", {}, {"solver": Picard(damping=0.1)}),
        ("no kernel for Anderson", {}, {"solver": Anderson(history=4)}),
        ("no step is kept, for a trace", {}, {"trace": True}),
        ("no step is kept", {}, {"adjoint": Unrolled()}),
        ("leaves 1 - anchor no digits", {"anchor": 1 - 1e-6, "dtype": torch.float32}, {}),
        ("additive mask that requires grad", {"bias": number((9, 70), 6)}, {}),
    ],
)
def test_a_named_implementation_that_cannot_do_it_says_why(match, change, options):
    problem = energy(**change)
    with pytest.raises(UnsupportedImplementation, match=match):
        solve(problem, problem.field, impl="native", **options)
    assert solve(problem, problem.field, **options).converged.all()


def test_a_name_that_is_gone_is_refused_with_the_reason():
    problem, door = energy(), r"`impl` must be one of 'auto', .*, got 'tiled'; .* use impl='auto'"
    for call in (
        lambda: solve(problem, problem.field, impl="tiled"),
        lambda: SolveOptions(impl="tiled"),
        lambda: hopfield_solve(problem.field, problem.potential.keys, beta=0.8, impl="tiled"),
    ):
        with pytest.raises(ValueError, match=door):
            call()


def test_named_implementations_have_no_derivative_inside_transforms():
    problem = energy()
    with pytest.raises(UnsupportedImplementation, match=r"no derivative inside torch\.func"):
        torch.func.grad(lambda x: solve(AnchoredEnergy(problem.potential, x, 0.2), x, impl="native").value.sum())(
            problem.field
        )


def test_a_linear_solver_that_is_named_is_the_one_that_solves():
    problem = energy()
    problem.potential.keys.requires_grad_()
    solution = solve(problem, problem.field, adjoint=Implicit(CG(max_steps=1)), on_failure="ignore")
    solution.value.sum().backward()
    assert (solution.adjoint.status == Status.MAX_STEPS).any()
