"""torchdeq's and SciPy's solvers on our problems, and our solvers in torchdeq's models."""

import dataclasses
import math
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch
import torchdeq
from torch import Tensor, nn

from implicit_attention import (
    AnchoredEnergy,
    ConvergenceError,
    FixedPointMap,
    Implicit,
    LogSumExp,
    PerSample,
    Picard,
    Status,
    solve,
)
from implicit_attention.linear import GMRES
from implicit_attention.solvers import SciPy, TorchDEQ, register_with_torchdeq
from implicit_attention.testing.problems import fixed_point_cases
from implicit_attention.testing.solver import recomputed_residual

B, N, M, D = 2, 3, 7, 5
COS = 0.7390851332151607
SCIPY = ["hybr", "lm", "df-sane", "broyden1", "broyden2", "anderson", "diagbroyden", "krylov"]
SLOW_SCIPY = ["linearmixing", "excitingmixing"]
TORCHDEQ = ["anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter"]
OURS = register_with_torchdeq()
REFERENCE = Picard(rtol=1e-13, atol=1e-14, max_steps=2000)
TIGHT = {"rtol": 1e-11, "atol": 1e-13, "max_steps": 400}
SOLVERS = [TorchDEQ(name, **TIGHT) for name in (*TORCHDEQ, *OURS)] + [SciPy(m, **TIGHT) for m in SCIPY + SLOW_SCIPY]
TWO = [TorchDEQ("anderson", **TIGHT), SciPy("krylov", **TIGHT)]


def named(solver) -> str:
    return getattr(solver, "name", None) or f"scipy-{solver.method}"


