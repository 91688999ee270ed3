"""Stationary states of synchronous dynamics: known numbers, symmetries, derivatives, samples, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from solvable_models import ASYMMETRIC as COUPLINGS
from solvable_models import DRIVE as FIELD
from solvable_models import ising_states, peretto

from implicit_attention import Anderson, ConvergenceError, ConvergenceWarning, OneStep, Picard, Status
from implicit_attention.potentials import AmosResponse
from implicit_attention.spins import (
    Bonds,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SpinSystem,
    magnetization,
    stationary_law,
    stationary_state,
)
from implicit_attention.testing.numerics import random

CASES = {
    "first order, Ising": (KineticPlefka(), 1),
    "first order": (KineticPlefka(), 3),
    "second order, Ising": (KineticPlefka(order=2), 1),
    "second order": (KineticPlefka(order=2, response=AmosResponse()), 3),
    "Gaussian field, Ising": (GaussianClosure(), 1),
    "Gaussian field": (GaussianClosure(), 3),
}
OUTPUTS = ("magnetization", "delayed_correlations", "entropy_production")
every_case = pytest.mark.parametrize(("method", "dim"), CASES.values(), ids=CASES)


def on_bonds(couplings):
    """The same couplings, J_ij and J_ji of every pair."""
    return Bonds.of(couplings, directed=True)


either_form = pytest.mark.parametrize("form", [lambda couplings: couplings, on_bonds], ids=["tensor", "bonds"])


def outputs(state):
    return tuple(getattr(state, name) for name in OUTPUTS)


def assert_close(state, truth, tolerance=1e-9):
    for name, a, b in zip(OUTPUTS, outputs(state), outputs(truth), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def ising(beta, couplings=COUPLINGS):
    return SpinSystem(couplings, FIELD[:, None], beta, radius=1.0)


def vectors(dim, *batch, sites=4, strength=0.25, seed=0, **options):
    """Couplings that are not symmetric, with a diagonal, and beta per sample."""
    beta = torch.linspace(0.7, 1.1, math.prod(batch), dtype=torch.float64).reshape(batch)
    couplings = strength * random(*batch, sites, sites, seed=seed)
    return SpinSystem(couplings, random(*batch, sites, dim, seed=seed + 1), beta, **options)


# Known numbers.


@pytest.mark.parametrize(
    ("method", "m"),
    [
        (KineticPlefka(), [0.0684717017, -0.0204188095, 0.1705326294, -0.0073639250]),
        (KineticPlefka(order=2), [0.0647955779, -0.0216244242, 0.1543763793, -0.0043202007]),
    ],
)
def test_four_ising_spins(method, m):
    np.testing.assert_allclose(stationary_state(ising(0.5), method).magnetization[:, 0], m, rtol=0, atol=6e-11)


def test_entropy_production_of_mean_field():
    state = stationary_state(ising(0.5), KineticPlefka())
    assert float(state.entropy_production) == pytest.approx(0.4432505895, abs=6e-11)
    # Written out: (beta^2/2) sum (J_ij - J_ji)^2 Sigma_i Sigma_j.
    variance = 1 - state.magnetization[:, 0].square()
    odd = (COUPLINGS - COUPLINGS.mT).square() * torch.outer(variance, variance)
    assert float(state.entropy_production) == pytest.approx(0.125 * float(odd.sum()), abs=1e-13)


@pytest.mark.parametrize(
    ("method", "beta", "error"),
    [
        (KineticPlefka(), 0.5, 1.6e-2),
        (KineticPlefka(), 1.0, 8.9e-2),
        (KineticPlefka(order=2), 0.5, 7.1e-4),
        (KineticPlefka(order=2), 1.0, 5.4e-3),
        (GaussianClosure(), 0.5, 8.7e-4),
        (GaussianClosure(), 1.0, 1.6e-2),
    ],
)
def test_errors_of_the_magnetization_are_as_large_as_known(method, beta, error):
    found = magnetization(ising(beta), method)[:, 0]
    worst = float((found - stationary_law(COUPLINGS, FIELD, beta).magnetization).abs().max())
    assert 0.9 * error < worst < error


@pytest.mark.parametrize(
    ("method", "error"), [(KineticPlefka(), 0.034), (KineticPlefka(order=2), 0.040), (GaussianClosure(), 0.047)]
)
def test_errors_of_the_entropy_production(method, error):
    found = float(stationary_state(ising(0.5), method).entropy_production)
    assert abs(found / 0.428999177720 - 1) < error


@every_case
def test_symmetric_couplings_produce_no_entropy(method, dim):
    system = vectors(dim, 2)
    symmetric = system.at(system.field, (system.couplings + system.couplings.mT) / 2, system.beta)
    assert not stationary_state(symmetric, method).entropy_production.any()
    assert bool((stationary_state(system, method).entropy_production > 0).all())


def test_symmetric_couplings_settle_near_perettos_law():
    couplings = (COUPLINGS + COUPLINGS.mT) / 2
    truth = peretto(couplings, FIELD, 0.4) @ ising_states(4)
    found = magnetization(ising(0.4, couplings), KineticPlefka(order=2))[:, 0]
    boltzmann = magnetization(ising(0.4, couplings), MeanField())[:, 0]
    assert (found - truth).norm() < 0.1 * (boltzmann - truth).norm()


# What all closures share.


@every_case
def test_entropy_production_is_in_the_delayed_correlations(method, dim):
    system = vectors(dim, 2)
    state = stationary_state(system, method)
    odd = system.couplings - system.couplings.mT
    by_pairs = system.beta * (odd * state.delayed_correlations).sum((-2, -1))
    torch.testing.assert_close(state.entropy_production, by_pairs, rtol=1e-13, atol=1e-13)


@every_case
def test_spins_alone_answer_their_field(method, dim):
    system = vectors(dim, 2, strength=0.0, radius=1.7)
    state = stationary_state(system, method)
    alone = method.response.magnetization(system.field, system.beta, 1.7)
    torch.testing.assert_close(state.magnetization, alone, rtol=1e-12, atol=1e-12)
    assert not state.delayed_correlations.any()
    assert not state.entropy_production.any()


@every_case
def test_sites_may_be_renamed_and_space_turned(method, dim):
    system = vectors(dim, 2)
    state = stationary_state(system, method)
    order = torch.tensor([2, 0, 3, 1])
    turn = torch.linalg.qr(random(dim, dim, seed=8))[0]
    moved = system.at(system.field[:, order] @ turn, system.couplings[:, order][:, :, order], system.beta)
    truth = dataclasses.replace(
        state,
        magnetization=state.magnetization[:, order] @ turn,
        delayed_correlations=state.delayed_correlations[:, order][:, :, order],
    )
    assert_close(stationary_state(moved, method), truth)


@every_case
def test_the_radius_is_a_unit(method, dim):
    system = vectors(dim, 2, radius=1.0)
    state = stationary_state(system, method)
    r = 1.6
    scaled = SpinSystem(system.couplings / r**2, system.field / r, system.beta, radius=r)
    truth = dataclasses.replace(
        state,
        magnetization=r * state.magnetization,
        delayed_correlations=r**2 * state.delayed_correlations,
    )
    assert_close(stationary_state(scaled, method), truth)


@every_case
def test_only_beta_times_couplings_and_field_counts(method, dim):
    system = vectors(dim, 2)
    beta = system.beta[:, None, None]
    hot = SpinSystem(beta * system.couplings, beta * system.field)
    assert_close(stationary_state(hot, method), stationary_state(system, method))


@every_case
def test_masked_sites_change_nothing(method, dim):
    system = vectors(dim, 2, sites=5)
    live = torch.tensor([True, False, True, True, False])
    field, couplings = system.field.clone(), system.couplings.clone()
    field[:, ~live] = torch.nan
    couplings[:, ~live], couplings[:, :, ~live] = torch.nan, torch.inf
    state = stationary_state(SpinSystem(couplings, field, system.beta, mask=live), method)
    few = stationary_state(
        SpinSystem(system.couplings[:, live][:, :, live], system.field[:, live], system.beta), method
    )
    for name, value in zip(OUTPUTS, outputs(state), strict=True):
        assert name == "entropy_production" or not value[:, ~live].any()
    assert not state.delayed_correlations[:, :, ~live].any()
    kept = dataclasses.replace(
        state,
        magnetization=state.magnetization[:, live],
        delayed_correlations=state.delayed_correlations[:, live][:, :, live],
    )
    assert_close(kept, few)


# Derivatives.


@either_form
@pytest.mark.by_name(
    slow=r"\[(gradgradcheck-(?!Gaussian)|gradcheck-second|gradgradcheck-Gaussian field-|grad.*second.*bonds)"
)
@every_case
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_derivatives_of_every_output(method, dim, check, form):
    sharp = dataclasses.replace(method, solver=Anderson(rtol=1e-13, atol=1e-13, max_steps=1000))
    couplings, beta = 0.3 * random(3, 3, seed=2), torch.tensor([0.6, 1.1], dtype=torch.float64)

    def function(field, couplings, beta):
        return outputs(stationary_state(SpinSystem(form(couplings), field, beta), sharp))

    inputs = [t.requires_grad_() for t in (0.8 * random(2, 3, dim, seed=1), couplings, beta)]
    assert check(function, inputs, fast_mode=True)


@pytest.mark.parametrize("method", [KineticPlefka(order=2), GaussianClosure()], ids=["second", "gaussian"])
def test_couplings_made_of_the_field_are_differentiated_through(method):
    field = 0.5 * random(3, 2, seed=3)
    weight = random(3, 2, seed=4)

    def value(h):
        system = SpinSystem(lambda x: 0.4 * torch.softmax(x @ x.mT.roll(1, -1), -1), h)
        return (weight * magnetization(system, method)).sum()

    (slope,) = torch.autograd.grad(value(h := field.clone().requires_grad_()), h)
    direction, step = random(3, 2, seed=5), 1e-5
    numeric = (value(field + step * direction) - value(field - step * direction)) / (2 * step)
    assert float((slope * direction).sum()) == pytest.approx(float(numeric), rel=1e-7)


@either_form
@pytest.mark.by_name(slow=r"\[(first order|Gaussian field)-")
@every_case
def test_vmap_and_grad_compose(method, dim, form):
    couplings, fields = 0.3 * random(3, 3), random(4, 3, dim, seed=4)

    def value(field):
        return stationary_state(SpinSystem(form(couplings), field), method).entropy_production

    mapped = torch.vmap(torch.func.grad(value))(fields)
    live = fields.clone().requires_grad_()
    (truth,) = torch.autograd.grad(sum(value(f) for f in live), live)
    torch.testing.assert_close(mapped, truth, rtol=1e-8, atol=1e-9)


# Samples.


@either_form
@pytest.mark.by_name(slow=r"\[second order")
@every_case
def test_a_sample_does_not_depend_on_its_company(method, dim, form):
    system = vectors(dim, 4)
    field, couplings, beta = system.field.clone(), system.couplings.clone(), system.beta.clone()
    couplings[1] *= 20.0
    field[2, 1, 0] = torch.nan
    couplings[3, 0, 1] = torch.inf
    state = stationary_state(SpinSystem(form(couplings), field, beta), method, on_failure="ignore")
    assert state.report.status[[0, 2, 3]].tolist() == [Status.CONVERGED, Status.NONFINITE, Status.NONFINITE]
    alone = stationary_state(SpinSystem(form(couplings[:1]), field[:1], beta[:1]), method)
    for together, apart in zip(outputs(state), outputs(alone), strict=True):
        limit = 4 * torch.finfo(torch.float64).eps * apart.abs().amax().clamp(min=1.0)
        assert bool(((together[:1] - apart).abs() <= limit).all())
        assert bool(together[2:].isnan().all())


@either_form
@every_case
def test_a_lost_sample_that_the_loss_leaves_out_spoils_no_shared_gradient(method, dim, form):
    couplings = (0.2 * random(3, 3)).requires_grad_()
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    field = random(2, 3, dim, seed=1)
    alone = torch.autograd.grad(
        sum(x.sum() for x in outputs(stationary_state(SpinSystem(form(couplings), field[:1], beta), method))),
        (couplings, beta),
    )
    for bad in (torch.nan, torch.inf, 1e200):
        field[1, 2] = bad
        state = stationary_state(SpinSystem(form(couplings), field, beta), method, on_failure="ignore")
        assert state.report.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
        assert state.report.residual.isnan().tolist() == [False, True]
        found = torch.autograd.grad(sum(x[0].sum() for x in outputs(state)), (couplings, beta))
        for a, b in zip(found, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@either_form
@every_case
def test_couplings_beyond_all_bounds_spoil_no_shared_factor(method, dim, form):
    factor = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    base, field = random(2, 3, 3), random(2, 3, dim, seed=1)
    base[1, 0, 2] = 1e200
    state = stationary_state(SpinSystem(form(factor * base), field), method, on_failure="ignore")
    assert state.report.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    (slope,) = torch.autograd.grad(sum(x[0].sum() for x in outputs(state)), factor)
    alone = stationary_state(SpinSystem(form(factor * base[:1]), field[:1]), method)
    (truth,) = torch.autograd.grad(sum(x.sum() for x in outputs(alone)), factor)
    torch.testing.assert_close(slope, truth, rtol=1e-9, atol=1e-9)


def test_failures_are_reported_sample_by_sample():
    system = vectors(3, 2)
    method = GaussianClosure(solver=Picard(rtol=1e-12, atol=0.0, max_steps=1))
    with pytest.raises(ConvergenceError, match="GaussianClosure failed for 2 of 2"):
        stationary_state(system, method)
    with pytest.warns(ConvergenceWarning, match="GaussianClosure failed for 2 of 2"):
        state = stationary_state(system, method, on_failure="warn")
    assert state.report.status.tolist() == [Status.MAX_STEPS] * 2
    field = system.field.clone()
    field[1, 0, 0] = torch.nan
    with pytest.raises(ConvergenceError, match="KineticPlefka failed for 1 of 2 problems, first at 1"):
        magnetization(SpinSystem(system.couplings, field, system.beta), KineticPlefka())


@either_form
@every_case
def test_precision_follows_the_field(method, dim, form):
    system = vectors(dim, 2)
    truth = stationary_state(SpinSystem(form(system.couplings), system.field, system.beta), method)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        low = SpinSystem(form(system.couplings.to(dtype)), system.field.to(dtype), system.beta.to(dtype))
        state = stationary_state(low, method)
        for a, b in zip(outputs(state), outputs(truth), strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@either_form
@every_case
def test_shapes_and_empty_batches(method, dim, form):
    pairs = (2, 10) if form == on_bonds else (4, 4)
    state = stationary_state(SpinSystem(form(random(4, 4)), random(0, 4, dim), 0.5), method)
    assert [tuple(x.shape) for x in outputs(state)] == [(0, 4, dim), (0, *pairs), (0,)]
    state = stationary_state(SpinSystem(form(0.1 * random(4, 4)), random(2, 3, 4, dim), 0.5), method)
    assert [tuple(x.shape) for x in outputs(state)] == [(2, 3, 4, dim), (2, 3, *pairs), (2, 3)]
    assert state.report.status.shape == (2, 3)


# The doors.


def test_options_count():
    system = vectors(3, 1)
    for method in (KineticPlefka(), KineticPlefka(order=2), GaussianClosure()):
        exact = magnetization(system, method)
        for name, value in (("response", AmosResponse()), ("solver", Picard(rtol=1e-2))):
            assert not torch.equal(magnetization(system, dataclasses.replace(method, **{name: value})), exact)
        slopes = []
        for adjoint in (None, OneStep()):
            field = system.field.clone().requires_grad_()
            moved = system.at(field, system.couplings, system.beta)
            state = stationary_state(moved, dataclasses.replace(method, adjoint=adjoint))
            slopes.append(torch.autograd.grad(state.magnetization.sum(), field)[0])
        assert not torch.allclose(*slopes)
