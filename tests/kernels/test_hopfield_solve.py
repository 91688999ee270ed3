"""`hopfield_solve` against the loop of the solvers, against the map written out, and against itself."""

import pytest
import torch
from hopfield_cases import CASES, IMPLEMENTATIONS, make, pairs, solved_by_the_loop, without_kernels, written_out

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Picard, Status, solve
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.problems import hopfield_energy

SOLVERS = {
    "Anderson": Anderson(rtol=1e-6),
    "Picard": Picard(rtol=1e-6),
    "early acceleration": Anderson(plain_steps=2, rtol=1e-6),
    "fixed budget": Anderson(rtol=0.0, atol=0.0, max_steps=9),
    "fixed budget of plain steps": Picard(rtol=0.0, atol=0.0, max_steps=4),
    "few steps": Anderson(rtol=1e-6, max_steps=3),
    "no step": Anderson(max_steps=0),
}


def stop_of(solver):
    plain = solver.max_steps + 1 if isinstance(solver, Picard) else solver.plain_steps or 3
    return {"rtol": solver.rtol, "atol": solver.atol, "max_steps": solver.max_steps, "plain_steps": plain}


def by_the_loop(query, keys, options, solver):
    bias = pairs(query, keys, options.get("mask"), "is_causal" in options, options.get("query_offset", 0))
    energy = AnchoredEnergy(LogSumExp(keys, options["beta"], bias=bias), query, options["anchor"])
    return solve(energy, query, solver=solver, impl="reference", on_failure="ignore")


def check_same(found, expected):
    """The same course, and the same numbers up to rounding."""
    assert torch.equal(found.status, expected.status)
    assert torch.equal(found.num_evals, expected.num_evals)
    assert torch.equal(found.num_steps, expected.num_steps)
    state = expected.state if hasattr(expected, "state") else expected.value
    torch.testing.assert_close(found.state, state, rtol=1e-8, atol=1e-9)
    for name in ("residual", "tolerance"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-13)


@IMPLEMENTATIONS
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", CASES)
def test_the_course_is_that_of_the_solvers_loop(case, solver, impl):
    query, keys, options = make(case)
    found = hopfield_solve(query, keys, **options, **stop_of(SOLVERS[solver]), impl=impl)
    check_same(found, by_the_loop(query, keys, options, SOLVERS[solver]))


@pytest.mark.parametrize("case", CASES)
def test_where_no_kernel_answers_the_loop_does(case):
    query, keys, options = make(case)
    expected = hopfield_solve(query, keys, **options, rtol=1e-6, impl="reference")
    vector = random(*query.shape, seed=3)
    found = []
    with without_kernels():
        check_same(hopfield_solve(query, keys, **options, rtol=1e-6), expected)
        for impl in ("auto", "reference"):
            found.append(hopfield_adjoint(query, keys, expected.state, vector, **options, impl=impl))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", CASES)
def test_what_is_returned_is_true_of_the_state(case, impl):
    query, keys, options = make(case)
    found = hopfield_solve(query, keys, **options, rtol=1e-6, atol=1e-9, impl=impl)
    mapped, mean, logsumexp = written_out(found.state, query, keys, **options)
    torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.logsumexp, logsumexp, rtol=1e-10, atol=1e-12)
    residual, size = (mapped - found.state).norm(dim=-1), mapped.norm(dim=-1)
    torch.testing.assert_close(found.residual, residual, rtol=1e-6, atol=1e-13)
    torch.testing.assert_close(found.tolerance, 1e-9 + 1e-6 * size, rtol=1e-9, atol=0.0)
    assert (residual <= 1e-9 + (1 + 1e-6) * 1e-6 * size).all()
    assert (found.status == Status.CONVERGED).all()
    assert torch.equal(found.num_evals, found.num_steps + 1)


def clustered(sharpness=2.0, anchor=0.0, dtype=torch.float64, **sizes):
    """(query, keys, options) over clustered keys, where some accelerated steps are rejected and some lead downhill."""
    energy = hopfield_energy(sharpness=sharpness, clustered=True, anchor=anchor, dtype=dtype, **sizes)
    return energy.field, energy.potential.keys, {"beta": energy.potential.beta, "anchor": anchor}


