"""Losses at intermediate states: `Solution.states` of an unrolled, traced solve."""

import pytest
import torch

from implicit_attention import Anderson, FixedPointMap, PerSample, Picard, Status, Unrolled, solve
from implicit_attention.testing.numerics import random

WEIGHT = 0.3 * random(4, 4, seed=1)
BUDGET = Picard(rtol=0, atol=0, max_steps=8)


def f(z, x, weight):
    return torch.tanh(z @ weight + x)


def unrolled(x, weight, initial, solver=BUDGET, wrap=PerSample, **options):
    problem = FixedPointMap(f, wrap(x), weight, event_ndim=1)
    return solve(problem, initial, solver=solver, adjoint=Unrolled(), trace=True, **options)


def by_hand(x, weight, z, at):
    states = [z]
    for _ in range(max(at)):
        states.append(f(states[-1], x, weight))
    return torch.stack([states[k] for k in at])


@pytest.mark.parametrize("lead", [(3,), (2, 3), ()])
def test_states_and_their_gradients_are_those_of_the_steps_made_up_to_there(lead):
    leaves = [t.requires_grad_() for t in (random(*lead, 4), WEIGHT.clone(), random(*lead, 4, seed=2))]
    at = (0, 4, 8, 4)
    solution = unrolled(*leaves)
    states = solution.states(at=at)
    expected = by_hand(*leaves, at)
    torch.testing.assert_close(states, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(states.detach(), solution.trace.value[list(at)])
    assert not solution.trace.value.requires_grad
    cotangent = random(*states.shape, seed=3)
    for one in range(len(at)):
        found = torch.autograd.grad(states[one], leaves, cotangent[one], retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(
            found,
            torch.autograd.grad(expected[one], leaves, cotangent[one], retain_graph=True, materialize_grads=True),
            rtol=1e-12,
            atol=1e-13,
        )
    assert torch.autograd.gradcheck(lambda *leaves: unrolled(*leaves).states(at=(2, 5)), leaves)
    assert torch.autograd.gradgradcheck(lambda *leaves: unrolled(*leaves).states(at=(2,)), leaves)


def test_later_steps_are_not_differentiated():
    x = random(3, 4).requires_grad_()
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return gradient

    problem = FixedPointMap(lambda z, x: torch.tanh(Counted.apply(z) / 2 + x), x, event_ndim=1)
    solution = solve(problem, torch.zeros(3, 4).double(), solver=BUDGET, adjoint=Unrolled(), trace=True)
    solution.states(at=[3]).sum().backward()
    assert len(calls) == 2


def test_where_all_finished_sooner_the_state_is_the_value():
    x = random(3, 4).requires_grad_()
    solution = unrolled(x, WEIGHT, torch.zeros(3, 4).double(), solver=Anderson())
    assert len(solution.course) < 50
    states = solution.states(at=[0, 50])
    assert torch.equal(states[1], solution.value)
    expected = torch.autograd.grad(solution.value.sum(), x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(states[1].sum(), x), expected)
    assert torch.equal(solution.states(at=range(3)), solution.states(at=[0, 1, 2]))
    assert solution.states(at=[]).shape == (0, 3, 4)


def test_a_sample_that_is_not_finite_stays_alone():
    x = random(3, 4)
    x[1] = torch.nan
    x.requires_grad_()
    weight = WEIGHT.clone().requires_grad_()
    solution = unrolled(x, weight, torch.zeros(3, 4).double(), on_failure="ignore")
    assert solution.status.tolist() == [Status.BUDGET, Status.NONFINITE, Status.BUDGET]
    kept = [0, 2]
    found = torch.autograd.grad(solution.states(at=[4, 8])[:, kept].square().sum(), (x, weight))
    alone = by_hand(x[kept], weight, torch.zeros(2, 4).double(), (4, 8))
    expected = torch.autograd.grad(alone.square().sum(), (x, weight))
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(found[0][kept], expected[0][kept])


def test_transforms_and_no_grad_have_states_too():
    x, z = random(2, 3, 4), torch.zeros(3, 4).double()

    def states(x):
        return unrolled(x, WEIGHT, z).states(at=[2, 4])

    with torch.no_grad():
        expected = states(x[0])
    torch.testing.assert_close(expected, by_hand(x[0], WEIGHT, z, (2, 4)))
    torch.testing.assert_close(torch.vmap(states)(x)[0], expected)
    wanted = torch.func.jacrev(lambda x: by_hand(x, WEIGHT, z, (2, 4)))(x[0])
    torch.testing.assert_close(torch.func.jacrev(states)(x[0]), wanted)
