"""`Implicit(fallback=...)`: samples that have not converged get the fallback's gradient, all others the exact one."""

import warnings

import pytest
import torch

from implicit_attention import FixedPointMap, Implicit, OneStep, Phantom, Picard, Status, solve
from implicit_attention.linear import GMRES
from implicit_attention.testing.adjoint import AdjointContract, attention_energy, attention_inputs
from implicit_attention.testing.numerics import random

MIXED = Implicit(GMRES(rtol=1e-12), fallback=Phantom(5))
# Samples 0 and 2 contract fast, 1 and 3 do not within so many steps.
HASTY = Picard(rtol=1e-11, atol=0.0, max_steps=40)
STEEP = torch.tensor([0.3, 0.95, 0.2, 0.9], dtype=torch.float64)


class TestImplicitWithAFallback(AdjointContract):
    adjoint = Implicit(fallback=Phantom(5))
    accuracy = 1e-8


def inputs(sample=slice(None)):
    weight = torch.linalg.qr(random(6, 6))[0]
    shift, steep = random(4, 3, 6, seed=1)[sample], STEEP[sample][..., None, None]
    return tuple(t.clone().requires_grad_() for t in (weight, shift, steep))


def mapped(z, weight, shift, steep):
    return torch.sin(steep * (z @ weight.mT)) + 0.1 * shift


def solved(adjoint, *tensors):
    problem = FixedPointMap(mapped, *tensors, event_ndim=2)
    return solve(problem, torch.zeros_like(tensors[1]), solver=HASTY, adjoint=adjoint, on_failure="ignore")


def loss(value):
    return (value * random(4, 3, 6, seed=7)[: len(value)]).sum() + value.square().sum()


@pytest.mark.parametrize("fallback", [Phantom(5), Phantom(3, damping=0.2), OneStep()], ids=str)
def test_each_sample_has_the_gradient_of_its_own_adjoint(fallback):
    for index in range(4):
        sample = slice(index, index + 1)
        # One sample has its loss; the weights that all share get its gradient alone.
        found = {}
        for name, adjoint in {
            "mixed": Implicit(GMRES(rtol=1e-12), fallback=fallback),
            "exact": Implicit(GMRES(rtol=1e-12)),
            "fallback": fallback,
        }.items():
            tensors = inputs()
            solution = solved(adjoint, *tensors)
            assert solution.converged.tolist() == [True, False, True, False]
            found[name] = torch.autograd.grad(loss(solution.value[sample]), tensors)
        expected = found["exact" if solution.converged[index] else "fallback"]
        for gradient, truth in zip(found["mixed"], expected, strict=True):
            torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(found["exact"][0], found["fallback"][0], rtol=1e-3)


def test_second_derivatives_are_those_of_each():
    found = {}
    for name, adjoint in {"mixed": MIXED, "exact": Implicit(GMRES(rtol=1e-12)), "fallback": Phantom(5)}.items():
        tensors = inputs()
        value = solved(adjoint, *tensors).value
        (by_shift,) = torch.autograd.grad(value.sin().sum(), tensors[1], create_graph=True)
        (found[name],) = torch.autograd.grad(by_shift.square().sum(), tensors[2])
    for index, name in enumerate(("exact", "fallback") * 2):
        torch.testing.assert_close(found["mixed"][index], found[name][index], rtol=1e-8, atol=1e-10)


def test_samples_that_are_not_finite_stay_alone():
    tensors = inputs()
    with torch.no_grad():
        tensors[1][1] = torch.nan
    solution = solved(MIXED, *tensors)
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED, Status.MAX_STEPS]
    others = torch.tensor([0, 2, 3])
    gradients = torch.autograd.grad(loss(solution.value[others]), tensors)
    alone = inputs(others)
    expected = torch.autograd.grad(loss(solved(MIXED, *alone).value), alone)
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients[1][others], expected[1], rtol=1e-9, atol=1e-12)
    assert "no gradient" in solution.message(1)


def test_steps_are_made_only_if_a_sample_needs_them():
    calls = []

    def counted(z, weight, shift, steep):
        calls.append(len(z))
        return mapped(z, weight, shift, steep)

    for sample, more in ((torch.tensor([0, 2]), 0), (torch.tensor([0, 1]), 5)):
        made = []
        # Once before, as a new function is looked at first.
        for adjoint in (Implicit(), Implicit(), Implicit(fallback=Phantom(5))):
            calls.clear()
            tensors = inputs(sample)
            problem = FixedPointMap(counted, *tensors, event_ndim=2)
            solve(problem, torch.zeros_like(tensors[1]), solver=HASTY, adjoint=adjoint, on_failure="ignore")
            made.append(len(calls))
        assert made[2] - made[1] == more


def test_problems_that_can_be_restricted_are():
    keys, field, beta, anchor, bias = (t.detach() for t in attention_inputs())
    solver = Picard(rtol=1e-5, atol=0.0, max_steps=5)
    found = {}
    for name, adjoint in {"mixed": MIXED, "exact": Implicit(), "fallback": Phantom(5)}.items():
        tensors = tuple(t.clone().requires_grad_() for t in (keys, 3 * field, 3 * beta, anchor, bias))
        energy = attention_energy(*tensors)
        solution = solve(energy, energy.field.detach(), solver=solver, adjoint=adjoint, on_failure="ignore")
        assert 0 < int(solution.converged.sum()) < 6
        (found[name],) = torch.autograd.grad((solution.value * random(2, 3, 5, seed=7)).sum(), tensors[1])
    for name, where in (("exact", solution.converged), ("fallback", ~solution.converged)):
        torch.testing.assert_close(found["mixed"][where], found[name][where], rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_transforms_give_the_same():
    tensors = tuple(t.detach() for t in inputs())

    def scalar(weight, shift, steep):
        return loss(solved(MIXED, weight, shift, steep).value)

    live = inputs()
    expected = torch.autograd.grad(scalar(*live), live)
    for gradient, truth in zip(torch.func.grad(scalar, (0, 1, 2))(*tensors), expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-8, atol=1e-10)
    tangents = tuple(random(*t.shape, seed=20 + i) for i, t in enumerate(tensors))
    slope = torch.func.jvp(scalar, tensors, tangents)[1]
    torch.testing.assert_close(slope, sum((t * g).sum() for t, g in zip(tangents, expected, strict=True)))
    weights = torch.stack([tensors[0], tensors[0].mT])
    batched = torch.vmap(torch.func.grad(scalar), in_dims=(0, None, None))(weights, *tensors[1:])
    looped = torch.stack([torch.func.grad(scalar)(weight, *tensors[1:]) for weight in weights])
    torch.testing.assert_close(batched, looped, rtol=1e-8, atol=1e-9)


def test_the_report_says_what_the_gradient_is_and_nothing_warns_of_it():
    tensors = inputs()
    problem = FixedPointMap(mapped, *tensors, event_ndim=2)
    with pytest.warns(UserWarning, match=r"2 of 4 problems.*gradient by Phantom\(5\)") as told:
        solution = solve(problem, torch.zeros_like(tensors[1]), solver=HASTY, adjoint=MIXED, on_failure="warn")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution.value.sum().backward()
    assert "gradient by Phantom(5)" in solution.message(1)
    assert "gradient" not in solution.message(0)
    assert not solution.adjoint.failed.any()
