"""`hopfield_adjoint` against dense solves, and its gradients against autograd through the map written out."""

import pytest
import torch
from hopfield_cases import (
    CASES,
    IMPLEMENTATIONS,
    dense_adjoint,
    gradients,
    hessians,
    make,
    solved_by_the_loop,
)

from implicit_attention import AnchoredEnergy, LogSumExp, Status, solve
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve
from implicit_attention.testing.numerics import random, relative_error

# Operations that have a solution: without a query there is none.
SOLVABLE = [name for name in CASES if name != "no query"]


def solved(case, dtype=torch.float64):
    """(query, keys, state, cotangent, options) at a solution, which is a minimum."""
    query, keys, options = make(case, dtype)
    state = solved_by_the_loop(query, keys, **options, rtol=0.0, atol=1e-11, max_steps=2000).state
    return query, keys, state, random(*query.shape, seed=7, dtype=dtype), options


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", SOLVABLE)
def test_it_is_the_dense_solve_of_the_derivative(case, impl):
    query, keys, state, cotangent, options = solved(case)
    found = hopfield_adjoint(query, keys, state, cotangent, **options, rtol=1e-12, impl=impl)
    hessian = hessians(query, keys, state, options)
    u = torch.linalg.solve(hessian, cotangent)
    assert (found.status == Status.CONVERGED).all()
    assert not found.negative_curvature.any()
    assert relative_error(found.value, u) < 1e-8
    by_keys, by_beta = gradients(query, keys, state, found.value, options)
    assert found.by_keys.shape == (1,) * (query.ndim - keys.ndim) + keys.shape
    assert relative_error(found.by_keys.reshape(keys.shape), by_keys) < 1e-10
    torch.testing.assert_close(found.by_beta, by_beta, rtol=1e-6, atol=1e-7)
    size = cotangent.norm(dim=-1)
    torch.testing.assert_close(found.tolerance, 1e-12 * size)
    residual = (cotangent - (hessian @ found.value[..., None]).squeeze(-1)).norm(dim=-1)
    torch.testing.assert_close(found.residual, residual, rtol=0.5, atol=1e-12)


@IMPLEMENTATIONS
def test_no_query_carries_no_gradient(impl):
    query, keys, options = make("no query")
    found = hopfield_adjoint(query, keys, query, query, **options, impl=impl)
    assert found.value.shape == query.shape
    assert torch.equal(found.by_keys, torch.zeros_like(keys))


@IMPLEMENTATIONS
@pytest.mark.parametrize("rtol", [1e-2, 1e-5, 1e-9])
def test_the_tolerance_is_met_and_not_much_more(rtol, impl):
    query, keys, state, cotangent, options = solved("key padding")
    found = hopfield_adjoint(query, keys, state, cotangent, **options, rtol=rtol, impl=impl)
    loose = hopfield_adjoint(query, keys, state, cotangent, **options, rtol=100 * rtol, impl=impl)
    assert (found.status == Status.CONVERGED).all()
    assert (found.residual <= 10 * found.tolerance).all()
    assert (loose.num_steps <= found.num_steps).all()
    assert (loose.num_steps < found.num_steps).any()
    # In exact arithmetic conjugate gradients end after as many steps as there are dimensions.
    assert found.num_steps.max() <= query.shape[-1] + 2


# Systems without a solution.


def saddle():
    """Two keys and a query between them: at 0 the energy curves down along their difference if beta |k|^2 > 1."""
    keys = torch.zeros(70, 6, dtype=torch.float64)
    keys[:35, 0], keys[35:, 0] = 2.0, -2.0
    query = random(4, 6)
    state = query.clone()
    state[2] = 0.0
    return query, keys, state, {"beta": 1.0, "anchor": 0.0}


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_saddle_is_answered_and_told(dtype, impl):
    query, keys, state, options = (t if isinstance(t, dict) else t.to(dtype) for t in saddle())
    state[:2, 0], state[3, 0] = 2.0, -2.0
    cotangent = random(4, 6, seed=3, dtype=dtype)
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    found = hopfield_adjoint(query, keys, state, cotangent, **options, rtol=rtol, impl=impl)
    assert found.negative_curvature.tolist() == [False, False, True, False]
    assert found.status.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.UNSTABLE, Status.CONVERGED]
    wide = [t.double() for t in (query, keys, state)]
    hessian = hessians(*wide, options)
    assert torch.linalg.eigvalsh(hessian[2])[0] < -1
    u = torch.linalg.solve(hessian, cotangent.double())
    by_keys, by_beta = gradients(*wide, u, options)
    assert relative_error(found.value.double(), u) < 20 * rtol
    assert relative_error(found.by_keys.double(), by_keys) < 20 * rtol
    # In float32 three of the four are differences of nearly equal numbers.
    torch.testing.assert_close(found.by_beta[2].double(), by_beta[2], rtol=20 * rtol, atol=1e-6)
    rows = [0, 1, 3]
    rest = hopfield_adjoint(query[rows], keys, state[rows], cotangent[rows], **options, rtol=rtol, impl=impl)
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    for name in ("value", "residual", "num_steps"):
        torch.testing.assert_close(getattr(found, name)[rows], getattr(rest, name), rtol=bound, atol=bound)


