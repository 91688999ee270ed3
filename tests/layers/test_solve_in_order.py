"""Causal tokens one after the other: what all at once gives, bit for bit without the later ones."""

import math

import pytest
import torch

from implicit_attention import ConvergenceError, ConvergenceWarning, Implicit, Phantom, Status, Unrolled, solve
from implicit_attention.energies import CausalTokens
from implicit_attention.layers import solve_in_order
from implicit_attention.potentials import LayerNormPotential, LogSumExp, Polynomial, TokenAttention
from implicit_attention.solvers import Anderson, Picard
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

EXACT = Picard(rtol=1e-14, atol=1e-14, max_steps=1000)


def truth_tensor(formula, *shape):
    grid = [formula(*index) for index in torch.cartesian_prod(*map(torch.arange, shape)).tolist()]
    return torch.tensor(grid, dtype=torch.float64).reshape(shape)


def truth(**options):
    """The causal problem of the ground truth."""
    x = truth_tensor(lambda n, i: math.sin(1 + 4 * n + i), 3, 4)
    w_query = truth_tensor(lambda h, y, i: math.cos(1 + 7 * h + 3 * y + i) / 2, 2, 2, 4)
    w_key = truth_tensor(lambda h, y, i: math.sin(2 + 5 * h + 2 * y + i) / 2, 2, 2, 4)
    xi = truth_tensor(lambda m, i: math.cos(3 + 2 * m + 5 * i) / 2, 5, 4)
    norm = LayerNormPotential(1.3, torch.arange(4, dtype=torch.float64) / 10, 1e-5)
    attention = TokenAttention(w_query, w_key, torch.tensor([0.7, 1.1], dtype=torch.float64), **options)
    return CausalTokens(norm, attention, Polynomial(xi, 1.0), x)


def weights(dim=5, head_dim=3, dtype=torch.float64):
    """w_query, w_key, beta, xi, gamma and delta of D 5, H 2, Y 3, M 4."""
    w_query, w_key = (0.25 * random(2, head_dim, dim, seed=s) for s in (1, 2))
    beta, gamma = torch.tensor([0.6, 0.9]), torch.tensor(0.8)
    found = w_query, w_key, beta, 0.25 * random(4, dim, seed=3), gamma, 0.1 * random(dim, seed=4)
    return tuple(t.to(dtype) for t in found)


def made(tensors, field, keys=None, **options):
    w_query, w_key, beta, xi, gamma, delta = tensors
    attention = TokenAttention(w_query, w_key, beta, **options)
    return CausalTokens(LayerNormPotential(gamma, delta), attention, Polynomial(xi, 1.0), field, keys=keys)


def test_ground_truth():
    problem = truth()
    answer = solve_in_order(problem, solver=EXACT)
    expected = torch.tensor([1.7705759616, -1.0653887279, -2.9877300330, -1.9280988644], dtype=torch.float64)
    torch.testing.assert_close(answer.value[2], expected, rtol=0, atol=1e-10)
    at_once = solve(problem, problem.field, solver=EXACT).value
    torch.testing.assert_close(answer.value, at_once, rtol=0, atol=1e-12)
    assert answer.report.status.tolist() == [Status.CONVERGED] * 3
    assert answer.keys.shape == (2, 3, 2)