@IMPLEMENTATIONS
@pytest.mark.parametrize("sharpness", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("anchor", [0.0, 0.5])
@pytest.mark.parametrize(
    "budget", [{"rtol": 1e-6}, {"rtol": 0.0, "atol": 0.0, "max_steps": 7}], ids=["to the end", "fixed"]
)
def test_clustered_keys_where_steps_are_rejected(budget, anchor, sharpness, impl):
    query, keys, options = clustered(sharpness, anchor)
    solver = Anderson(**budget)
    expected = by_the_loop(query, keys, options, solver)
    check_same(hopfield_solve(query, keys, **options, **stop_of(solver), impl=impl), expected)


def test_clustered_keys_do_reject_steps_and_do_accelerate():
    """If this fails, the test above holds less than it says."""
    query, keys, options = clustered()
    courses = [
        by_the_loop(query, keys, options, solver).num_evals
        for solver in (Anderson(rtol=1e-6), Anderson(rtol=1e-6, guard="none"), Picard(rtol=1e-6))
    ]
    assert (courses[0] != courses[1]).sum() > 5
    assert (courses[0] < courses[2]).sum() > 5


# How a solve ends.


@IMPLEMENTATIONS
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("plain_steps", [2, 3, 100])
def test_a_fixed_budget_is_used_to_the_last_step(steps, plain_steps, impl):
    query, keys, options = make("key padding")
    found = hopfield_solve(
        query, keys, **options, rtol=0.0, atol=0.0, max_steps=steps, plain_steps=plain_steps, impl=impl
    )
    assert (found.status == (Status.BUDGET if steps else Status.EXPLICIT)).all()
    assert (found.num_steps == steps).all()
    assert (found.num_evals == steps + 1).all()
    if plain_steps == 100:
        z = query
        for _ in range(steps):
            z = written_out(z, query, keys, **options)[0]
        torch.testing.assert_close(found.state, z, rtol=1e-12, atol=1e-13)


@IMPLEMENTATIONS
def test_too_few_steps_are_told_of_the_queries_that_needed_more(impl):
    query, keys, options = make("beta of each head")
    enough = hopfield_solve(query, keys, **options, impl=impl)
    few = int(enough.num_steps.double().median())
    found = hopfield_solve(query, keys, **options, max_steps=few, impl=impl)
    exhausted = found.status == Status.MAX_STEPS
    assert 0 < exhausted.sum() < exhausted.numel()
    assert (found.residual > found.tolerance)[exhausted].all()
    assert (found.num_steps == few)[exhausted].all()
    early = enough.num_steps < few
    assert torch.equal(found.state[early], enough.state[early])


@IMPLEMENTATIONS
def test_a_start_of_its_own(impl):
    query, keys, options = make("plain")
    solved = hopfield_solve(query, keys, **options, rtol=1e-8, impl=impl)
    again = hopfield_solve(query, keys, **options, rtol=1e-6, initial=solved.state, impl=impl)
    assert (again.num_evals == 1).all()
    assert torch.equal(again.state, solved.state)


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", ["plain", "causal", "grouped", "one memory", "fewer keys than the kernels take"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "stop", [{"rtol": 1e-6}, {"rtol": 0.0, "atol": 0.0, "max_steps": 5}], ids=["to the end", "fixed"]
)
def test_a_query_that_is_not_finite_changes_no_other(stop, bad, case, impl):
    query, keys, options = make(case)
    spoiled = query.clone()
    spoiled[..., 4, 0] = bad
    clean, found = (hopfield_solve(x, keys, **options, **stop, impl=impl) for x in (query, spoiled))
    others = torch.arange(query.shape[-2]) != 4
    assert (found.status[..., 4] == Status.NONFINITE).all()
    assert found.state[..., 4, :].isnan().all()
    assert (found.num_evals[..., 4] == 1).all()
    for before, after in zip(clean, found, strict=True):
        rows = (..., others, slice(None)) if before.ndim == query.ndim else (..., others)
        assert torch.equal(before[rows], after[rows])


@IMPLEMENTATIONS
def test_what_leaves_the_finite_numbers_is_told_as_the_loop_does(impl):
    """From zero the map is finite, and so large that the scores at its value are not."""
    query, keys = torch.zeros(1, 6, dtype=torch.float64), torch.full((70, 6), 1e150, dtype=torch.float64)
    options = {"beta": 1e10, "anchor": 0.0}
    found = hopfield_solve(query, keys, **options, impl=impl)
    expected = by_the_loop(query, keys, options, Anderson())
    assert (expected.status == Status.DIVERGED).all()
    assert torch.equal(found.status, expected.status)
    assert found.state.isfinite().all()


