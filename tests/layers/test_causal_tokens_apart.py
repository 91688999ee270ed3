"""Causal spin layers: no bit of a token, of its gradient or of its report depends on what stands behind it."""

import functools
import math

import pytest
import torch

from implicit_attention import ConvergenceError, ConvergenceWarning, Implicit, Status, Unrolled, solve
from implicit_attention.layers import MeanFieldAttention, SpinAttention
from implicit_attention.solvers import Anderson, Picard
from implicit_attention.spins import GaussianClosure, KineticPlefka
from implicit_attention.testing.numerics import random

N, CUT, WIDTH = 12, 7, 16
LAYERS = {
    "spin": (SpinAttention, {}),
    "spin, strong": (SpinAttention, {"beta": 4.0}),
    "spin, order 2": (SpinAttention, {"method": KineticPlefka(order=2)}),
    "spin, closure": (SpinAttention, {"method": GaussianClosure()}),
    "spin, Ising": (SpinAttention, {"head_dim": 1, "beta": 2.0}),
    "spin, free": (SpinAttention, {"couplings": "free", "sites": N}),
    "spin, a function": (SpinAttention, {"couplings": lambda h: torch.tanh(h @ h.mT) / 8}),
    "spin, steps": (SpinAttention, {"steps": 4}),
    "spin, Picard": (SpinAttention, {"solver": Picard(damping=0.3)}),
    "mean field": (MeanFieldAttention, {}),
    "mean field, learned": (MeanFieldAttention, {"correction": "learned"}),
    "mean field, free": (MeanFieldAttention, {"mixing": "free", "sites": N}),
    "mean field, blocks": (MeanFieldAttention, {"mixing": "blocks", "sites": N}),
    "mean field, steps": (MeanFieldAttention, {"steps": 4}),
}
BEHIND = {
    "others": lambda x: 3 * torch.randn_like(x),
    "large": lambda x: 1e30 * torch.randn_like(x),
    "nan": lambda x: torch.full_like(x, math.nan),
    "inf": lambda x: torch.full_like(x, math.inf),
}


def made(kind, **options):
    torch.manual_seed(0)
    cls, given = LAYERS[kind]
    return cls(WIDTH, heads=2, causal=True, on_failure="ignore", **given, **options)


def with_others(x, kind, cut=CUT):
    return torch.cat([x[:, :cut], BEHIND[kind](x[:, cut:])], 1)


def answered(layer, x, cut=CUT, **options):
    """The output before the cut, and the gradients of it by the input there and by the weights."""
    x = x.clone().requires_grad_()
    output = layer(x, **options)[:, :cut]
    gradients = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [output.detach(), gradients[0][:, :cut], *(g for g in gradients[1:] if g is not None)]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("kind", LAYERS)