MANY = {
    "all pairs": {},
    "a row of the mask per query": {"mask": random(600, 70, seed=4) > -1},
    "a row of the mask per sample": {"mask": random(3, 1, 70, seed=4) > -1},
    "added to the scores": {"mask": random(3, 600, 70, seed=4)},
    "causal": {"is_causal": True},
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("pairs", MANY.values(), ids=MANY)
def test_saddles_among_many_rows_of_several_sets_are_answered_where_they_are(pairs, impl):
    """More rows than a working set is made anew for, of sets with and without a saddle."""
    query, keys, _, options = saddle()
    options |= pairs
    keys = torch.stack([keys, keys.flip(-1), keys / 3])
    query, state = random(3, 600, 6), random(3, 600, 6)
    state[:, 99::100] = 0.0
    state[0, 7] = 0.0
    cotangent = random(3, 600, 6, seed=3)
    fast = hopfield_adjoint(query, keys, state, cotangent, **options, rtol=1e-10, impl=impl)
    slow = dense_adjoint(query, keys, state, cotangent, **options)
    # Not at a solution, so that any of the rows may curve down.
    assert torch.equal(fast.status, slow.status)
    assert (fast.status[:2, 99::100] == Status.UNSTABLE).all()
    assert (fast.status[2] == Status.CONVERGED).all()
    for name in ("value", "by_keys", "by_beta"):
        assert relative_error(getattr(fast, name), getattr(slow, name)) < 1e-7


@IMPLEMENTATIONS
@pytest.mark.parametrize("sets", [3, 1], ids=["some sets", "shared keys"])
def test_saddles_count_in_the_gradient_of_a_bias_of_every_key(sets, impl):
    keys = saddle()[1]
    keys = torch.stack([keys, keys / 3, keys.flip(-1)])[:sets]
    state, cotangent = random(3, 90, 6), random(3, 90, 6, seed=3)
    state[0, 5], state[2, 70] = 0.0, 0.0
    # Where the field is what is lacking to the mean, the state is the solution.
    half = state - 0.5 * (state @ keys.mT).softmax(-1) @ keys
    bias = state.new_zeros(3, 1, 70).requires_grad_()
    energy = AnchoredEnergy(LogSumExp(keys, 1.0, bias=bias), 2 * half, 0.5)
    solution = solve(energy, state, impl=impl)
    hessian = hessians(2 * half, keys.expand(3, -1, -1), state, {"beta": 1.0, "anchor": 0.5})
    u = torch.linalg.solve(hessian, cotangent)
    (found,) = torch.autograd.grad(solution.value, bias, cotangent)
    mapped = (state @ keys.mT + bias).softmax(-1) @ keys
    (expected,) = torch.autograd.grad((0.5 * mapped * u).sum(), bias)
    assert relative_error(found, expected) < 1e-8


@IMPLEMENTATIONS
def test_a_singular_system_is_told_and_not_forgiven(impl):
    """Curvature exactly 0 along a cotangent: no answer, so a failing status and nothing that looks like a gradient."""
    keys = torch.zeros(70, 6, dtype=torch.float64)
    keys[:35, 0], keys[35:, 0] = 1.0, -1.0
    state, cotangent = torch.zeros(2, 6).double(), torch.eye(6).double()[:2]
    found = hopfield_adjoint(state, keys, state, cotangent, beta=1.0, anchor=0.0, impl=impl)
    assert found.status.tolist() == [Status.STALLED, Status.CONVERGED]
    assert found.residual[0] > 0.9
    torch.testing.assert_close(found.value[1], cotangent[1])


@IMPLEMENTATIONS
@pytest.mark.parametrize("where", ["state", "cotangent"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_no_other_row(poison, where, impl):
    query, keys, state, cotangent, options = solved("plain")
    clean = hopfield_adjoint(query, keys, state, cotangent, **options, impl=impl)
    (state if where == "state" else cotangent)[0, 1, 4, 2] = poison
    found = hopfield_adjoint(query, keys, state, cotangent, **options, impl=impl)
    others = torch.ones(query.shape[:-1], dtype=torch.bool)
    others[0, 1, 4] = False
    assert found.status[0, 1, 4] == Status.NONFINITE
    assert found.value[0, 1, 4].isnan().all()
    assert found.by_keys[0, 1].isnan().any()
    assert (found.status[others] == Status.CONVERGED).all()
    torch.testing.assert_close(found.value[others], clean.value[others], rtol=1e-8, atol=1e-9)
    heads = torch.tensor([[True, False, True], [True, True, True]])
    torch.testing.assert_close(found.by_keys[heads], clean.by_keys[heads], rtol=1e-8, atol=1e-9)


@IMPLEMENTATIONS
def test_a_row_that_is_not_finite_and_has_no_cotangent_carries_nothing(impl):
    query, keys, state, cotangent, options = solved("plain")
    cotangent[0, 1, 4] = 0.0
    clean = hopfield_adjoint(query, keys, state, cotangent, **options, impl=impl)
    state[0, 1, 4, 2] = torch.nan
    found = hopfield_adjoint(query, keys, state, cotangent, **options, impl=impl)
    assert (found.status == Status.CONVERGED).all()
    assert (found.value[0, 1, 4] == 0).all()
    for one, other in zip(found, clean, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@IMPLEMENTATIONS
def test_what_takes_more_steps_than_allowed_is_told(impl):
    """With one step nothing is solved; a query that needs no step is."""
    query, keys, state, cotangent, options = solved("plain")
    cotangent[1, 2, 3] = 0.0
    found = hopfield_adjoint(query, keys, state, cotangent, **options, rtol=1e-10, max_steps=1, impl=impl)
    exhausted = found.status == Status.MAX_STEPS
    assert exhausted.sum() == exhausted.numel() - 1
    assert found.status[1, 2, 3] == Status.CONVERGED
    assert (found.num_steps[exhausted] == 1).all()
    assert found.num_steps[1, 2, 3] == 0
    assert (found.residual > found.tolerance)[exhausted].all()
    assert (found.value[exhausted].norm(dim=-1) > 0).all()


# Rows, order and precision.


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["plain", "causal", "grouped", "beta of each head"])
def test_low_precision(case, dtype, impl):
    query, keys, options = make(case, dtype)
    wide = {k: t.double() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    state = hopfield_solve(query.double(), keys.double(), **wide, rtol=1e-8).state.float()
    cotangent = random(*query.shape, seed=7, dtype=torch.float32)
    truth = dense_adjoint(query, keys, state, cotangent, **options)
    slow = dense_adjoint(query, keys, state, cotangent, dtype=torch.float32, **options)
    fast = hopfield_adjoint(query, keys, state, cotangent, **options, rtol=1e-6, impl=impl)
    assert (fast.status == Status.CONVERGED).all()
    for name in ("value", "by_keys", "by_beta"):
        error, allowed = (relative_error(getattr(t, name), getattr(truth, name)) for t in (fast, slow))
        assert getattr(fast, name).dtype == torch.float32
        # The tolerance comes on top of rounding, magnified by the condition.
        assert error <= 2 * allowed + 1e-5


# Scale.


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_scale_of_the_cotangent_changes_not_one_bit(dtype, impl):
    query, keys, state, cotangent, options = solved("key padding", dtype=torch.float64)
    query, keys, state, cotangent = (t.to(dtype) for t in (query, keys, state, cotangent))
    # Each row with a size of its own.
    cotangent = torch.ldexp(cotangent, torch.arange(-4, 5)[:, None])
    whole = hopfield_adjoint(query, keys, state, cotangent, **options, impl=impl)
    for exponent in (120, 70, -70, -90) if dtype == torch.float32 else (1000, 520, -540, -900):
        scaled = hopfield_adjoint(query, keys, state, cotangent * 2.0**exponent, **options, impl=impl)
        assert torch.equal(scaled.status, whole.status)
        assert torch.equal(scaled.num_steps, whole.num_steps)
        for name in ("value", "residual", "tolerance", "by_beta", "by_keys"):
            assert torch.equal(getattr(scaled, name), getattr(whole, name) * 2.0**exponent), (name, exponent)


# Keys that have much in common.


@IMPLEMENTATIONS
@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
def test_what_keys_have_in_common_costs_no_digits(offset, impl):
    """Cov does not change when the keys are shifted, nor do the weights; in float32 it did, by the shift squared."""
    keys = (random(70, 6, seed=1, dtype=torch.float32) + offset).float()
    query = random(9, 6, dtype=torch.float32)
    state = keys[:9] + 0.1 * query
    cotangent = random(9, 6, seed=7, dtype=torch.float32)
    options = {"beta": 0.2, "anchor": 0.4}
    found = hopfield_adjoint(query, keys, state, cotangent, **options, impl=impl)
    truth = dense_adjoint(query, keys, state, cotangent, **options)
    assert (found.status == Status.CONVERGED).all()
    assert not found.negative_curvature.any()
    assert relative_error(found.value.double(), truth.value) < 1e-3


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "case", ["key padding", "mask of pairs", "mask of everything", "causal and padded", "added to pairs"]
)
def test_what_a_key_holds_that_nobody_attends_to_changes_not_one_bit(case, impl):
    query, keys, state, cotangent, options = solved(case)
    options["mask"] = options["mask"].clone()
    options["mask"][..., 5] = False if options["mask"].dtype == torch.bool else -torch.inf
    found = []
    for content in (0.0, 1e3, -1e30):
        keys[..., 5, :] = content
        answer = hopfield_adjoint(query, keys, state, cotangent, **options, impl=impl)
        assert (answer.by_keys[..., 5, :] == 0).all()
        found.append(answer)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
