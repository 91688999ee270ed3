"""What a solution says of itself: hints that fit the problem, sentences without an index, names of statuses."""

import re
import warnings

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    EnergyFunction,
    Equilibrium,
    FixedPointMap,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    Picard,
    Potential,
    SquaredScores,
    Status,
    compare_solvers,
    equilibrium_attention,
    solve,
)
from implicit_attention.energies import Energy
from implicit_attention.integrations.transformers import report
from implicit_attention.solution import Record
from implicit_attention.spins import SpinSystem, thermodynamics

BOUND = "check that E has a lower bound, and no kink (as |z| has) where it is lowest"


def failed(problem, initial, solver=None, **options):
    return solve(problem, initial, solver=solver, on_failure="ignore", **options)


class Quartic(Potential):
    def value(self, z):
        return z.pow(4).sum(-1)


class Bottomless(Energy):
    event_ndim = 1

    def energy(self, z):
        return -z.pow(4).sum(-1)


def test_hints_name_only_what_the_problem_has():
    start = torch.full((1, 2), 0.5, dtype=torch.float64)
    steep = failed(EnergyFunction(lambda z: 50 * (z - 1).square().sum(-1), event_ndim=1), start, Picard())
    assert int(steep.status) == Status.DIVERGED
    assert "scale E down" in steep.message(0)
    swinging = failed(FixedPointMap(lambda z: 1 - z, event_ndim=1), start - 0.25, Picard(max_steps=3))
    assert int(swinging.status) == Status.MAX_STEPS
    assert swinging.message(0).endswith("make f contract more")
    no_beta = failed(AnchoredEnergy(Quartic(), 3 * start, 0.5), 3 * start, Picard())
    assert "make f contract more (raise the anchor)" in no_beta.message(0)
    for solution in (steep, swinging, no_beta):
        assert solution.failed.all()
        assert "beta" not in solution.message(0)
    for solution in (steep, swinging):
        assert "anchor" not in solution.message(0)


