"""Every solver under the contract, and what is special about each."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    ConvergenceError,
    FixedPointMap,
    GradientDescent,
    ImplicitAttention,
    LogSumExp,
    NewtonKrylov,
    Picard,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.diagnostics import is_saddle, smallest_curvature
from implicit_attention.solvers import Solver, Update
from implicit_attention.testing.numerics import random
from implicit_attention.testing.problems import hopfield_energy
from implicit_attention.testing.solver import SolverContract


class TestPicard(SolverContract):
    solver = Picard()
    beyond = frozenset(
        {
            "geometric decay",
            "cos x + pi/2",
            "rotation",
            "scipy F",
            "scipy F2",
            "scipy F3",
            "scipy F4 (Powell)",
            "scipy F5",
        }
    )


class TestDampedPicard(SolverContract):
    solver = Picard(damping=0.5)
    beyond = frozenset({"geometric decay", "rotation", "scipy F2", "scipy F4 (Powell)", "scipy F5"})


class TestAnderson(SolverContract):
    solver = Anderson()


class TestAndersonWithALongHistory(SolverContract):
    solver = Anderson(history=5)


class TestBroyden(SolverContract):
    solver = Broyden()
    beyond = frozenset({"scipy F5"})


class TestNewtonKrylov(SolverContract):
    solver = NewtonKrylov()


class TestGradientDescent(SolverContract):
    solver = GradientDescent(0.5)
    needs_energy = True


ACCELERATED = [Anderson(), Anderson(history=5), Anderson(history=1), Broyden(), NewtonKrylov()]


@pytest.mark.parametrize("solver", ACCELERATED, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("anchor", [0.0, 0.5])
def test_clustered_keys_every_query_converges_and_none_on_a_saddle(solver, dtype, sharpness, anchor):
    energy = hopfield_energy(sharpness=sharpness, clustered=True, anchor=anchor, dtype=dtype)
    solver = dataclasses.replace(solver, rtol=1e-6, atol=0.0)
    solution = solve(energy, energy.field, solver=solver)
    exact = energy.replace(*(t.double() for t in energy.tensors()))
    curvature = smallest_curvature(exact, solution.value.double(), steps=64)
    assert curvature.min() > -1e-5


@pytest.mark.parametrize("solver", [Anderson(guard="none"), Broyden(guard="none")], ids=repr)
def test_without_the_guard_saddles_and_stalls_appear(solver):
    """The reason for the guard; if this ever fails, the clustered keys above no longer test it."""
    energy = hopfield_energy(sharpness=1.0, clustered=True)
    solution = solve(energy, energy.field, solver=dataclasses.replace(solver, rtol=1e-6), on_failure="ignore")
    bad = is_saddle(energy, solution.value, steps=64) | solution.failed
    assert bad.sum() > 10


@pytest.mark.parametrize("solver", ACCELERATED, ids=repr)
def test_acceleration_survives_to_the_precision_of_float32(solver):
    energy = hopfield_energy(clustered=True, anchor=0.5, dtype=torch.float32)
    accelerated = solve(energy, energy.field, solver=dataclasses.replace(solver, rtol=1e-6, atol=0.0))
    plain = solve(energy, energy.field, solver=Picard(rtol=1e-6, atol=0.0))
    slow = plain.num_evals > 40
    assert slow.any()
    assert accelerated.num_evals[slow].float().mean() < 0.8 * plain.num_evals[slow].float().mean()


def test_accelerated_minima_are_those_of_plain_descent():
    energy = hopfield_energy(sharpness=2.0, clustered=True)
    tight = {"rtol": 0.0, "atol": 1e-9, "max_steps": 2000}
    plain = solve(energy, energy.field, solver=Picard(**tight))
    for solver in ACCELERATED[:4]:
        other = solve(energy, energy.field, solver=dataclasses.replace(solver, **tight))
        same = (other.value - plain.value).norm(dim=-1) < 1e-5
        assert same.float().mean() > 0.95


def test_a_fold_that_needs_long_steps_is_crossed():
    """Near the fold of clustered keys the accelerated step is some fifty times the plain one."""
    energy = hopfield_energy(sharpness=3.0, clustered=True, anchor=0.5)
    tight = {"rtol": 0.0, "atol": 1e-6, "max_steps": 1000}
    plain = solve(energy, energy.field, solver=Picard(**tight))
    fast = solve(energy, energy.field, solver=Anderson(history=2, plain_steps=5, **tight))
    assert plain.num_evals.max() > 3 * fast.num_evals.max()


@pytest.mark.parametrize("history", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_andersons_steps_are_those_of_least_squares(history, dtype):
    matrix, shift, start = 0.3 * random(8, 8), random(4, 8, seed=1), random(4, 8, seed=2)
    matrix = (matrix + matrix.mT) / 2
    # In the last problem the residual moves along one direction alone: columns depend on each other.
    exact = torch.linalg.solve(torch.eye(8).double() - matrix, shift[3])
    start[3] = exact + torch.linalg.eigh(matrix).eigenvectors[:, 0]
    solver = Anderson(history=history, plain_steps=1, ridge=0.0, guard="none", rtol=0.0, atol=0.0, max_steps=6)
    problem = FixedPointMap(lambda z, b: z @ matrix.to(z) + b, shift.to(dtype), event_ndim=1)
    found = solve(problem, start.to(dtype), solver=solver, adjoint=Unrolled()).value
    for row in range(3):
        states, images = [start[row]], [start[row] @ matrix + shift[row]]
        for _ in range(6):
            dr, df = [], []
            for (z, f), (z_before, f_before) in itertools.pairwise(reversed(list(zip(states, images, strict=True)))):
                df.append(f - f_before)
                dr.append(f - z - (f_before - z_before))
            step = images[-1]
            if dr:
                columns = torch.stack(dr[:history], -1)
                weights = torch.linalg.lstsq(columns, (images[-1] - states[-1])[:, None]).solution[:, 0]
                step = step - torch.stack(df[:history], -1) @ weights
            states.append(step)
            images.append(step @ matrix + shift[row])
        close = 1e-7 if dtype == torch.float64 else 2e-3
        torch.testing.assert_close(found[row].double(), states[-1], rtol=close, atol=close)
    torch.testing.assert_close(found[3].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Picard(), Picard(damping=0.3)),
        (GradientDescent(0.1), GradientDescent(0.9)),
        (Anderson(history=1), Anderson(history=4)),
        (Anderson(ridge=1e-10), Anderson(ridge=0.5)),
        (Anderson(plain_steps=1), Anderson(plain_steps=6)),
        (Anderson(guard="energy"), Anderson(guard="none")),
        (Anderson(guard="residual"), Anderson(guard="none")),
        (Broyden(history=1), Broyden(history=9)),
        (Broyden(guard="energy"), Broyden(guard="none")),
        (NewtonKrylov(forcing=0.5), NewtonKrylov(forcing=1e-3)),
        (NewtonKrylov(inner_steps=1), NewtonKrylov(inner_steps=20)),
    ],
    ids=repr,
)
def test_every_option_changes_behaviour(one, other):
    energy = hopfield_energy(sharpness=2.0, clustered=True, anchor=0.2)
    counts = [
        solve(energy, energy.field, solver=dataclasses.replace(s, max_steps=60), on_failure="ignore").num_evals
        for s in (one, other)
    ]
    assert not torch.equal(*counts)


def test_an_energy_guard_needs_an_energy():
    problem = FixedPointMap(torch.cos, event_ndim=1)
    with pytest.raises(ValueError, match="`guard` must be 'residual', 'none' or 'auto' for a map without an energy"):
        solve(problem, torch.zeros(1, 1), solver=Anderson(guard="energy"))


def test_damping_is_not_what_is_measured():
    """A damped step is shorter than the residual; stopping on it would stop ten times too early."""
    problem = FixedPointMap(lambda x: 0.5 * x, event_ndim=1)
    solution = solve(problem, torch.ones(1, 1, dtype=torch.float64), solver=Picard(damping=0.9, rtol=0, atol=1e-3))
    assert (problem.fixed_point_map(solution.value) - solution.value).norm() <= 1e-3


def test_finished_problems_stop_costing():
    energy = hopfield_energy(queries=640, keys=32, dim=16, sharpness=4.0, anchor=0.3, clustered=True)
    rows = []

    class Counting(LogSumExp):
        value, select = LogSumExp.value, LogSumExp.select

        def mean(self, z):
            rows.append(z.shape[-2])
            return super().mean(z)

    potential = energy.potential
    counted = AnchoredEnergy(Counting(potential.keys, potential.beta), energy.field, 0.3)
    solution = solve(counted, energy.field, solver=Picard(rtol=1e-6))
    assert rows[0] == 640
    assert rows[-1] < 200
    assert sum(rows) < 1.5 * int(solution.num_evals.sum())


def test_statuses_have_sentences():
    for status in Status:
        text = status.sentence.format(residual=1.0, tolerance=0.1, steps=3)
        assert len(text) > 20
    assert [s.name for s in Status if s.failed] == ["MAX_STEPS", "STALLED", "DIVERGED", "NONFINITE", "OUT_OF_RANGE"]


def test_the_method_that_failed_says_the_remedy():
    problem = FixedPointMap(lambda x: 1 - x, event_ndim=1)
    for solver, remedy in ((Picard(max_steps=3), "use Anderson"), (Broyden(max_steps=0, guard="none"), "")):
        solution = solve(problem, torch.zeros(1, 1), solver=solver, on_failure="ignore")
        assert solution.message(0).partition("; ")[2].startswith(remedy or "residual")
        assert solution.report.message(0) == solution.message(0)
    with pytest.raises(ConvergenceError, match="use Anderson"):
        solve(problem, torch.zeros(1, 1), solver=Picard(max_steps=3))


def test_a_budget_returns_the_last_state_not_the_best():
    problem = FixedPointMap(lambda x: 2 * x, event_ndim=1)
    solution = solve(problem, torch.ones(1, 1), solver=Picard(max_steps=3, rtol=0, atol=0))
    assert solution.value.item() == 8.0
    assert solution.num_steps.item() == 3


@dataclasses.dataclass(frozen=True)
class Lost(Broyden):
    def propose(self, problem, history, point, accepted):
        proposal = super().propose(problem, history, point, accepted)
        direction = proposal.direction.clone()
        direction[0] = torch.nan
        return proposal._replace(direction=direction, accelerated=accepted)


@pytest.mark.parametrize("guard", ["residual", "none"])
def test_a_direction_that_is_not_finite_is_replaced_by_the_plain_step(guard):
    half, start = FixedPointMap(lambda z: z / 2 + 1, event_ndim=1), torch.zeros(2, 1)
    lost = solve(half, start, solver=Lost(guard=guard, rtol=1e-6), trace=True)
    plain = solve(half, start, solver=Picard(rtol=1e-6), trace=True)
    assert torch.equal(lost.trace.value[:, 0], plain.trace.value[:, 0])
    assert lost.num_evals.tolist() == [int(plain.num_evals[0]), 3]


def test_non_finite_map_later_on_returns_the_best_state():
    problem = FixedPointMap(lambda x: torch.where(x > 3, torch.inf, x + 1 / (1 + x)), event_ndim=1)
    solution = solve(problem, random(1, 1).abs(), solver=Picard(), on_failure="ignore")
    assert solution.status.item() == Status.DIVERGED
    assert solution.value.isfinite().all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Solver):
    """A solver written elsewhere: what its methods return."""

    give: Callable = lambda state, point: Update(state, point.mapped)
    begin: Callable = lambda z: ()
    judge: Callable = lambda point: None

    def init(self, problem, z):
        return self.begin(z)

    def accept(self, problem, state, point):
        return self.judge(point)

    def step(self, problem, state, point, accepted):
        return self.give(state, point)


def far_and_near():
    """Problems of which most have converged at the start, so that the others are gathered before the first step."""
    energy = hopfield_energy(queries=90, keys=20, dim=8, sharpness=2.0, clustered=True, anchor=0.3, dtype=torch.float32)
    start = solve(energy, energy.field, solver=Anderson(rtol=1e-6)).value
    start[:9] = energy.field[:9]
    return energy, start


def by_attention(solver, **options):
    torch.manual_seed(0)
    return ImplicitAttention(6, heads=2, solver=solver, **options)


DOORS = {
    "map": lambda solver: solve(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(7, 3), solver=solver),
    "energy": lambda solver: solve(*far_and_near(), solver=solver),
    "every step": lambda solver: solve(*far_and_near(), solver=solver, adjoint=Unrolled()),
    "layer": lambda solver: by_attention(solver)(torch.arange(60.0).cos().view(2, 5, 6)),
    "exported": lambda solver: torch.export.export(
        by_attention(dataclasses.replace(solver, rtol=0.0, atol=0.0, max_steps=2)).eval(), (torch.ones(2, 5, 6),)
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("solver", "kind", "words"),
    [
        (Own(give=lambda state, point: point.mapped), TypeError, r"`Own.step` must return Update.*, got (Fake)?Tensor"),
        (Own(give=lambda state, point: (state, point.z)), TypeError, r"`Own.step` must return Update.*, got tuple"),
        (Own(give=lambda state, point: Update(state, 1.0)), TypeError, "`Own.step` must return .* a tensor, got float"),
        (Own(give=lambda state, point: Update(state, point.z[..., :-1])), ValueError, "a candidate like point.z, "),
        (Own(give=lambda state, point: Update(state, point.z[..., 1:, :])), ValueError, "a candidate like point.z, "),
        (
            Own(give=lambda state, point: Update(state, point.z.double())),
            ValueError,
            "torch.float64, 'cpu'.*; form it ",
        ),
        (
            Own(give=lambda state, point: Update(state, point.mapped if point.step < 1 else point.mapped[..., :1])),
            ValueError,
            "a candidate like point.z, ",
        ),
        (
            Own(give=lambda state, point: Update((torch.tensor(0.5),), point.mapped)),
            ValueError,
            r"`Own.step` must return a state whose tensors begin .* got shape \(\); expand it",
        ),
        (
            Own(give=lambda state, point: Update((point.step and torch.tensor(0.5),), point.mapped)),
            ValueError,
            "must return a state whose tensors begin ",
        ),
        (Own(begin=lambda z: {"rate": torch.tensor(0.5)}), ValueError, "must return a state whose tensors begin "),
    ],
    ids=[
        "tensor",
        "tuple",
        "number",
        "narrow",
        "row short",
        "wide dtype",
        "second step",
        "state",
        "second state",
        "first state",
    ],
)
def test_a_step_that_is_not_of_the_protocol_is_refused(solver, kind, words, door):
    with pytest.raises(kind, match=words):
        DOORS[door](solver)


def test_a_memory_of_lists_and_dicts_is_gathered_as_one_of_tuples_is():
    def halfway(read, keep):
        return lambda state, point: Update(keep(point.mapped), (point.mapped + read(state)) / 2)

    ways = [
        Own(begin=lambda z: (z,), give=halfway(lambda state: state[0], lambda t: (t,))),
        Own(begin=lambda z: [{"last": z}], give=halfway(lambda state: state[0]["last"], lambda t: [{"last": t}])),
    ]
    expected, found = (solve(*far_and_near(), solver=solver) for solver in ways)
    assert expected.converged.all()
    torch.testing.assert_close((found.value, found.num_evals), (expected.value, expected.num_evals), rtol=0, atol=0)


@pytest.mark.parametrize(
    "late", [lambda t: t.double(), lambda t: t[:1], lambda t: t[..., :2]], ids=["wide", "short", "narrow"]
)
def test_a_later_step_writes_to_no_memory_of_others(late):
    own = Own(give=lambda state, point: Update(state, point.mapped if point.step < 5 else late(point.mapped)))
    with pytest.raises(
        ValueError, match=r"`Own.step` must return a candidate like point.z, \(\(4096, 3\), torch.float32"
    ):
        solve(FixedPointMap(torch.cos, event_ndim=1), torch.linspace(0, 1, 3).repeat(4096, 1), solver=own)


def test_one_word_for_all_problems_accepts_them_all():
    alike = [Own(judge=judge) for judge in (lambda point: None, lambda point: torch.tensor(True))]
    expected, found = (solve(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(999, 3), solver=s) for s in alike)
    torch.testing.assert_close((found.value, found.num_evals), (expected.value, expected.num_evals), rtol=0, atol=0)