all_solvers = pytest.mark.parametrize("solver", SOLVERS, ids=named)
FEW = [*(TorchDEQ(n, **TIGHT) for n in ("anderson", "broyden", "implicit_anderson")), SciPy("hybr", **TIGHT)]
few_solvers = pytest.mark.parametrize("solver", FEW, ids=named)
both_libraries = pytest.mark.parametrize("solver", TWO, ids=named)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def normal(random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def cosine(event_ndim: int = 1) -> FixedPointMap:
    return FixedPointMap(torch.cos, event_ndim=event_ndim)


def hopfield(random: torch.Generator) -> AnchoredEnergy:
    keys, field = normal(random, B, M, D), normal(random, B, N, D)
    mask = torch.rand(B, N, M, generator=random) < 0.7
    return AnchoredEnergy(LogSumExp(keys, beta=0.3, mask=mask), field, anchor=torch.tensor([0.4, 0.6]).double())


# Answers.


@all_solvers
def test_masked_attention_energy_matches_picard_problem_by_problem(solver, random):
    energy = hopfield(random)
    expected = solve(energy, energy.field, solver=REFERENCE).value
    solution = solve(energy, energy.field, solver=solver)
    torch.testing.assert_close(solution.value, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(solution.residual, recomputed_residual(energy, solution), rtol=1e-3, atol=1e-14)


@all_solvers
def test_cosine_from_several_starts(solver, random):
    start = normal(random, B, N, D) / 3
    solution = solve(cosine(), start, solver=solver)
    assert (solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(solution.value, torch.full_like(start, COS), rtol=0, atol=1e-9)
    assert (solution.residual <= solution.tolerance).all()
    assert (solution.num_steps <= solution.num_evals).all()


@pytest.mark.parametrize("event_ndim", [0, 2, 3])
@both_libraries
def test_every_split_into_problems_has_evidence_of_its_shape(solver, event_ndim, random):
    start = normal(random, B, N, D) / 3
    solution = solve(cosine(event_ndim), start, solver=solver, trace=True)
    lead = start.shape[: 3 - event_ndim]
    assert solution.status.shape == solution.residual.shape == solution.num_evals.shape == lead
    assert solution.trace.residual.shape[1:] == lead
    torch.testing.assert_close(solution.value, torch.full_like(start, COS), rtol=0, atol=1e-9)


CASES = {case.name: case for case in fixed_point_cases()}
SUITED = {
    "scipy F": [
        TorchDEQ("broyden", **TIGHT),
        TorchDEQ("implicit_broyden", **TIGHT),
        *(SciPy(m, **TIGHT) for m in SCIPY),
    ],
    "scipy F3": [TorchDEQ("broyden", **TIGHT), TorchDEQ("anderson", **TIGHT), *(SciPy(m, **TIGHT) for m in SCIPY)],
    "scipy F4 (Powell)": [SciPy("hybr", **TIGHT), SciPy("lm", **TIGHT)],
    "scipy F6": [*(SciPy(m, **TIGHT) for m in ("hybr", "broyden1", "krylov")), TorchDEQ("broyden", **TIGHT)],
}


@pytest.mark.parametrize(("system", "solver"), [(s, x) for s, xs in SUITED.items() for x in xs], ids=str)
def test_systems_of_scipy(system, solver):
    case = CASES[system]
    solution = solve(case.problem, case.initial, solver=solver)
    assert recomputed_residual(case.problem, solution).norm() < 1e-8
    if case.answer is not None:
        torch.testing.assert_close(solution.value, case.answer, rtol=0, atol=1e-7)


# Endings.


@both_libraries
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exhausted_problem_returns_its_best_state_and_says_so(solver, dtype):
    problem, start = FixedPointMap(lambda z: 0.5 * z + 1, event_ndim=1), torch.zeros(B, D, dtype=dtype)
    short = dataclasses.replace(solver, max_steps=3, rtol=1e-30, atol=0.0)
    if isinstance(solver, SciPy):
        short = SciPy("linearmixing", {"jac_options": {"alpha": 0.5}}, rtol=1e-30, atol=0.0, max_steps=3)
    solution = solve(problem, start, solver=short, on_failure="ignore")
    assert (solution.status == Status.MAX_STEPS).all()
    assert solution.value.dtype == dtype
    assert (solution.residual < math.sqrt(D)).all()
    torch.testing.assert_close(solution.residual, recomputed_residual(problem, solution))
    with pytest.raises(ConvergenceError, match="residual"):
        solve(problem, start, solver=short)


@few_solvers
def test_converged_start_is_returned_bit_for_bit_beside_an_unsolved_one(solver):
    start = torch.tensor([[COS] * D, [0.2] * D], dtype=torch.float64)
    loose = dataclasses.replace(solver, rtol=1e-9)
    solution = solve(cosine(), start, solver=loose)
    assert torch.equal(solution.value[0], start[0])
    assert (solution.num_steps[0], solution.num_evals[0]) == (0, 1)
    torch.testing.assert_close(solution.value[1], torch.full_like(start[1], COS), rtol=0, atol=1e-7)


@pytest.mark.parametrize("solver", [dataclasses.replace(s, max_steps=0) for s in TWO], ids=named)
def test_no_step_evaluates_the_initial_state_only(solver):
    start = torch.tensor([[0.1] * D, [COS] * D], dtype=torch.float64)
    solution = solve(cosine(), start, solver=dataclasses.replace(solver, rtol=1e-9))
    assert solution.status.tolist() == [Status.EXPLICIT, Status.CONVERGED]
    assert torch.equal(solution.value, start)
    assert solution.num_evals.tolist() == [1, 1]
    torch.testing.assert_close(solution.residual, recomputed_residual(cosine(), solution))


@pytest.mark.parametrize("name", [*TORCHDEQ, "implicit_picard"])
def test_fixed_budget_of_torchdeq_makes_every_step_and_returns_the_last_state(name):
    start = torch.zeros(B, D).double()
    solution = solve(cosine(), start, solver=TorchDEQ(name, rtol=0.0, atol=0.0, max_steps=4))
    assert (solution.status == Status.BUDGET).all()
    assert (solution.num_steps == 4).all()
    if "fixed_point" in name or "picard" in name:
        expected = start
        for _ in range(4):
            expected = expected.cos()
        torch.testing.assert_close(solution.value, expected)


def test_fixed_budget_of_scipy_makes_every_step():
    solver = SciPy(
        "linearmixing", {"jac_options": {"alpha": 1.0}, "line_search": None}, rtol=0.0, atol=0.0, max_steps=4
    )
    solution = solve(cosine(), torch.zeros(1, 1).double(), solver=solver)
    assert solution.status.item() == Status.BUDGET
    assert solution.num_steps.item() == 4
    torch.testing.assert_close(solution.value.item(), math.cos(math.cos(math.cos(math.cos(0.0)))))


def test_a_value_that_overflows_as_it_is_rounded_is_no_solution():
    problem = FixedPointMap(lambda z, x: 0.99 * z + 1e37 * z.tanh() + x, PerSample(torch.zeros(1, 4)), event_ndim=1)
    solver = SciPy("df-sane", max_steps=12)
    solution = solve(problem, torch.ones(1, 4), solver=solver, on_failure="ignore")
    assert solution.value.isinf().all()
    assert (solution.residual.tolist(), solution.status.tolist()) == ([math.inf], [Status.STALLED])


@few_solvers
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_problem_that_reads_a_nan_changes_no_other(solver, bad, random):
    shift = normal(random, 4, D) / 5
    start = torch.zeros(4, D).double()
    problem = FixedPointMap(lambda z, s: (z + s).cos(), shift, event_ndim=1)
    clean = solve(problem, start, solver=solver)
    poisoned = shift.clone()
    poisoned[1] = bad
    solution = solve(problem.replace(poisoned), start, solver=solver, on_failure="ignore")
    assert solution.status[1] == Status.NONFINITE
    assert not solution.value[1].isfinite().any()
    others = [0, 2, 3]
    torch.testing.assert_close(solution.value[others], clean.value[others], rtol=0, atol=1e-13)
    assert torch.equal(solution.num_evals[others], clean.num_evals[others])
    assert (solution.status[others] == Status.CONVERGED).all()


def leaves_at(limit: Tensor):
    """z <- 1.5 z + 1 up to a limit per problem, beyond which there is nothing; the cosine where that is infinite."""

    def function(z: Tensor, limit: Tensor) -> Tensor:
        diverging = torch.where(z.abs() < limit, 1.5 * z + 1, torch.nan)
        return torch.where(limit.isinf(), z.cos(), diverging)

    return FixedPointMap(function, limit, event_ndim=1)


@pytest.mark.parametrize(
    "solver",
    [*(TorchDEQ(n, **TIGHT) for n in ("fixed_point_iter", "simple_fixed_point_iter")), TorchDEQ("broyden", **TIGHT)],
    ids=named,
)
def test_problem_that_diverges_ends_with_its_best_state_and_stops_no_other(solver):
    limit = torch.tensor([math.inf, 1.5, math.inf]).double()[:, None]
    start = torch.zeros(3, D).double()
    solution = solve(leaves_at(limit), start, solver=solver, on_failure="ignore")
    alone = solve(leaves_at(limit[:1]), start[:1], solver=solver)
    assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED, Status.CONVERGED]
    assert torch.equal(solution.value[1], start[1])  # the residual grows from the first step on
    torch.testing.assert_close(solution.residual, recomputed_residual(leaves_at(limit), solution))
    torch.testing.assert_close(solution.value[:1], alone.value, rtol=0, atol=1e-13)
    assert torch.equal(solution.num_evals[:1], alone.num_evals)


def test_foreign_solver_never_sees_what_a_diverging_problem_returns(registry):
    def nervous(func, x0, max_iter, tol, stop_mode):
        for _ in range(max_iter):
            x0 = func(x0)
            assert x0.isfinite().all()
        return x0, [], {}

    torchdeq.solver.register_solver("nervous", nervous)
    problem = leaves_at(torch.tensor([math.inf, 1.5], dtype=torch.float64)[:, None])
    solution = solve(problem, torch.zeros(2, D).double(), solver=TorchDEQ("nervous"), on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]


@pytest.mark.parametrize("name", ["fixed_point_iter", "simple_fixed_point_iter"])
def test_slow_neighbour_does_not_move_an_easy_problem_by_one_bit(name):
    gain = torch.tensor([0.3, 0.999], dtype=torch.float64)[:, None]
    problem = FixedPointMap(lambda z, g: g * z + 1, gain, event_ndim=1)
    solver, start = TorchDEQ(name, rtol=1e-6, max_steps=100), torch.zeros(2, D).double()
    together = solve(problem, start, solver=solver, on_failure="ignore")
    alone = solve(problem.replace(gain[:1]), start[:1], solver=solver)
    assert together.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS]
    assert torch.equal(together.value[:1], alone.value)
    assert torch.equal(together.residual[:1], alone.residual)
    assert together.num_steps[0] == alone.num_steps[0] < together.num_steps[1]
    assert (together.num_evals == 101).all()  # torchdeq evaluates all samples until the last is done


def test_scipy_ends_a_problem_that_leaves_the_finite_numbers():
    limit = torch.tensor([math.inf, 1.5]).double()[:, None]
    solution = solve(leaves_at(limit), torch.zeros(2, D).double(), solver=SciPy("broyden1"), on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
    assert solution.value.isfinite().all()


def translation_beside_cosines(event_ndim: int = 1) -> tuple[FixedPointMap, Tensor]:
    """Problem 2 of 5 has a constant residual: its Gram matrix is singular in torchdeq's Anderson."""
    moves = torch.tensor([0.0, 0.0, 1e6, 0.0, 0.0]).double()[:, None]
    return FixedPointMap(lambda z, m: torch.where(m > 0, z + m, z.cos()), moves, event_ndim=event_ndim), moves


def test_singular_problem_stalls_alone():
    problem, _ = translation_beside_cosines()
    start = torch.zeros(5, D).double()
    solver = TorchDEQ("anderson", **TIGHT)
    solution = solve(problem, start, solver=solver, on_failure="ignore")
    assert solution.status.tolist() == [0, 0, Status.STALLED, 0, 0]
    assert solution.value[2].isfinite().all()
    torch.testing.assert_close(solution.residual, recomputed_residual(problem, solution))
    clean = solve(cosine(), start[:1], solver=solver)
    torch.testing.assert_close(solution.value[[0, 1, 3, 4]], clean.value.expand(4, D), rtol=0, atol=1e-12)


def test_without_ridge_a_problem_at_its_fixed_point_spoils_no_other():
    # With lam = 0 torchdeq meets a singular matrix as soon as one sample has arrived; the first does in one step.
    gain = torch.tensor([0.0, 0.9], dtype=torch.float64)[:, None]
    problem = FixedPointMap(lambda z, g: g * z.cos() + (1 - g), gain, event_ndim=1)
    start = torch.zeros(2, D).double()
    with pytest.raises(torch.linalg.LinAlgError):
        torchdeq.solver.get_solver("anderson")(problem.fixed_point_map, start, lam=0.0, tol=1e-12)
    solution = solve(problem, start, solver=TorchDEQ("anderson", {"lam": 0.0}, rtol=1e-6))
    torch.testing.assert_close(solution.value[0], torch.ones(D).double())
    assert solution.converged.all()


def test_singular_matrix_of_the_map_itself_is_not_swallowed():
    def broken(z: Tensor) -> Tensor:
        return torch.linalg.solve(torch.zeros(D, D).double(), z.mT).mT

    with pytest.raises(torch.linalg.LinAlgError):
        solve(FixedPointMap(broken, event_ndim=1), torch.zeros(B, D).double(), solver=TorchDEQ("anderson"))

    calls = []

    def later(z: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 4:
            raise error("mine")
        return z.cos()

    for solver, error in ((TorchDEQ("anderson"), torch.linalg.LinAlgError), (SciPy("broyden1"), np.linalg.LinAlgError)):
        calls.clear()
        with torch.no_grad(), pytest.raises(error, match="mine"):
            solve(FixedPointMap(later, event_ndim=1), torch.zeros(B, D).double(), solver=solver)


def test_solver_that_gives_up_early_is_stalled(registry):
    torchdeq.solver.register_solver("lazy", lambda func, x0, max_iter, tol, stop_mode: (func(x0), [], {}))
    solution = solve(cosine(), torch.zeros(B, D).double(), solver=TorchDEQ("lazy"), on_failure="ignore")
    assert (solution.status == Status.STALLED).all()
    torch.testing.assert_close(solution.value, torch.ones(B, D).double())


def test_scipy_below_the_precision_of_the_state_is_stalled_and_above_it_is_not():
    shift = torch.linspace(0, 1, 64)
    problem = FixedPointMap(lambda z, s: (z + s).cos(), shift, event_ndim=1)
    start = torch.zeros(1, 64)
    assert solve(problem, start, solver=SciPy("krylov", rtol=1e-5)).converged.all()
    solution = solve(problem, start, solver=SciPy("krylov", rtol=1e-12, atol=0.0), on_failure="ignore")
    assert solution.status.item() == Status.STALLED
    assert solution.residual.item() < 1e-5


def test_scipy_answers_survive_the_rounding_to_float32(random):
    shift = normal(random, 100, 4, dtype=torch.float32)
    problem = FixedPointMap(lambda z, s: 0.6 * z + s, shift, event_ndim=1)
    solver = SciPy("linearmixing", {"jac_options": {"alpha": 1.0}, "line_search": None}, rtol=5e-7, atol=0.0)
    solution = solve(problem, torch.zeros(100, 4), solver=solver)
    assert (solution.residual <= solution.tolerance).all()


@pytest.mark.parametrize("shape", [(0, D), (B, 0, D), (B, 0)])
@both_libraries
def test_empty_batch_is_an_empty_answer(solver, shape):
    solution = solve(cosine(), torch.zeros(shape).double(), solver=solver, trace=True)
    assert solution.value.shape == shape
    assert solution.status.shape == shape[:-1]
    assert not solution.failed.any()


# The course of a run.


@pytest.mark.parametrize("solver", [*TWO, TorchDEQ("broyden", **TIGHT), SciPy("hybr", **TIGHT)], ids=named)
def test_trace_ends_with_the_evidence_and_never_rises(solver, random):
    energy = hopfield(random)
    solution = solve(energy, energy.field, solver=solver, trace=True)
    residual, values, num_evals, _ = solution.trace
    assert residual.shape == values.shape == num_evals.shape == (int(solution.num_evals.max()), B, N)
    torch.testing.assert_close(
        residual[0], recomputed_residual(energy, dataclasses.replace(solution, value=energy.field))
    )
    assert (residual.diff(dim=0) <= 0).all()
    assert torch.equal(residual[-1], solution.residual)
    assert torch.equal(num_evals[-1], solution.num_evals)
    torch.testing.assert_close(values[-1], energy.energy(solution.value))
    torch.testing.assert_close(values[0], energy.energy(energy.field))


def test_evaluations_are_counted_once_each():
    calls = []

    def counted(z: Tensor) -> Tensor:
        calls.append(1)
        return z.cos()

    for solver in (TorchDEQ("anderson", rtol=1e-6), TorchDEQ("broyden", rtol=1e-6), SciPy("krylov", rtol=1e-6)):
        calls.clear()
        with torch.no_grad():
            solution = solve(FixedPointMap(counted, event_ndim=1), torch.zeros(1, D).double(), solver=solver)
        assert solution.num_evals.item() == len(calls)


# Gradients.


@pytest.mark.parametrize(
    "solver", [*(TorchDEQ(n, **TIGHT) for n in (*TORCHDEQ, *OURS)), SciPy("krylov", **TIGHT)], ids=named
)
def test_implicit_gradient_equals_that_behind_picard(solver, random):
    energy, cotangent = hopfield(random), normal(random, B, N, D)
    tensors = [t.requires_grad_() for t in energy.tensors() if t.is_floating_point() and not t.isinf().any()]
    assert len(tensors) == 3
    expected = torch.autograd.grad(
        solve(energy, energy.field.detach(), solver=REFERENCE, adjoint=Implicit()).value, tensors, cotangent
    )
    found = torch.autograd.grad(
        solve(energy, energy.field.detach(), solver=solver, adjoint=Implicit()).value, tensors, cotangent
    )
    for f, e in zip(found, expected, strict=True):
        assert (f - e).norm() <= 1e-8 * e.norm()


@both_libraries
def test_direct_use_inside_vmap_is_refused(solver):
    with pytest.raises(ValueError, match=r"torch\.vmap"):
        torch.vmap(lambda z: solver.run(cosine(), z).value)(torch.zeros(B, N, D).double())


# Options.


@pytest.fixture
def registry():
    solvers = torchdeq.solver._solvers
    kept = dict(solvers)
    yield solvers
    solvers.clear()
    solvers.update(kept)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="'anderson', 'broyden', 'fixed_point_iter'"):
        TorchDEQ("andersen")
    with pytest.raises(ValueError, match="'hybr', 'lm'"):
        SciPy("newton")


def test_unknown_and_reserved_options_raise():
    with pytest.raises(ValueError, match="m, lam, tau"):
        TorchDEQ("anderson", {"history": 5})
    with pytest.raises(ValueError, match="LBFGS_thres, ls"):
        TorchDEQ("broyden", {"m": 5})
    with pytest.raises(ValueError, match="use `max_steps`"):
        TorchDEQ("anderson", {"max_iter": 5})
    with pytest.raises(ValueError, match="use `max_steps`"):
        SciPy("krylov", {"maxiter": 5})
    with pytest.raises(TypeError, match="mapping"):
        TorchDEQ("anderson", 5)
    with pytest.raises(ValueError, match="Unknown solver options: histroy"):
        solve(cosine(), torch.zeros(B, D), solver=SciPy("broyden1", {"histroy": 5}))
    with pytest.raises(ValueError, match="history"):
        solve(cosine(), torch.zeros(B, D), solver=TorchDEQ("implicit_anderson", {"guard": "residual", "m": 3}))
    with pytest.raises(ValueError, match="fixed budget"):
        TorchDEQ("anderson", rtol=0.0, atol=0.0, max_steps=2)


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        (TorchDEQ("anderson"), TorchDEQ("anderson", {"m": 2})),
        (TorchDEQ("anderson"), TorchDEQ("anderson", {"tau": 0.5})),
        (TorchDEQ("anderson"), TorchDEQ("anderson", {"lam": 1e-12})),
        (TorchDEQ("broyden"), TorchDEQ("broyden", {"LBFGS_thres": 1})),
        (TorchDEQ("fixed_point_iter"), TorchDEQ("fixed_point_iter", {"tau": 0.5})),
        (TorchDEQ("implicit_anderson"), TorchDEQ("implicit_anderson", {"history": 1})),
        (SciPy("broyden1"), SciPy("broyden1", {"jac_options": {"alpha": 0.3}})),
        (SciPy("hybr"), SciPy("hybr", {"factor": 0.1})),
    ],
    ids=lambda s: f"{named(s)}-{dict(s.options)}",
)
def test_options_change_the_course_and_not_the_answer(plain, changed, random):
    affine, b = normal(random, D, D) / 5, normal(random, D)
    problem, start = FixedPointMap(lambda z: (z @ affine).sin() + b, event_ndim=1), torch.zeros(B, D).double()
    courses = [solve(problem, start, solver=dataclasses.replace(s, rtol=1e-9), trace=True) for s in (plain, changed)]
    torch.testing.assert_close(courses[0].value, courses[1].value, rtol=1e-7, atol=1e-7)
    first, second = (c.trace.residual for c in courses)
    assert first.shape != second.shape or not torch.equal(first, second)