def test_what_stands_behind_changes_no_bit(kind, behind):
    layer, x = made(kind), torch.randn(3, N, WIDTH)
    for mine, other in zip(answered(layer, x), answered(layer, with_others(x, behind)), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", ["spin", "spin, closure", "spin, free", "mean field", "mean field, blocks"])
def test_the_tokens_are_those_of_a_solve_of_all_at_once(kind):
    layer, x = made(kind).double(), random(3, N, WIDTH, seed=1)
    found = layer(x)
    problems = layer.last_solve
    assert bool(problems.converged.all())
    assert bool((problems.residual <= problems.record.tolerance).all())
    tight = Anderson(history=1, rtol=1e-13, atol=1e-13, max_steps=1000)
    if isinstance(layer, SpinAttention):
        tighter = SpinAttention(WIDTH, 2, causal=True, solver=tight, **LAYERS[kind][1]).double()
    else:
        tighter = MeanFieldAttention(WIDTH, heads=2, causal=True, solver=tight, **LAYERS[kind][1]).double()
    tighter.load_state_dict(layer.state_dict())
    truth = tighter(x)
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-3)
    # By another route: the tokens so far are all that there is.
    if "sites" not in LAYERS[kind][1]:
        torch.testing.assert_close(tighter(x[:, :CUT]), truth[:, :CUT], rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_token_that_is_no_number_and_those_after_it_have_no_answer(kind):
    layer, x = made(kind), torch.randn(3, N, WIDTH)
    broken = x.clone()
    broken[1, CUT] = math.nan
    found = layer(broken)
    assert bool(found[1, CUT:].isnan().all())
    assert torch.equal(found[[0, 2]], layer(x)[[0, 2]])
    layer(broken)
    status = layer.last_solve.status
    assert bool((status[1] == Status.NONFINITE).all())
    assert not bool((status[[0, 2]] == Status.NONFINITE).any())


@pytest.mark.parametrize("kind", ["spin", "mean field"])
def test_a_start_that_is_no_number_behind_a_token_does_not_reach_it(kind):
    layer, x = made(kind), torch.randn(2, N, WIDTH)
    _, start = layer(x, return_state=True)
    broken = start.clone()
    broken[:, :, CUT:] = math.nan
    found, truth = layer(x, initial=broken), layer(x, initial=start)
    assert torch.equal(found[:, :CUT], truth[:, :CUT])
    torch.testing.assert_close(found, truth, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", ["spin", "mean field"])
def test_such_a_token_is_told(kind):
    cls, given = LAYERS[kind]
    x = torch.randn(2, N, WIDTH)
    x[1, CUT] = math.nan
    with pytest.warns(ConvergenceWarning, match="look for NaN and infinities; tokens before the first"):
        cls(WIDTH, heads=2, causal=True, **given)(x)
    with pytest.raises(ConvergenceError, match="tokens before the first"):
        cls(WIDTH, heads=2, causal=True, on_failure="raise", **given)(x)


@pytest.mark.parametrize("kind", ["spin", "mean field"])
def test_documents_in_one_row_do_not_feel_each_other(kind):
    layer, x = made(kind), torch.randn(2, N, WIDTH)
    document = torch.tensor([0] * 5 + [1] * 7)
    mask = document[:, None] == document[None, :]
    broken = x.clone()
    broken[:, 3] = math.nan
    whole, found = layer(x, mask=mask), layer(broken, mask=mask)
    assert torch.equal(found[:, :3], whole[:, :3])
    assert bool(found[:, 3:5].isnan().all())
    torch.testing.assert_close(found[:, 5:], whole[:, 5:], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["spin", "mean field"])
def test_a_missing_token_is_zero_behind_one_that_is_no_number(kind):
    layer, x = made(kind), torch.randn(2, N, WIDTH)
    x[:, 3] = x[:, 5] = math.nan
    key_mask = torch.arange(N) != 5
    found = layer(x, key_mask=key_mask.expand(2, N))
    assert bool((found[:, 5] == 0).all())
    assert bool(found[:, :3].isfinite().all())
    assert bool(found[:, 6:].isnan().all())


# The loop itself.


@pytest.mark.parametrize("solver", [Picard, functools.partial(Picard, damping=0.4), Anderson], ids=repr)
def test_the_residual_is_that_of_the_state(solver):
    x = random(3, N, WIDTH, seed=1)
    step = made("mean field", steps=1).double()
    for steps in (2, 5, 600):
        layer = made("mean field", solver=solver(rtol=1e-9, max_steps=steps)).double()
        _, state = layer(x, return_state=True)
        residual = (step(x, initial=state, return_state=True)[1] - state).flatten(1).norm(dim=-1)
        torch.testing.assert_close(layer.last_solve.residual, residual, rtol=1e-6, atol=1e-12)
        assert layer.last_solve.status.tolist() == [Status.CONVERGED if steps == 600 else Status.MAX_STEPS] * 3


def test_the_course_is_that_of_the_samples():
    seen, solutions = [], []

    class Watched(KineticPlefka):
        def solution(self, system, start, **options):
            problem = self.problem(system)
            problem.token_order = system.token_order
            solutions.append(solve(problem, start, trace=True, callback=lambda *of: seen.append(of)))
            return solutions[0]

    SpinAttention(WIDTH, 2, causal=True, method=Watched())(torch.randn(3, N, WIDTH))
    (found,) = solutions
    assert found.trace.residual.shape == found.trace.num_evals.shape == (len(seen), 3, 2)
    assert all(residual.shape == active.shape == (3, 2) for _, residual, active in seen)
    assert not bool(seen[-1][2].any())
    assert bool((found.trace.residual[-1] <= found.record.tolerance).all())


def test_gradients_through_all_steps_are_those_of_the_fixed_point():
    solver, found = Picard(rtol=1e-13, atol=1e-13, max_steps=600), []
    x = random(2, N, WIDTH, seed=1).requires_grad_()
    for adjoint in (Implicit(), Unrolled()):
        layer = made("mean field", solver=solver, adjoint=adjoint).double()
        found.append(torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)


def test_tokens_stop_apart_inside_of_vmap():
    layer, x = made("spin"), torch.randn(3, N, WIDTH)
    plain = torch.stack([layer(row) for row in x])
    torch.testing.assert_close(torch.vmap(layer)(x), plain, rtol=0, atol=1e-5)