@IMPLEMENTATIONS
def test_without_an_anchor_the_query_is_not_read(impl):
    query, keys, options = make("no anchor")
    clean = hopfield_solve(query, keys, **options, impl=impl)
    spoiled = hopfield_solve(torch.full_like(query, torch.nan), keys, **options, initial=query, impl=impl)
    assert torch.equal(clean.state, spoiled.state)
    assert (spoiled.status == Status.CONVERGED).all()
    # Nor the queries of a head without one.
    anchor = torch.tensor([0.0, 0.3, 0.0], dtype=query.dtype)
    half = hopfield_solve(query * torch.nan, keys, beta=0.8, anchor=anchor, initial=query, impl=impl)
    assert torch.equal(half.status[:, 1] == Status.NONFINITE, torch.ones_like(half.status[:, 1], dtype=torch.bool))
    assert (half.status[:, ::2] == Status.CONVERGED).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("count", [20, 70])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_query_that_attends_to_nothing_goes_to_its_share_of_the_field(boolean, count, impl):
    query, keys, _ = make("plain")
    keys = keys[..., :count, :]
    mask = torch.ones(9, count, dtype=torch.bool)
    mask[4] = False
    mask = mask if boolean else torch.zeros(9, count, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    found = hopfield_solve(query, keys, beta=0.8, anchor=0.25, mask=mask, impl=impl)
    assert (found.status == Status.CONVERGED).all()
    assert torch.equal(found.state[..., 4, :], 0.25 * query[..., 4, :])
    assert (found.mean[..., 4, :] == 0).all()
    assert (found.logsumexp[..., 4] == 0).all()


# Every query on its own.


PRECISIONS = pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float32, "auto"), (torch.float64, "auto")],
)


@PRECISIONS
@pytest.mark.parametrize("queries", [50, 300])
@pytest.mark.parametrize("anchor", [0.0, 0.5])
def test_a_query_alone_has_the_bits_it_has_among_others(anchor, queries, dtype, impl):
    """Clustered keys: some are done at once, and some take dozens of steps."""
    query, keys, options = clustered(anchor=anchor, dtype=dtype, queries=queries, keys=96, dim=12)
    whole = hopfield_solve(query, keys, **options, rtol=1e-5, impl=impl)
    slow = whole.num_evals > whole.num_evals.double().median()
    choices = [torch.arange(queries) < 1, torch.arange(queries) % 7 == 3, slow, ~slow]
    for rows in choices:
        alone = hopfield_solve(query[rows], keys, **options, rtol=1e-5, impl=impl)
        for one, other in zip(alone, whole, strict=True):
            assert torch.equal(one, other[rows])


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 2), (9, 2), (12, 4), (7, 8)], ids=str)
def test_a_query_alone_has_its_bits_over_the_smallest_keys(size, dtype, impl):
    """Matrices so small that torch multiplies them by itself, in an order that depends on how many rows there are."""
    for seed in range(4):
        query, keys = random(3, 130, size[1], seed=seed, dtype=dtype), random(3, *size, seed=seed + 9, dtype=dtype)
        whole = hopfield_solve(query, keys, beta=2.0, anchor=0.3, rtol=1e-6, impl=impl)
        for rows in (slice(0, 1), slice(1, 18), slice(0, None, 2)):
            alone = hopfield_solve(query[:, rows], keys, beta=2.0, anchor=0.3, rtol=1e-6, impl=impl)
            assert torch.equal(alone.state, whole.state[:, rows])


def test_sets_too_many_for_one_evaluation_are_solved_in_groups():
    query, keys = random(2, 2048, 1), random(2, 2100, 1, seed=1)
    options = {"beta": 0.5, "anchor": 0.5, "max_steps": 1}
    together = hopfield_solve(query, keys, **options).state
    assert torch.equal(together[1], hopfield_solve(query[1], keys[1], **options).state)


# Precision.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["plain", "fewer keys than the kernels take", "causal", "grouped", "added to pairs"])
def test_low_precision_is_as_exact_as_the_loop(case, dtype):
    query, keys, options = make(case, dtype)
    # Accelerated steps, and queries that are not settled in the end, would tell of chaos, not of rounding.
    options["anchor"] = 0.5
    budget = {"rtol": 0.0, "atol": 0.0, "max_steps": 60, "plain_steps": 61}
    in_single, in_double = (
        {k: t.to(wide) if k == "mask" and t.is_floating_point() else t for k, t in options.items()}
        for wide in (torch.float32, torch.float64)
    )
    truth = solved_by_the_loop(query.double(), keys.double(), **in_double, **budget)
    slow = solved_by_the_loop(query.float(), keys.float(), **in_single, **budget)
    for impl in ("auto", "reference"):
        fast = hopfield_solve(query, keys, **options, **budget, impl=impl)
        for name in ("state", "mean", "logsumexp"):
            error, allowed = (relative_error(getattr(t, name), getattr(truth, name)) for t in (fast, slow))
            assert getattr(fast, name).dtype == torch.float32
            assert error <= 3 * allowed + 4 * torch.finfo(torch.float32).eps
            assert error < 3e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_widened_at_the_door(dtype):
    query, keys, options = make("beta of each head", dtype)
    wide = {**options, "beta": options["beta"].float()}
    found, expected = hopfield_solve(query, keys, **options), hopfield_solve(query.float(), keys.float(), **wide)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_autocast_changes_nothing():
    query, keys, options = make("plain", torch.float32)
    expected = hopfield_solve(query, keys, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = hopfield_solve(query, keys, **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