def test_damped_steps_do_not_converge_sooner():
    # torchdeq measures the damped step, which is 10 times shorter than the residual.
    solver = TorchDEQ("fixed_point_iter", {"tau": 0.1}, rtol=1e-6)
    solution = solve(cosine(), torch.zeros(B, D).double(), solver=solver)
    assert (solution.residual <= 1e-6 * math.sqrt(D)).all()


def test_solvers_are_values():
    given = {"jac_options": {"alpha": 0.3}}
    solver = SciPy("broyden1", given)
    given["jac_options"]["alpha"] = 7.0
    assert solver.options["jac_options"]["alpha"] == 0.3
    for one in (solver, TorchDEQ("anderson", {"m": 4}, rtol=1e-3)):
        same = pickle.loads(pickle.dumps(one))
        assert same == one
        assert hash(same) == hash(one)
        longer = dataclasses.replace(one, max_steps=7)
        assert (longer.max_steps, longer.options) == (7, one.options)
        with pytest.raises(TypeError):
            one.options["m"] = 5
        assert one != dataclasses.replace(one, options={})


def test_warnings_of_the_map_are_shown_and_those_of_scipy_are_not():
    def warns(z: Tensor) -> Tensor:
        warnings.warn("mine", stacklevel=2)
        return z.cos()

    with torch.no_grad(), pytest.warns(UserWarning, match="mine"):
        solve(FixedPointMap(warns, event_ndim=1), torch.zeros(1, D).double(), solver=SciPy("broyden1"))
    # Overflows and divides by zero inside SciPy.
    wild = FixedPointMap(lambda z: z + z**3 * 1e200, event_ndim=1)
    solve(wild, torch.ones(1, D).double(), solver=SciPy("df-sane", max_steps=20), on_failure="ignore")


