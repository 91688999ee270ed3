"""The door: what `solve` accepts, refuses, returns and reports."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from torch import nn

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    FixedPointMap,
    GradientDescent,
    Implicit,
    LogSumExp,
    PerSample,
    Phantom,
    Picard,
    SolveReport,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.energies import Energy
from implicit_attention.kernels import Attention, native_status
from implicit_attention.linear import CG
from implicit_attention.solution import Record
from implicit_attention.testing.numerics import random


def make_energy(dtype=torch.float64, anchor=0.5):
    return AnchoredEnergy(LogSumExp(random(2, 7, 5, dtype=dtype), 0.5), random(2, 3, 5, seed=1, dtype=dtype), anchor)


def test_the_readme_line():
    energy = make_energy()
    solution = solve(energy, energy.field)
    assert solution.converged.all()
    size = solution.value.norm(dim=-1)
    worst, aim = float((solution.residual / size).max()), float((solution.tolerance / size).max())
    accuracy = f"(6 CONVERGED; relative residual {worst:.1e}, tolerance {aim:.1e}; evaluations median"
    assert repr(solution).startswith(f"Solution{accuracy}")
    assert repr(solution.report).startswith(f"SolveReport{accuracy}")
    torch.testing.assert_close(solution.report.relative_residual, solution.relative_residual, rtol=1e-3, atol=0)
    assert solution.message(0, 1).startswith("converged: residual")
    torch.testing.assert_close(solution.energy, energy.energy(solution.value))
    assert (solution.residual <= solution.tolerance).all()


def test_a_solution_says_where_the_absolute_tolerance_decided():
    keys, field = 1e-8 * random(2, 7, 5), random(2, 3, 5, seed=1)
    field[0] *= 1e-8
    energy = AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.5)
    loose, tight = (solve(energy, torch.zeros_like(field), solver=Anderson(atol=a)) for a in (1e-8, 0.0))
    for told in (loose, loose.report):
        assert "; 3 with a residual above 1% of |value|: lower atol for data of this scale, or rtol)" in repr(told)
        assert "of |value|: lower atol" in told.message(0, 1)
        assert "of |value|" not in told.message(1, 1)
    assert "|value|" not in repr(tight)
    off = (loose.value - tight.value).norm(dim=-1) / tight.value.norm(dim=-1)
    assert (off[0] > 0.1).all()
    assert (off[1] < 1e-3).all()
    assert torch.equal(loose.relative_residual > 0.01, off > 0.01)
    zero = solve(FixedPointMap(torch.sin, event_ndim=1), torch.zeros(2, 3))
    assert not zero.relative_residual.any()


def test_a_report_says_what_was_not_measured_or_has_no_size():
    problem, start = FixedPointMap(lambda z: 0.5 * z.cos(), event_ndim=1), torch.full((2, 1), 0.3)
    absolute = solve(problem, start, solver=Picard(rtol=0, atol=1e-3)).report
    assert f"CONVERGED; residual {absolute.residual[0]:.1e}, tolerance 1.0e-03; evaluations" in repr(absolute)
    assert absolute.relative_residual.isnan().all()
    budget = solve(problem, start, solver=Picard(rtol=0, atol=0, max_steps=1)).report
    assert repr(budget).startswith(f"SolveReport(2 BUDGET; residual <= {budget.residual[0]:.1e}; evaluations")
    far = Record(budget.status, torch.tensor([5.0, 5e4]), torch.zeros(2), budget.num_steps, budget.num_evals)
    assert "; residual <= 5.0e+04; " in repr(SolveReport(far))
    lost = Record.unmeasured(start, Status.DIVERGED, 1)
    assert repr(SolveReport(lost)).startswith("SolveReport(2 DIVERGED; residual not measured; evaluations")
    assert SolveReport(lost).message(0).endswith("the best state, after 0 steps, was not measured")
    mixed = lost._replace(residual=torch.tensor([torch.nan, 2.0]), tolerance=torch.ones(2))
    assert "; residual 2.0e+00, tolerance 1.0e+00; " in repr(SolveReport(mixed))


def test_a_map_has_no_energy():
    assert solve(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(2, 1)).energy is None


def test_unknown_options_are_refused():
    energy = make_energy()
    with pytest.raises(TypeError, match="tolerance"):
        solve(energy, energy.field, tolerance=1e-3)


def test_maps_of_the_wrong_shape_are_named():
    with pytest.raises(ValueError, match=r"must return shape of z = \(2, 3\), got shape \(2, 1\)"):
        solve(FixedPointMap(lambda z: z.sum(-1, keepdim=True), event_ndim=1), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="must return a tensor of shape of z, got float"):
        solve(FixedPointMap(lambda z: 1.0, event_ndim=1), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="`initial` must have at least 2 axes"):
        solve(FixedPointMap(torch.cos, event_ndim=2), torch.zeros(3))
    with pytest.raises(
        ValueError, match="`problem` must have an energy for GradientDescent, got FixedPointMap; use Picard"
    ):
        solve(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(2, 3), solver=GradientDescent())


@pytest.mark.parametrize("wrap", [PerSample, lambda x: x])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_map_that_is_not_finite_for_one_problem_leaves_the_others(wrap, bad):
    x = random(40, 4)
    clean = solve(FixedPointMap(lambda z, x: torch.tanh(z / 2) + x, wrap(x), event_ndim=1), torch.zeros_like(x))
    late = (torch.arange(40) == 7)[:, None]

    def f(z, x, late):
        # The second evaluation leaves the numbers, in one problem.
        return (torch.tanh(z / 2) + x).where(~(late & (z != 0).any(-1, keepdim=True)), bad)

    problem = FixedPointMap(f, wrap(x), wrap(late), event_ndim=1)
    solution = solve(problem, torch.zeros_like(x), on_failure="ignore")
    assert [i for i, code in enumerate(solution.status.tolist()) if code == Status.DIVERGED] == [7]
    others = [i for i in range(40) if i != 7]
    assert solution.converged[others].all()
    torch.testing.assert_close(solution.value[others], clean.value[others], rtol=1e-12, atol=1e-12)
    x[5] = bad
    solution = solve(
        FixedPointMap(f, wrap(x), wrap(late & False), event_ndim=1), torch.zeros_like(x), on_failure="ignore"
    )
    assert [i for i, code in enumerate(solution.status.tolist()) if code == Status.NONFINITE] == [5]


@pytest.mark.parametrize("on_failure", ["warn", "ignore"])
def test_an_implicit_gradient_at_no_solution_is_told_per_problem(on_failure):
    slope = torch.tensor([[0.3], [-4.0], [0.2]], dtype=torch.float64)
    x = torch.full((3, 1), 0.5, dtype=torch.float64, requires_grad=True)
    words = "the implicit gradient there is that of no solution: use Implicit"

    def solved(adjoint):
        problem = FixedPointMap(lambda z, x, slope: torch.tanh(slope * z) + x, x, slope, event_ndim=1)
        options = {"solver": Picard(max_steps=8), "adjoint": adjoint, "on_failure": on_failure}
        return solve(problem, torch.zeros(3, 1).double(), **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = solved(Implicit())
        solution.value.sum().backward()
    assert any(words in str(warning.message) for warning in caught) == (on_failure == "warn")
    assert solution.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS, Status.CONVERGED]
    assert solution.adjoint.failed.tolist() == [False, True, False]
    assert solution.report.map(lambda t: t[None]).adjoint.unsolved.tolist() == [[False, True, False]]
    assert "; 1 at states that are no solution, where it is wrong" in repr(solution.adjoint)
    assert words in solution.message(1)
    assert words not in solution.message(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for adjoint in (Unrolled(), Phantom(3), Implicit(fallback=Phantom(3))):
            solution = solved(adjoint)
            assert words not in solution.message(1)
            assert solution.adjoint.unsolved is None
        x.requires_grad_(False)
        assert words not in solved(Implicit()).message(1)
    assert not any(words in str(warning.message) for warning in caught)


@pytest.mark.parametrize("on_failure", ["raise", "warn", "ignore"])
def test_failures_are_reported_as_asked(on_failure):
    energy = make_energy()
    hasty = Picard(rtol=1e-12, atol=0, max_steps=1)
    if on_failure == "raise":
        with pytest.raises(ConvergenceError, match=r"Picard failed for 6 of 6 problems, first at \(0, 0\), \(0, 1\)"):
            solve(energy, energy.field, solver=hasty, on_failure=on_failure)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = solve(energy, energy.field, solver=hasty, on_failure=on_failure)
    assert solution.failed.all()
    assert [w.category for w in caught] == ([ConvergenceWarning] if on_failure == "warn" else [])
    if caught:
        assert caught[0].filename == __file__


def test_one_key_that_is_not_finite_reaches_the_queries_of_its_batch_entry_only():
    keys, field = random(2, 7, 5), random(2, 3, 5, seed=1)
    clean = solve(AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.5), field)
    broken = keys.clone()
    broken[1, 2] = torch.inf
    solution = solve(AnchoredEnergy(LogSumExp(broken, 0.5), field, 0.5), field, on_failure="ignore")
    assert solution.status.tolist() == [[Status.CONVERGED] * 3, [Status.NONFINITE] * 3]
    assert torch.equal(solution.value[0], clean.value[0])
    assert "NONFINITE" in repr(solution)


def test_parameters_that_leave_their_range_after_the_check_are_reported():
    beta = torch.tensor([0.5, 0.5], dtype=torch.float64)
    energy = AnchoredEnergy(LogSumExp(random(2, 7, 5), beta), random(2, 3, 5, seed=1), 0.5)
    beta[1] = -1.0
    solution = solve(energy, energy.field, on_failure="ignore")
    assert solution.status.tolist() == [[Status.CONVERGED] * 3, [Status.NONFINITE] * 3]


def test_a_potential_outlives_a_backward_pass_and_an_optimiser_step():
    keys = nn.Parameter(random(2, 7, 5))
    mask = random(2, 3, 7, seed=9) > -0.5
    field = random(2, 3, 5, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, 0.5, mask=mask), field, 0.5)
    optimizer = torch.optim.SGD([keys], lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = solve(energy, field).value.square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]


def test_problems_and_solutions_copy_and_pickle():
    energy = make_energy()
    solution = solve(energy, energy.field)
    for same in (copy.deepcopy(energy), pickle.loads(pickle.dumps(energy))):
        assert torch.equal(solve(same, same.field).value, solution.value)
    assert torch.equal(copy.deepcopy(solution).value, solution.value)


class Recall(Energy):
    """An energy that is written out, and says that it is attention."""

    event_ndim = 1

    def __init__(self, keys, x):
        self.keys, self.x = keys, x

    def energy(self, z):
        return z.square().sum(-1) / 2 - (z * self.x).sum(-1) / 2 - (0.5 * z @ self.keys.mT).logsumexp(-1)

    def as_attention(self):
        return Attention(self.x, self.keys, beta=0.5, anchor=0.5)


@pytest.mark.skipif(native_status().isa is None, reason=native_status().reason)
def test_kernels_solve_a_problem_of_ones_own_as_the_loop_does():
    keys, x, weight = random(7, 5).requires_grad_(), random(3, 5, seed=1).requires_grad_(), random(3, 5, seed=2)
    found = {}
    for impl in ("auto", "reference"):
        solution = solve(Recall(keys, x), x, solver=Anderson(rtol=1e-11, atol=0.0), impl=impl)
        first = torch.autograd.grad((weight * solution.value).sum(), (keys, x), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (keys, x))
        found[str(solution.route).split(":")[0]] = [solution.value, *first, *second]
    torch.testing.assert_close(found["native"], found["torch"], rtol=1e-8, atol=1e-8)


def test_vmap_over_problems_keeps_the_evidence_apart():
    keys, field = random(4, 7, 5), random(3, 5, seed=1)

    def answer(keys):
        solution = solve(AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.5), field)
        return solution.value, solution.status, solution.num_evals

    value, status, evals = torch.vmap(answer)(keys)
    assert status.shape == evals.shape == (4, 3)
    for i in range(4):
        alone = solve(AnchoredEnergy(LogSumExp(keys[i], 0.5), field, 0.5), field)
        torch.testing.assert_close(value[i], alone.value)
        assert torch.equal(evals[i], alone.num_evals)


def test_inputs_are_not_changed():
    energy = make_energy()
    before = [t.clone() for t in energy.tensors()]
    initial = energy.field.clone()
    solve(energy, initial)
    assert all(torch.equal(a, b) for a, b in zip(before, energy.tensors(), strict=True))
    assert torch.equal(initial, energy.field)


def test_non_contiguous_and_expanded_inputs():
    keys = random(5, 7, 2).permute(2, 1, 0)
    field = random(1, 3, 5, seed=1).expand(2, 3, 5)
    solution = solve(AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.5), field)
    other = solve(AnchoredEnergy(LogSumExp(keys.contiguous(), 0.5), field.contiguous(), 0.5), field.contiguous())
    torch.testing.assert_close(solution.value, other.value, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_solve_equals_the_one_on_the_cpu():
    energy = make_energy(torch.float32)
    on_gpu = energy.replace(*(t.cuda() for t in energy.tensors()))
    solution = solve(on_gpu, on_gpu.field)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value.cpu(), solve(energy, energy.field).value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("first", [None, 0])
def test_a_fixed_budget_never_waits_for_an_accelerator(first, monkeypatch):
    """Tensors without data: every look of the host at a number is an error."""
    # The addresses of such tensors are all alike.
    monkeypatch.setattr("implicit_attention.solvers.loop.share_memory", lambda *tensors: False)
    query, keys = (torch.empty(2, size, 8, device="meta") for size in (9, 70))
    energy = AnchoredEnergy(LogSumExp(keys, 0.5, query_offset=first), query, 0.5)
    for method in (Anderson, Picard):
        assert method(rtol=0, atol=0, max_steps=6).run(energy, query).value.shape == query.shape
        with pytest.raises(RuntimeError, match="meta"):
            method(max_steps=6).run(energy, query)


def test_equal_solvers_of_a_user_are_not_taken_for_each_other():
    @dataclasses.dataclass(frozen=True)
    class Counting(CG):
        calls: list = dataclasses.field(default_factory=list, compare=False, kw_only=True)

        def solve(self, *arguments, **options):
            self.calls.append(1)
            return super().solve(*arguments, **options)

    first, second = Counting(), Counting()
    assert first == second
    for method in (first, second):
        energy = make_energy()
        energy.field.requires_grad_()
        solve(energy, energy.field.detach(), adjoint=Implicit(linear_solver=method)).value.sum().backward()
    assert (len(first.calls), len(second.calls)) == (1, 1)