@pytest.mark.parametrize("earlier", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_in_order_is_at_once(exclude_self, masked, earlier):
    b, keys = random(2, 3, 6, 5, seed=5), 0.3 * random(2, 3, 2, earlier, 3, seed=7)
    mask = random(2, 3, 6, earlier + 6, seed=8) > 0.3 if masked else None
    problem = made(weights(), b, keys, mask=mask, exclude_self=exclude_self)
    at_once, answer = solve(problem, b, solver=EXACT), solve_in_order(problem, solver=EXACT)
    torch.testing.assert_close(answer.value, at_once.value, rtol=0, atol=1e-11)
    assert answer.report.status.shape == answer.report.num_evals.shape == (2, 3, 6)
    assert answer.keys.shape == (2, 3, 2, earlier + 6, 3)
    # The residual of every token is that of the map of all.
    residual = torch.linalg.vector_norm(problem.fixed_point_map(answer.value) - answer.value, dim=-1)
    torch.testing.assert_close(answer.report.residual, residual, rtol=0, atol=1e-13)


def test_tokens_that_follow_read_the_keys_of_the_answer():
    tensors, b = weights(), random(2, 6, 5, seed=5)
    whole = solve_in_order(made(tensors, b), solver=EXACT)
    first = solve_in_order(made(tensors, b[:, :2]), solver=EXACT)
    second = solve_in_order(made(tensors, b[:, 2:], first.keys), solver=EXACT)
    assert torch.equal(torch.cat([first.value, second.value], dim=1), whole.value)
    assert torch.equal(second.keys, whole.keys)


@pytest.mark.parametrize("solver", [Anderson(), Anderson(rtol=1e-2), Picard()], ids=["anderson", "loose", "picard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_later_token_changes_no_bit(dtype, solver):
    b = random(3, 7, 5, seed=5).to(dtype)
    one = solve_in_order(made(weights(dtype=dtype), b), solver=solver)
    for last in (100 * b[:, -1], b[:, -1] * math.nan, b[:, -1] * math.inf):
        changed = b.clone()
        changed[:, -1] = last
        two = solve_in_order(made(weights(dtype=dtype), changed), solver=solver, on_failure="ignore")
        assert torch.equal(one.value[:, :-1], two.value[:, :-1])
        assert torch.equal(one.keys[..., :-1, :], two.keys[..., :-1, :])
    # Nor does it matter whether there is one.
    shorter = solve_in_order(made(weights(dtype=dtype), b[:, :4].contiguous()), solver=solver)
    assert torch.equal(one.value[:, :4], shorter.value)


def test_a_nan_reaches_the_later_tokens_of_its_sample_alone():
    tensors = tuple(t.requires_grad_() for t in weights())
    b = random(3, 5, 5, seed=5)
    spoiled = b.clone()
    spoiled[1, 2, 0] = math.nan
    good, found = (solve_in_order(made(tensors, t), on_failure="ignore") for t in (b, spoiled))
    expected = torch.zeros(3, 5, dtype=torch.int8)
    expected[1, 2:] = Status.NONFINITE
    assert torch.equal(found.report.status, expected)
    sound = expected == 0
    assert torch.equal(found.value[sound], good.value[sound])
    # Nor does it reach the gradient of a loss of the others.
    by_found, by_good = (torch.autograd.grad(t.value[sound].square().sum(), tensors) for t in (found, good))
    torch.testing.assert_close(by_found, by_good, rtol=0, atol=1e-7)


@pytest.mark.parametrize("exclude_self", [False, True])
def test_gradients_are_those_of_all_at_once(exclude_self):
    tensors, w = weights(), random(2, 4, 5, seed=11)
    inputs = [t.clone().requires_grad_() for t in (random(2, 4, 5, seed=5), random(2, 2, 2, 3, seed=7), *tensors)]
    problem = made(inputs[2:], inputs[0], inputs[1], exclude_self=exclude_self)
    answer = solve_in_order(problem, solver=EXACT, adjoint=Implicit())
    at_once = solve(problem, problem.field, solver=EXACT)
    by_order, by_all = (torch.autograd.grad((x * w).sum(), inputs) for x in (answer.value, at_once.value))
    torch.testing.assert_close(by_order, by_all, rtol=0, atol=1e-8)
    # Every token tells how its backward solve went.
    assert [bool(report.status.eq(Status.CONVERGED).all()) for report in answer.adjoints] == [True] * 4


@pytest.mark.slow
def test_gradcheck_through_the_chain():
    tensors, b = weights(dim=3, head_dim=2), random(2, 3, seed=5)

    def solved(b, *tensors):
        return solve_in_order(made(tensors, b), solver=Anderson(rtol=1e-12, atol=1e-12)).value

    inputs = tuple(t.clone().requires_grad_() for t in (b, *tensors))
    assert torch.autograd.gradcheck(solved, inputs, atol=1e-7)
    assert torch.autograd.gradgradcheck(solved, inputs, atol=1e-6, fast_mode=True)


def test_other_adjoints_reach_the_solver():
    tensors, b = weights(), random(2, 3, 5, seed=5).requires_grad_()
    steps = Picard(max_steps=100, rtol=0, atol=0)
    found = [
        torch.autograd.grad(solve_in_order(made(tensors, b), solver=s, adjoint=a).value.sum(), b)[0]
        for s, a in ((EXACT, Implicit()), (steps, Unrolled()), (EXACT, Phantom(60)))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-9)


def test_memories_that_differ_from_token_to_token():
    w_query, w_key, beta, xi, *_ = weights()
    b = random(2, 4, 5, seed=5)
    memory = LogSumExp(xi, 0.9, mask=random(2, 4, 4, seed=8) > 0)
    problem = CausalTokens(LayerNormPotential(), TokenAttention(w_query, w_key, beta), memory, b)
    at_once = solve(problem, b, solver=EXACT).value
    torch.testing.assert_close(solve_in_order(problem, solver=EXACT).value, at_once, rtol=0, atol=1e-12)
    without = CausalTokens(LayerNormPotential(), TokenAttention(w_query, w_key, beta), None, b)
    at_once = solve(without, b, solver=EXACT).value
    torch.testing.assert_close(solve_in_order(without, solver=EXACT).value, at_once, rtol=0, atol=1e-12)


def test_padding_is_as_if_the_tokens_were_not_there():
    b = random(2, 6, 5, seed=5)
    exist = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    padded = made(weights(), b.masked_fill(~exist[..., None], 0.0), mask=exist[:, None, :])
    alone = solve_in_order(made(weights(), b[1, :4]), solver=EXACT).value
    torch.testing.assert_close(solve_in_order(padded, solver=EXACT).value[1, :4], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_single(dtype):
    b = random(2, 4, 5, seed=5).to(dtype)
    narrow = tuple(t.to(dtype) for t in weights())
    found = solve_in_order(made(narrow, b), solver=Anderson(rtol=1e-6))
    wide = solve_in_order(made([t.double() for t in narrow], b.double()), solver=EXACT)
    assert found.value.dtype == found.keys.dtype == torch.float32
    torch.testing.assert_close(found.value.double(), wide.value, rtol=0, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = solve_in_order(made(narrow, b), solver=Anderson(rtol=1e-6))
    assert torch.equal(again.value, found.value)
    assert torch.equal(again.keys, found.keys)


def test_layouts_and_starts():
    b = random(2, 4, 5, seed=5)
    expected = solve_in_order(made(weights(), b), solver=EXACT).value
    columns = b.mT.contiguous().mT
    torch.testing.assert_close(
        solve_in_order(made(weights(), columns), solver=EXACT).value, expected, rtol=0, atol=1e-12
    )
    many = b[0].expand(3, 4, 5)
    found = solve_in_order(made(weights(), many), solver=EXACT).value
    torch.testing.assert_close(found, expected[0].expand(3, 4, 5), rtol=0, atol=1e-12)
    found = solve_in_order(made(weights(), b), expected, solver=EXACT)
    assert int(found.report.num_evals.max()) < 4
    torch.testing.assert_close(found.value, expected, rtol=0, atol=1e-12)


def test_failures_name_the_token():
    b = random(2, 3, 5, seed=5)
    short = Picard(rtol=1e-12, max_steps=2)
    with pytest.raises(ConvergenceError, match="token 0: Picard failed for 2 of 2 problems"):
        solve_in_order(made(weights(), b), solver=short)
    b[1, 2, 0] = math.nan
    with pytest.raises(ConvergenceError, match=r"token 2: .* failed for 1 of 2 problems, first at 1"):
        solve_in_order(made(weights(), b))
    with pytest.warns(ConvergenceWarning):
        found = solve_in_order(made(weights(), b), solver=short, on_failure="warn")
    assert found.report.status[0].tolist() == [Status.MAX_STEPS] * 3


def test_bad_input():
    class Whole(LogSumExp):
        def select(self, index):
            return None

    plain = truth()
    problem = CausalTokens(plain.lagrangian, plain.attention, Whole(plain.memory.keys, 1.0), plain.field)
    with pytest.raises(ValueError, match="`memory` must tell what it is for one token alone, got Whole"):
        solve_in_order(problem)
