"""Driven synchronous dynamics: samples, times, masks, derivatives, and what is refused."""

import dataclasses

import pytest
import torch
from driven_paths import OUTPUTS, assert_close, every_case, example
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attention import Anderson, ConvergenceError, ConvergenceWarning, Picard, Status
from implicit_attention.spins import KineticPlefka, drive
from implicit_attention.testing.numerics import random

# Batches, times and masks.


@every_case
def test_samples_are_alone(method, dim):
    couplings, fields = 0.2 * random(2, 4, 4), 0.7 * random(3, 2, 4, dim, seed=1)
    beta, start = torch.tensor([0.7, 1.1], dtype=torch.float64), 0.3 * random(2, 4, dim, seed=2) / dim
    path = drive(method, couplings, fields, beta=beta, initial=start)
    assert path.report.status.shape == path.mismatch.shape == (3, 2)
    for k in range(2):
        alone = drive(method, couplings[k], fields[:, k], beta=float(beta[k]), initial=start[k])
        assert_close(alone, dataclasses.replace(path, **{name: getattr(path, name)[:, k] for name in OUTPUTS}))


def test_couplings_may_be_made_of_the_momentary_field_and_beta_may_change():
    fields, betas = 0.7 * random(3, 4, 2), torch.tensor([0.7, 1.0, 1.2], dtype=torch.float64)

    def function(h):
        return 0.3 * torch.softmax(h @ h.mT.roll(1, -1), -1)

    whole, m = drive(KineticPlefka(), function, fields, beta=betas), None
    for t in range(3):
        step = drive(KineticPlefka(), function(fields[t]), fields[t : t + 1], beta=float(betas[t]), initial=m)
        assert_close(
            step, dataclasses.replace(whole, **{n: getattr(whole, n)[t : t + 1] for n in OUTPUTS}), OUTPUTS[1:]
        )
        m = step.states[1]
    torch.testing.assert_close(m, whole.states[3])


@every_case
def test_missing_sites_change_no_bit(method, dim):
    couplings, fields = example(dim, 2, sites=5)
    live, start = torch.tensor([True, False, True, True, False]), 0.2 * random(2, 5, dim, seed=7) / dim
    truth = drive(method, couplings, fields, mask=live, initial=start)
    couplings[~live], couplings[:, ~live] = torch.nan, torch.inf
    fields[:, :, ~live], start[:, ~live] = torch.nan, torch.nan
    path = drive(method, couplings, fields, mask=live, initial=start)
    for name in OUTPUTS:
        assert torch.equal(getattr(path, name), getattr(truth, name)), name
    assert not path.states[:, :, ~live].any()
    few = drive(method, couplings[live][:, live], fields[:, :, live], initial=start[:, live])
    kept = {name: getattr(path, name)[:, :, live] for name in ("states", "stationary")}
    assert_close(few, dataclasses.replace(path, **kept), tolerance=1e-8)


@every_case
def test_what_is_not_finite_stays_in_its_sample_and_after_its_time(method, dim):
    couplings, fields = example(dim, 3)
    start = torch.zeros_like(fields[0])
    truth = drive(method, couplings, fields)
    fields[2, 1, 0, 0], start[2, 0, 0] = torch.nan, torch.nan
    path = drive(method, couplings, fields, initial=start, on_failure="ignore")
    assert path.report.status[:, 1].tolist() == [Status.CONVERGED] * 2 + [Status.NONFINITE] * 2
    for name in OUTPUTS:
        found, known, steps = getattr(path, name), getattr(truth, name), 3 if name == "states" else 2
        torch.testing.assert_close(found[:, 0], known[:, 0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[:steps, 1], known[:steps, 1], rtol=1e-9, atol=1e-9)
        assert bool(found[steps:, 1].isnan().all()), name
        assert bool(found[:, 2].isnan().all()), name


# Derivatives.


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_derivatives_through_the_steps(method, dim, check):
    def function(fields, couplings, beta, start):
        path = drive(method, couplings, fields, beta=beta, initial=start, stationary=False)
        return path.states, path.entropy_production

    inputs = 0.6 * random(3, 3, dim), 0.3 * random(3, 3, seed=1), torch.tensor(0.9).double(), 0.2 * random(3, dim)
    assert check(function, [t.requires_grad_() for t in inputs], fast_mode=True)


@pytest.mark.by_name(slow=r"\[Gaussian")
@every_case
def test_derivatives_of_what_is_asked_of_stationary_states(method, dim):
    sharp = dataclasses.replace(method, solver=Anderson(rtol=1e-13, atol=1e-13, max_steps=1000))

    def function(fields, couplings, beta):
        path = drive(sharp, couplings, fields, beta=beta)
        return path.housekeeping, path.field_change, path.mismatch, path.stationary

    inputs = 0.6 * random(2, 3, dim), 0.3 * random(3, 3, seed=1), torch.tensor(0.9).double()
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in inputs], fast_mode=True)


def test_strong_fields_have_finite_derivatives():
    fields = torch.full((2, 2, 1), 30.0, requires_grad=True)
    path = drive(KineticPlefka(), torch.tensor([[0.0, 0.5], [0.2, 0.0]]), fields, stationary=False)
    path.entropy_production.sum().backward()
    assert bool(fields.grad.isfinite().all())


class _Reads(TorchDispatchMode):
    """Counts how often a number is brought to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


@every_case
def test_the_host_does_not_wait_for_steps(method, dim):
    counts = []
    for steps in (2, 9):
        with _Reads() as reads:
            drive(method, *example(dim, 2, steps=steps), stationary=False)
        counts.append(reads.count)
    assert counts[0] == counts[1]


# The doors.


def test_stationary_states_are_optional():
    couplings, fields = example(2)
    path, truth = drive(KineticPlefka(), couplings, fields, stationary=False), drive(KineticPlefka(), couplings, fields)
    assert torch.equal(path.states, truth.states)
    assert torch.equal(path.entropy_production, truth.entropy_production)
    rest = ("housekeeping", "field_change", "stationary", "mismatch", "relaxation_time", "report")
    assert all(getattr(path, name) is None for name in rest)


def test_failed_stationary_solves_are_reported():
    method = KineticPlefka(solver=Picard(rtol=1e-12, atol=0.0, max_steps=1))
    with pytest.raises(ConvergenceError, match="KineticPlefka failed for 8 of 8 problems, first at "):
        drive(method, *example(2, 2))
    with pytest.warns(ConvergenceWarning, match="KineticPlefka failed for 8 of 8"):
        path = drive(method, *example(2, 2), on_failure="warn")
    assert bool((path.report.status == Status.MAX_STEPS).all())
    assert path.entropy_production.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_follows_the_field(dtype):
    couplings, fields = example(2, 2)
    low, truth = (
        drive(KineticPlefka(), couplings.to(dtype), fields.to(dtype)),
        drive(KineticPlefka(), couplings, fields),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for name in OUTPUTS:
        assert getattr(low, name).dtype == torch.float32
        torch.testing.assert_close(getattr(low, name).double(), getattr(truth, name), rtol=tolerance, atol=tolerance)


def test_empty_batches():
    path = drive(KineticPlefka(), random(4, 4), random(3, 0, 4, 2))
    assert [tuple(getattr(path, name).shape) for name in OUTPUTS] == [
        (4, 0, 4, 2), (3, 0), (3, 0), (3, 0), (3, 0, 4, 2), (3, 0), (3, 0),
    ]  # fmt: skip