# Packages that may be missing, or must not be loaded.


def test_missing_packages_are_named_with_the_remedy(monkeypatch):
    solver = SciPy("krylov")
    monkeypatch.setitem(sys.modules, "torchdeq.solver", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="pip install 'torchdeq"):
        TorchDEQ("anderson")
    with pytest.raises(ImportError, match="pip install 'torchdeq"):
        register_with_torchdeq()
    with pytest.raises(ImportError, match="pip install 'scipy"):
        solve(cosine(), torch.zeros(B, D).double(), solver=solver)


# torchdeq's models with our solvers.


class Cell(nn.Module):
    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(random, D, D) / 6)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight + x)


def expected_gradient(cell: Cell, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    problem = FixedPointMap(lambda z, w, x: torch.tanh(z @ w + x), cell.weight, x, event_ndim=2)
    adjoint = Implicit(GMRES(rtol=1e-12))
    value = solve(problem, torch.zeros_like(x), solver=REFERENCE, adjoint=adjoint).value
    return value.detach(), list(torch.autograd.grad(value.square().sum(), [cell.weight, x]))


@pytest.mark.parametrize(
    ("f_solver", "b_solver"),
    [*((name, name) for name in OURS[:3]), ("implicit_newton_krylov", "broyden"), ("broyden", "implicit_anderson")],
)
def test_torchdeq_model_finds_the_same_point_and_gradient(f_solver, b_solver, random):
    cell, x = Cell(random), normal(random, B, N, D).requires_grad_()
    deq = torchdeq.get_deq(
        f_solver=f_solver, b_solver=b_solver, ift=True, f_tol=1e-11, b_tol=1e-11, f_max_iter=200, b_max_iter=200
    )
    (z,), info = deq(lambda z: cell(z, x), torch.zeros(B, N, D).double())
    value, gradient = expected_gradient(cell, x)
    torch.testing.assert_close(z, value, rtol=0, atol=1e-9)
    found = torch.autograd.grad(z.square().sum(), [cell.weight, x])
    for f, e in zip(found, gradient, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-8, atol=1e-8)
    assert (info["abs_lowest"] <= 1e-11).all()
    deq.eval()
    (z,), _ = deq(lambda z: cell(z, x), torch.zeros(B, N, D).double())
    torch.testing.assert_close(z, value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("stop_mode", ["abs", "rel"])
@pytest.mark.parametrize("shape", [(4, D), (4, N, D), (4,)])
def test_statistics_have_torchdeqs_keys_shapes_and_meaning(stop_mode, shape, random):
    x0 = COS + normal(random, *shape) / 20
    arguments = {"max_iter": 50, "tol": 1e-6, "stop_mode": stop_mode}
    _, _, theirs = torchdeq.solver.get_solver("fixed_point_iter")(torch.cos, x0, **arguments)
    for name in OURS:
        value, trajectory, info = torchdeq.solver.get_solver(name)(torch.cos, x0, **arguments)
        assert trajectory == []
        assert {k: v.shape for k, v in info.items()} == {k: v.shape for k, v in theirs.items()}
        r = (value.cos() - value).reshape(4, -1).norm(dim=1)
        torch.testing.assert_close(info["abs_lowest"], r)
        torch.testing.assert_close(info["rel_lowest"], r / value.cos().reshape(4, -1).norm(dim=1), rtol=1e-6, atol=0)
        assert (info[f"{stop_mode}_lowest"] <= 1e-6).all()
        torch.testing.assert_close(info["abs_trace"][:, 0], (x0.cos() - x0).reshape(4, -1).norm(dim=1))
        assert torch.equal(info["abs_trace"].amin(1), info["abs_lowest"])
        at = info["nstep"].long()[:, None]
        assert torch.equal(info["abs_trace"].gather(1, at)[:, 0], info["abs_lowest"])


@pytest.mark.parametrize("core", ["indexing", "sliced"])
def test_torchdeq_model_returns_every_state_that_was_asked_for(core, random):
    cell, x = Cell(random), normal(random, B, N, D)
    deq = torchdeq.get_deq(core=core, f_solver="implicit_picard", n_states=3, f_max_iter=9, f_tol=1e-30)
    states, _ = deq(lambda z: cell(z, x), torch.zeros(B, N, D).double())
    assert len(states) == 3
    # One more application carries the gradient; the sliced core goes on from there.
    wanted = [3 + 1, 6 + 1, 9 + 1] if core == "indexing" else [3 + 1, 7 + 1, 11 + 1]
    z, expected = torch.zeros(B, N, D).double(), []
    for _ in range(max(wanted)):
        z = cell(z, x)
        expected.append(z)
    for state, step in zip(states, wanted, strict=True):
        torch.testing.assert_close(state, expected[step - 1])


def test_trajectory_and_trace_stay_with_a_sample_that_has_converged(random):
    gain = torch.tensor([0.1, 0.99], dtype=torch.float64)[:, None]
    run = torchdeq.solver.get_solver("implicit_picard")
    arguments = {"max_iter": 30, "tol": 1e-3, "indexing": [1, 10, 30]}
    value, trajectory, info = run(lambda z: gain * z.sin(), normal(random, 2, D), **arguments)
    assert info["nstep"][0] < 10
    assert info["nstep"][1] == 30
    assert not torch.equal(trajectory[0][0], value[0])
    assert torch.equal(trajectory[1][0], value[0])
    assert not torch.equal(trajectory[1][1], value[1])
    assert torch.equal(trajectory[2], value)
    assert (info["abs_trace"][0, 10:] == info["abs_lowest"][0]).all()
    latest, states, _ = run(lambda z: 1.1 * z, torch.ones(2, D), max_iter=3, indexing=[2, 3], return_final=True)
    torch.testing.assert_close(latest, torch.full((2, D), 1.1**3))
    torch.testing.assert_close(torch.stack(states), torch.stack([torch.full((2, D), 1.1**2), latest]))


def test_return_final_runs_all_steps_and_zero_tolerance_returns_the_best():
    run = torchdeq.solver.get_solver("implicit_picard")
    x0 = torch.full((1, 1), 0.3).double()

    def worsens(z: Tensor) -> Tensor:
        return torch.where(z == 0.3, z + 0.01, 1.1 * z + 0.1)

    final, _, info = run(worsens, x0, max_iter=5, return_final=True)
    assert info["nstep"].item() == 5
    best, _, info = run(worsens, x0, max_iter=5, tol=0.0)
    assert info["nstep"].item() == 0
    assert torch.equal(best, x0)
    assert not torch.equal(final, x0)


def test_an_evaluation_behind_the_last_step_is_not_in_the_trace():
    # The best state is the first, at which all is measured once more in the end.
    run = torchdeq.solver.get_solver("implicit_picard")
    best, states, info = run(lambda z: 2 * z + 1, torch.tensor(0.3), max_iter=5, tol=0.0, indexing=[2, 9])
    assert torch.equal(torch.stack(states), best.expand(2))
    torch.testing.assert_close(info["abs_trace"], 1.3 * 2.0 ** torch.arange(6)[None])


def test_registering_twice_changes_nothing(registry):
    before = dict(registry)
    assert register_with_torchdeq() == OURS
    assert dict(registry) == before
    assert register_with_torchdeq("mine_") == tuple(n.replace("implicit_", "mine_") for n in OURS)
    assert registry["mine_anderson"] is registry["implicit_anderson"]
    with pytest.raises(ValueError, match="prefix"):
        register_with_torchdeq(None)
