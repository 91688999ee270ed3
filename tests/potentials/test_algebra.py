"""Potentials made of potentials: a Phi, Phi + Psi and Phi(W z), nested in any combination."""

import math

import numpy as np
import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Picard, Potential, SquaredScores, Status, solve
from implicit_attention.potentials import HiddenUnits, PoissonUnits, SignUnits, SoftcapLogSumExp
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract


def keys(dtype, *, size=5, seed=0):
    return random(2, 7, size, seed=seed, dtype=dtype)


def per_sample(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


class TestScaledByATensor(PotentialContract):
    def make(self, dtype):
        return LogSumExp(keys(dtype), per_sample(0.5, 1.3, dtype=dtype)) * per_sample(0.6, 1.2, dtype=dtype)


class TestSum(PotentialContract):
    def make(self, dtype):
        mask = random(2, 3, 7, seed=9) > 0
        mask[0, 1] = False
        first = LogSumExp(keys(dtype), 0.7, mask=mask, bias=random(2, 3, 7, seed=4, dtype=dtype))
        return first + HiddenUnits(0.3 * random(5, 4, seed=2, dtype=dtype), SignUnits())


class TestMappedPerSample(PotentialContract):
    def make(self, dtype):
        return LogSumExp(keys(dtype, size=4)[0], 0.7).of(random(2, 4, 5, seed=2, dtype=dtype))


class TestNested(PotentialContract):
    def make(self, dtype):
        inner = LogSumExp(keys(dtype, size=4), 0.7) + 0.5 * SquaredScores(0.2 * keys(dtype, size=4, seed=3), 0.5)
        outer = (per_sample(0.4, 0.8, dtype=dtype) * inner).of(random(4, 5, seed=2, dtype=dtype))
        return 1.5 * (outer + LogSumExp(keys(dtype, seed=5), 1.1))


class LogCosh(Potential):
    """Given by its value alone."""

    convex = True

    def value(self, z):
        return (z.abs() + torch.log1p((-2 * z.abs()).exp())).sum(-1)


class TestOfAPotentialGivenByItsValue(PotentialContract):
    selects = False

    def make(self, dtype):
        return (LogCosh() + 0.5 * LogSumExp(keys(dtype, size=4), 0.7)).of(random(4, 5, seed=2, dtype=dtype))


def test_it_reads_as_mathematics():
    phi, psi = LogSumExp(random(2, 7, 5), 0.7), LogSumExp(random(2, 6, 4, seed=1), 0.9)
    z, w, a = random(2, 3, 5, seed=2), random(4, 5, seed=3), per_sample(0.3, 0.8)
    made = a * phi + 2 * (psi + 0.5 * psi).of(w)
    torch.testing.assert_close(made.value(z), a[:, None] * phi.value(z) + 3 * psi.value(z @ w.mT))
    torch.testing.assert_close(made.mean(z), a[:, None, None] * phi.mean(z) + 3 * psi.mean(z @ w.mT) @ w)
    names = [name for name, _ in made.named_tensors()]
    assert names[:3] == ["parts[0].parts[0].keys", "parts[0].weight", "parts[1].parts[0].parts[0].parts[0].keys"]
    assert len((phi + psi + phi).parts) == 3
    for number in (2, 2.0, np.float64(2), np.float32(2)):
        assert torch.equal((number * phi).mean(z), 2 * phi.mean(z))
        assert torch.equal((phi * number).mean(z), 2 * phi.mean(z))
    with pytest.raises(TypeError, match="unsupported operand"):
        phi + 1.0


def test_numbers_keep_closed_forms_and_unknown_parts_leave_none():
    phi, z = LogSumExp(random(2, 7, 5), 0.7), random(2, 3, 5)
    for made in (0.5 * phi, phi + phi, phi.of(torch.eye(5).double()), 2 * (phi + phi.of(random(5, 5)))):
        assert made.linearize(z) is not None
    for made in (0.5 * LogCosh(), phi + LogCosh(), LogCosh().of(torch.eye(5).double())):
        assert made.linearize(z) is None


def test_convexity_and_bounds_follow_from_the_parts():
    phi, capped, w = LogSumExp(random(2, 7, 5), 0.7), SoftcapLogSumExp(random(7, 5), 0.7, 1.5), random(2, 5, 4)
    squares = SquaredScores(random(2, 7, 5, seed=4), 0.1)
    assert (0.5 * phi).convex
    assert (phi + squares).convex
    assert phi.of(w).convex
    for made in (0.5 * capped, phi + capped, capped.of(w), 2 * (phi + capped.of(w))):
        assert not made.convex
        assert made.lipschitz() is None
    a = per_sample(0.5, 3.0)
    torch.testing.assert_close((a * phi).lipschitz(), a * phi.lipschitz())
    torch.testing.assert_close((phi + squares).lipschitz(), phi.lipschitz() + squares.lipschitz())
    norms = torch.linalg.svdvals(w)[:, 0]
    torch.testing.assert_close(phi.of(w).lipschitz(), norms.square() * phi.lipschitz())


def test_bounded_below_follows_from_the_parts():
    """|z|^2/2 - scale Phi(z) along the worst direction decides: known as bounded, as not, or unknown (None)."""
    phi, squares = LogSumExp(random(7, 5), 0.7), SquaredScores(torch.eye(5).double(), 1.0)
    assert (squares.bounded_below(0.9), squares.bounded_below(1.1)) == (True, False)
    assert ((0.5 * squares).bounded_below(1.9), (0.5 * squares).bounded_below(2.1)) == (True, False)
    two = per_sample(0.5, 1.5)
    assert ((two * squares).bounded_below(0.6), (two * squares).bounded_below(0.7)) == (True, None)
    # Log-sum-exp grows like |z| and takes nothing of the parabola.
    assert phi.bounded_below(math.inf)
    assert ((phi + squares).bounded_below(0.9), (phi + squares).bounded_below(1.1)) == (True, None)
    assert (phi + phi.of(3 * torch.eye(5).double())).bounded_below(math.inf)
    assert ((squares + squares).bounded_below(0.45), (squares + squares).bounded_below(0.55)) == (True, None)
    # Lipschitz bounds add up where halving the parabola is too crude.
    assert (0.9 * squares + 0.05 * squares).bounded_below(1.0)
    double = squares.of(2 * torch.eye(5).double())
    assert (double.bounded_below(0.24), double.bounded_below(0.26)) == (True, None)
    assert LogCosh().bounded_below(0.1) is None
    growing = HiddenUnits(random(5, 4), PoissonUnits(1.0))
    assert not (phi + growing).bounded_below(0.1)


def test_a_nan_of_one_sample_reaches_no_other():
    phi = LogSumExp(random(7, 4), 0.7)
    field, w, a = random(2, 3, 5, seed=8), random(2, 4, 5, seed=3), per_sample(0.3, 0.4)

    def solved(w, a):
        shared = random(7, 5, seed=5).requires_grad_()
        energy = AnchoredEnergy(a * (0.3 * phi.of(w) + LogSumExp(shared, 0.5)), field, 0.5)
        solution = solve(energy, field, solver=Anderson(rtol=1e-10), on_failure="ignore")
        return solution, torch.autograd.grad(solution.value[1].sum(), shared)[0]

    clean, gradient = solved(w, a)
    for bad in ((w.index_fill(0, torch.tensor([0]), torch.nan), a), (w, per_sample(math.nan, 0.4))):
        found, other = solved(*bad)
        assert found.status.tolist() == [[Status.NONFINITE] * 3, [Status.CONVERGED] * 3]
        torch.testing.assert_close(found.value[1], clean.value[1])
        torch.testing.assert_close(other, gradient)


def test_a_weight_that_left_its_range_after_the_check_gives_nan():
    weight = per_sample(1.0, 1.0)
    made, z = weight * LogSumExp(random(7, 5), 0.7), random(2, 3, 5)
    weight[0] = -1.0
    assert made.mean(z)[0].isnan().all()
    assert made.mean(z)[1].isfinite().all()


def test_what_a_part_hides_is_found_and_what_this_library_makes_is_not_looked_for():
    hidden = random(5).requires_grad_()

    class Hiding(LogCosh):
        def value(self, z):
            return super().value(z + hidden)

    field = random(2, 3, 5)
    phi = LogSumExp(random(7, 5), 0.7)
    with pytest.raises(ValueError, match="requires grad but is not declared"):
        solve(AnchoredEnergy(0.1 * Hiding() + phi, field, 0.5), field)
    solve(AnchoredEnergy(0.1 * LogCosh() + phi, field, 0.5), field, solver=Picard())


def test_a_sum_of_problems_of_different_events_is_refused():
    class OfSamples(Potential):
        event_ndim = 2

        def value(self, z):
            return z.square().sum((-1, -2))

    with pytest.raises(ValueError, match=r"`terms of a sum` must have the same event_ndim.* got 1 and 2"):
        LogSumExp(torch.ones(7, 5), 0.7) + OfSamples()
    z = random(2, 3, 5)
    both = 0.5 * OfSamples() + OfSamples().of(2 * torch.eye(5).double())
    assert both.event_ndim == 2
    torch.testing.assert_close(both.value(z), 4.5 * z.square().sum((-1, -2)))
    with pytest.raises(ValueError, match=r"`LogCosh.value` must return one number per sample, shape \(2,\)"):
        type("LogCosh", (LogCosh,), {"event_ndim": 2})().mean(z)
