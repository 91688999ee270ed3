"""compare_solvers: numbers against solves by hand, records of what is refused, table, picture and bad input."""

import builtins

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    FixedPointMap,
    LogSumExp,
    NewtonKrylov,
    Picard,
    compare_solvers,
    solve,
)
from implicit_attention.studies.comparison import SolverComparison
from implicit_attention.testing.numerics import random

NAMES = ["Picard", "GradientDescent", "Anderson", "Broyden", "NewtonKrylov"]


def energy():
    return AnchoredEnergy(LogSumExp(random(2, 7, 5), 1.5), random(2, 3, 5, seed=1), 0.2)


def compared(problem, initial, solvers=None, **options):
    return compare_solvers(problem, initial, solvers, min_seconds=0.0, **options)


@pytest.mark.slow
def test_all_methods_of_the_library_are_compared_and_agree():
    problem = energy()
    comparison = compared(problem, problem.field)
    assert [record.name for record in comparison.records] == NAMES
    for record in comparison.records:
        found = solve(problem, problem.field, solver=record.solver)
        assert torch.equal(record.solution.value, found.value)
        assert record.evaluations_median == float(found.num_evals.double().flatten().sort().values[2])
        assert record.evaluations_max == float(found.num_evals.max())
        assert record.residual_max == float(found.residual.max())
        assert record.residual_median == float(found.residual.flatten().sort().values[2])
        assert (record.converged, record.saddles, record.status) == (1.0, 0, {"CONVERGED": 6})
        assert 0 < record.seconds < 60
        assert record.refused == ""


def test_numbers_are_those_of_each_solver_and_of_all_its_problems():
    # z = a z + 1 - a from 0: the residual after n plain steps is (1 - a) a^n.
    rates = torch.tensor([[0.1], [0.5], [0.9]], dtype=torch.float64)
    problem = FixedPointMap(lambda z: rates * z + 1 - rates, event_ndim=1)
    picard = Picard(atol=1e-3, rtol=0.0, max_steps=20)
    (record,) = compared(problem, torch.zeros(3, 1, dtype=torch.float64), [picard]).records
    # .9 * .1^3 <= 1e-3 after 3 steps, .5 * .5^9 after 9, and .1 * .9^20 not after 20: an evaluation more each.
    assert (record.evaluations_median, record.evaluations_max) == (10.0, 21.0)
    assert record.status == {"CONVERGED": 2, "MAX_STEPS": 1}
    assert record.converged == pytest.approx(2 / 3)
    assert record.residual_max == pytest.approx(0.1 * 0.9**20)
    assert record.saddles is None


def test_saddles_are_counted():
    # Two keys: for beta above the critical one the middle between them is a saddle, where plain steps stay.
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    start = torch.tensor([[0.0, 0.3], [0.2, 0.1], [0.0, -0.2]], dtype=torch.float64)
    (record,) = compared(AnchoredEnergy(LogSumExp(keys, 3.0), start), start, [Picard()]).records
    assert record.saddles == 2
    shallow = AnchoredEnergy(LogSumExp(keys, 0.5), start)
    assert compared(shallow, start, [Picard()]).records[0].saddles == 0


def test_what_a_solver_refuses_is_said_and_the_others_go_on():
    comparison = compared(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(3, 1))
    refused = {record.name: record.refused for record in comparison.records if record.refused}
    assert list(refused) == ["GradientDescent"]
    assert "must have an energy" in refused["GradientDescent"]
    assert "refused: `problem` must have an energy" in str(comparison)
    assert "GradientDescent" not in [line.get_label() for line in comparison.plot().axes[0].lines]


def test_failures_are_records_and_no_errors():
    diverging = FixedPointMap(lambda z: 3 * z + 1, event_ndim=1)
    comparison = compared(diverging, torch.ones(2, 1), {"plain": Picard(max_steps=2000), "newton": NewtonKrylov()})
    plain, newton = comparison.records
    assert plain.status == {"DIVERGED": 2}
    assert (plain.converged, newton.converged) == (0.0, 1.0)


def test_names_are_kinds_or_options_or_those_given():
    problem = energy()
    two = [Picard(), Anderson(history=2), Anderson(history=3)]
    names = [record.name for record in compared(problem, problem.field, two).records]
    assert names[0] == "Picard"
    assert "history=2" in names[1]
    assert "history=3" in names[2]
    given = compared(problem, problem.field, {"a": two[1], "b": two[2]}).records
    assert [(record.name, record.solver) for record in given] == [("a", two[1]), ("b", two[2])]


def test_the_table_reads_the_same_with_and_without_rich(monkeypatch):
    from rich.console import Console

    problem = energy()
    comparison = compared(problem, problem.field)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(comparison)
        words = console.export_text().split()
    for line in str(comparison).splitlines()[1:]:
        assert line.split() == [word for word in line.split() if word in words]
    true = builtins.__import__

    def without(name, *given, **named):
        if name.startswith("rich"):
            raise ImportError(name)
        return true(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert comparison.table() == str(comparison)


@pytest.mark.slow
def test_the_picture_has_a_curve_for_each_solver():
    problem = energy()
    figure = compared(problem, problem.field).plot(title="mine")
    assert [name for axes in figure.axes if (name := axes.get_title(loc="left"))] == NAMES
    assert figure.get_suptitle() == "mine"
    with pytest.raises(TypeError, match="call solve"):
        compared(problem, problem.field, trace=False).plot()


def test_no_graph_is_kept_and_nothing_is_written():
    problem = AnchoredEnergy(LogSumExp(random(7, 5).requires_grad_(), 1.5), random(3, 5, seed=1), 0.2)
    for record in compared(problem, problem.field).records:
        assert not record.solution.value.requires_grad


def test_empty_batches_have_no_numbers():
    problem = AnchoredEnergy(LogSumExp(random(7, 5), 1.5), random(0, 5), 0.2)
    (record,) = compared(problem, problem.field, [Picard()]).records
    assert (record.evaluations_max, record.residual_max, record.converged, record.status) == (None, None, None, {})
    assert isinstance(str(SolverComparison((record,))), str)