def test_hints_of_attention_name_beta_and_the_anchor_on_every_path():
    keys, field = 3 * torch.eye(4), 3 * torch.eye(4)[None]
    lever = "(lower beta or raise the anchor)"
    energy = AnchoredEnergy(0.5 * LogSumExp(keys, 1.0) + LogSumExp(keys, 1.0), field, 0.5)
    assert lever in failed(energy, field, Picard(max_steps=1, rtol=1e-12)).message(0, 0)
    for impl in ("auto", "reference"):
        energy = AnchoredEnergy(LogSumExp(keys, 1.0), field, 0.5)
        assert lever in failed(energy, field, Picard(max_steps=1, rtol=1e-12), impl=impl).message(0, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        equilibrium_attention(field, field, field, max_steps=1, on_failure="warn", solver=Picard(rtol=1e-12))
    assert lever in str(caught[0].message)


@pytest.mark.parametrize("make", [Bottomless, lambda: EnergyFunction(Bottomless().energy, event_ndim=1)])
def test_an_energy_without_a_lower_bound_is_asked_about_first(make):
    start = torch.full((1, 2), 0.5, dtype=torch.float64)
    solution = failed(make(), start)
    assert int(solution.status) == Status.STALLED
    assert solution.message(0).partition("; ")[2].startswith(f"{BOUND}; if so, use a larger rtol")


def test_energies_with_a_known_bound_are_not_doubted():
    field = torch.full((1, 1, 2), 0.5, dtype=torch.float64)
    told = AnchoredEnergy(LogSumExp(field[0], 1.0), field, 0.5).advice(Picard().remedies)
    assert BOUND not in " ".join(told.values())
    assert BOUND in AnchoredEnergy(Quartic(), field, 0.5).advice(Picard().remedies)[Status.STALLED]
    falling = AnchoredEnergy(SquaredScores(10 * field[0], 1.0), field, 0.0, unbounded="ignore")
    assert BOUND not in falling.advice(Picard().remedies)[Status.DIVERGED]


# Wrong arguments: what is required, what was received, and the remedy, in no words of torch's alone.


def _energy():
    return AnchoredEnergy(LogSumExp(torch.eye(4), 0.5), torch.ones(2, 3, 4), 0.5)


def _map(initial):
    return solve(FixedPointMap(lambda z, x: 0.5 * z + x, torch.ones(2, 3, 4), event_ndim=1), initial)


NAMED = "pass {0}(), after `from implicit_attention.{1} import {0}`"
WRONG = {
    "a start of another shape": (
        lambda: solve(_energy(), torch.ones(19, 4)),
        "`initial` must have the field's shape (2, 3, 4), got (19, 4)",
    ),
    "a start that a map does not take": (
        lambda: _map(torch.ones(19, 4)),
        "`initial` must have a shape that `<lambda>` takes, got states of shape (19, 4), for which it raised: ",
    ),
    "and its remedy": (
        lambda: _map(torch.ones(19, 4)),
        "; start from a tensor of the shape that it returns, of which the last 1 axes form one problem",
    ),
    "a solver's name": (
        lambda: solve(_energy(), torch.ones(2, 3, 4), solver="anderson"),
        NAMED.format("Anderson", "solvers"),
    ),
    "a solver's name in a layer": (
        lambda: ImplicitAttention(8, 2, solver="Newton-Krylov"),
        NAMED.format("NewtonKrylov", "solvers"),
    ),
    "an adjoint's name": (
        lambda: solve(_energy(), torch.ones(2, 3, 4), adjoint="one_step"),
        NAMED.format("OneStep", "adjoints"),
    ),
    "a method's name": (
        lambda: thermodynamics(SpinSystem(torch.zeros(3, 3), torch.ones(3, 2), beta=1.0), "tap"),
        NAMED.format("TAP", "spins"),
    ),
    "a linear solver's name": (lambda: Implicit("cg"), NAMED.format("CG", "linear")),
    "a name of nothing": (
        lambda: solve(_energy(), torch.ones(2, 3, 4), solver="best"),
        "`solver` must be an instance of Solver, got 'best'; for example Anderson()",
    ),
    "solvers to compare": (
        lambda: compare_solvers(_energy(), torch.ones(2, 3, 4), ["picard"]),
        NAMED.format("Picard", "solvers"),
    ),
    "no event_ndim of an energy": (
        lambda: EnergyFunction(lambda z: z.square().sum(-1)),
        "`event_ndim` must say how many trailing axes of z form one problem, got nothing in EnergyFunction(...)",
    ),
    "no event_ndim of a map": (lambda: FixedPointMap(torch.cos), "got nothing in FixedPointMap(...); 1: every row"),
    "a state of another width": (
        lambda: LogSumExp(torch.eye(4), 0.5).mean(torch.ones(3, 7)),
        "`z` must have the keys' dimension 4 on its last axis, got shape (3, 7)",
    ),
    "tokens of another dtype": (
        lambda: ImplicitAttention(8, 2)(torch.ones(2, 8, dtype=torch.float64)),
        "`x` must have the dtype of the layer (torch.float32), got torch.float64; convert one by .to(dtype)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_told_in_words(case):
    call, words = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call()


def test_what_a_map_raises_itself_is_left_as_it_is():
    def out_of_luck(z):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match=r"^out of luck$"):
        solve(FixedPointMap(out_of_luck, event_ndim=1), torch.ones(2, 3))


def test_an_energy_with_a_kink_is_asked_about_it():
    start = torch.full((1, 2), 0.5, dtype=torch.float64)
    kinked = failed(EnergyFunction(lambda z: (z - 0.1).abs().sum(-1), event_ndim=1), start)
    assert "no kink (as |z| has) where it is lowest" in kinked.message(0)


# Sentences and names.


@pytest.fixture
def mixed():
    """Six problems in (2, 3): one that converges at once, four that swing with growing width, one with a NaN."""
    start = torch.tensor([[0.5, 0.6, 0.7], [0.8, torch.nan, 0.9]], dtype=torch.float64)[..., None]
    return failed(FixedPointMap(lambda z: 1 - z, event_ndim=1), start, Picard(max_steps=3))


def test_a_message_without_an_index_is_of_the_worst_problem(mixed):
    assert mixed.message() == f"the worst of 6 problems, (1, 1): {mixed.message(1, 1)}"
    assert mixed.message(0) == f"the worst of 3 problems, (0, 2): {mixed.message(0, 2)}"
    assert mixed.report.message() == mixed.message()
    assert "NaN" in mixed.message()


def test_the_worst_problem_is_that_of_the_worst_status():
    status = torch.tensor([Status.MAX_STEPS, Status.STALLED, Status.CONVERGED, Status.STALLED], dtype=torch.int8)
    residual, count = torch.tensor([9.0, 2.0, 0.5, 3.0]), torch.zeros(4, dtype=torch.int32)
    assert Record(status, residual, torch.ones(4), count, count).worst(()) == (3,)


def test_a_message_of_one_or_no_problem_counts_none():
    problem = FixedPointMap(torch.cos, event_ndim=1)
    assert solve(problem, torch.zeros(1)).message().startswith("converged")
    assert solve(problem, torch.zeros(1, 1)).message().startswith("converged")
    assert solve(problem, torch.zeros(0, 1)).message() == "no problems"


def test_statuses_are_names(mixed):
    slow = "MAX_STEPS"
    assert mixed.statuses == [["CONVERGED", slow, slow], [slow, "NONFINITE", slow]]
    assert mixed.report.statuses == mixed.statuses
    assert solve(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(1)).statuses == "CONVERGED"


def test_a_solution_inside_vmap_can_be_shown():
    shown = []

    def solved(start):
        solution = failed(FixedPointMap(torch.cos, event_ndim=1), start)
        shown.append(repr(solution))
        with pytest.raises(ValueError, match=r"outside of torch\.vmap"):
            solution.message()
        return solution.value

    torch.vmap(solved)(torch.zeros(2, 3, 1))
    assert shown == ["Solution(problems (3,), which the host cannot see)"]


class Halves(torch.nn.Module):
    def forward(self, z, x):
        return z / 2 + x


def test_a_report_of_many_layers_prints_few_lines(capsys):
    blocks, x = torch.nn.ModuleList(Equilibrium(Halves(), on_failure="ignore") for _ in range(48)), torch.ones(1, 2)
    for bad, shown in ((set(), 12), ({20}, 13), (set(range(48)), 24)):
        for i, block in enumerate(blocks):
            block(x, solver=Picard(max_steps=1 if i in bad else 100))
        found = report(blocks)
        names, _, told = capsys.readouterr().out.partition("and ")
        names = [line.split()[0] for line in names.splitlines()[-shown:]]
        assert set(names) >= set(map(str, sorted(bad)[:24]))
        assert names[0] == "0"
        assert told.startswith(f"{48 - shown} layers more")
        assert told.count("MAX_STEPS") == len(bad)
        assert len(found) == 48
        assert repr(found) == "LayerReports(48 layers)"
