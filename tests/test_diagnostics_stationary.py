"""`diagnostics.stationary_points`: against roots by SciPy, energies whose points are known, and the sum of Morse."""

import pytest
import torch
from scipy.optimize import root
from scipy.special import softmax

from implicit_attention import (
    AnchoredEnergy,
    EnergyFunction,
    LogSumExp,
)
from implicit_attention.diagnostics import stationary_points
from implicit_attention.testing.numerics import random

KEYS = torch.tensor([(1.2, 0.3), (-0.8, 1.1), (-0.4, -1.3), (0.9, -0.9), (-1.3, -0.1), (0.2, 0.6)]).double()


def plane(side=25, reach=2.0):
    line = torch.linspace(-reach, reach, side, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


def function(energy, *tensors):
    return EnergyFunction(energy, *tensors, event_ndim=1)


def test_a_double_well_has_two_minima_and_a_saddle():
    well = function(lambda z: (z[..., 0].square() - 1).square() / 4 + z[..., 1].square())
    found = stationary_points(well, plane())
    assert found.kind == ["minimum", "minimum", "saddle"]
    expected = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]).double()
    assert torch.cdist(found.value, expected).amin(-1).max() < 1e-9
    torch.testing.assert_close(found.energy, torch.tensor([0.0, 0.0, 0.25]).double())
    torch.testing.assert_close(found.curvatures, torch.tensor([[2.0, 2.0], [2.0, 2.0], [-1.0, 2.0]]).double())
    torch.testing.assert_close(found.of_kind("saddle"), torch.zeros(1, 2).double(), atol=1e-9, rtol=0)


def test_waves_have_as_many_maxima_as_minima_and_twice_as_many_saddles():
    # cos x + cos y on (-pi/2, 7 pi/2)^2: extrema at multiples of pi.
    waves = function(lambda z: z.cos().sum(-1))
    starts = plane(41, 1.99 * torch.pi) + 1.5 * torch.pi
    found = stationary_points(waves, starts)
    inside = ((found.value > -1.5) & (found.value < 3.5 * torch.pi - 0.1)).all(-1)
    kinds = [kind for kind, own in zip(found.kind, inside.tolist(), strict=True) if own]
    assert [kinds.count(kind) for kind in ("minimum", "saddle", "maximum")] == [4, 8, 4]
    assert (found.value / torch.pi - (found.value / torch.pi).round()).abs().max() < 1e-7


@pytest.mark.parametrize("sharpness", [0.1, 0.5, 1.0, 2.0, 5.0])
def test_points_are_the_roots_that_scipy_finds_and_their_kinds_sum_to_one(sharpness):
    potential = LogSumExp(KEYS, sharpness * 2**0.5)
    starts = plane()
    found = stationary_points(AnchoredEnergy(potential, starts), starts)
    counts = {kind: found.kind.count(kind) for kind in ("minimum", "saddle", "maximum")}
    assert counts["minimum"] - counts["saddle"] + counts["maximum"] == 1

    keys, beta = KEYS.numpy(), sharpness * 2**0.5

    def gradient(z):
        return z - softmax(beta * keys @ z) @ keys

    # The region that leads to the maximum is small at large beta.
    answers = [root(gradient, start.numpy(), tol=1e-13) for start in torch.cat([plane(15), plane(9, 0.1)])]
    roots = torch.stack([torch.from_numpy(a.x) for a in answers if abs(a.fun).max() < 1e-11])
    assert torch.cdist(roots, found.value).amin(-1).max() < 1e-6
    assert torch.cdist(found.value, roots).amin(-1).max() < 1e-6


def test_energy_and_curvature_are_those_of_autograd():
    potential, x = LogSumExp(random(9, 3), 4.0), random(1, 3, seed=1)
    starts = random(200, 3, seed=2)
    found = stationary_points(AnchoredEnergy(potential, x.expand(200, 3), 0.2), starts)

    def energy(z):
        scores = 4.0 * potential.keys @ z
        return z.square().sum() / 2 - 0.2 * (z * x[0]).sum() - 0.8 * scores.logsumexp(0) / 4

    assert len(found) >= 3
    assert (found.energy.diff() >= 0).all()
    for z, value, curvatures, kind in zip(found.value, found.energy, found.curvatures, found.kind, strict=True):
        torch.testing.assert_close(energy(z), value)
        assert torch.autograd.functional.jacobian(energy, z).norm() < 1e-8
        hessian = torch.autograd.functional.hessian(energy, z)
        torch.testing.assert_close(torch.linalg.eigvalsh(hessian), curvatures)
        assert kind == ("minimum" if (curvatures > 0).all() else "saddle" if (curvatures > 0).any() else "maximum")


def test_what_is_not_stationary_is_dropped():
    # 3 x^2 + 1 has a lowest place and no root; a well falls off, and far from it nothing pulls.
    slope = function(lambda z: (z**3 + z).sum(-1))
    assert len(stationary_points(slope, plane())) == 0
    well = function(lambda z: -(-z.square().sum(-1) / 2).exp())
    for reach in (6.0, 12.0, 60.0):
        found = stationary_points(well, plane(21, reach))
        assert found.kind == ["minimum"]
        assert found.value.norm() < 1e-9


def test_a_small_gradient_far_from_every_point_is_not_enough():
    # |grad E| is 4e-9 at the nearest of these starts but 0, where only the rest of the way tells.
    well = function(lambda z: -(-z.square().sum(-1) / 2).exp())
    starts = torch.tensor([[0.0, 0.0], [6.5, 0.0], [0.0, 6.8], [5.0, 4.5]]).double()
    assert stationary_points(well, starts, steps=0).value.tolist() == [[0.0, 0.0]]


def test_a_step_that_is_too_long_is_made_shorter():
    # Newton's own steps towards the middle of this valley overshoot, each further than the last.
    valley = function(lambda z: (1 + z.square()).sqrt().sum(-1))
    found = stationary_points(valley, torch.tensor([[5.0, 3.0]]).double())
    assert found.kind == ["minimum"]
    assert found.value.abs().max() < 1e-9


def test_starts_that_are_not_finite_touch_no_other():
    starts = plane(9)
    starts[3], starts[7, 1] = torch.nan, torch.inf
    well = function(lambda z: (z - 1).square().sum(-1))
    torch.testing.assert_close(stationary_points(well, starts).value, torch.ones(1, 2).double())
    nothing = stationary_points(well, starts[3:4])
    assert (len(nothing), nothing.value.shape, nothing.kind) == (0, (0, 2), [])


def test_float32_is_answered_in_float64_and_strides_do_not_matter():
    starts = plane(9)
    exact = stationary_points(AnchoredEnergy(LogSumExp(KEYS, 3.0), starts), starts)
    single = starts.float().T.contiguous().T
    rough = stationary_points(AnchoredEnergy(LogSumExp(KEYS.float(), 3.0), single), single)
    assert rough.value.dtype == torch.float64
    assert rough.kind == exact.kind
    assert (rough.value - exact.value).abs().max() < 1e-5


def test_no_steps_keep_starts_that_are_stationary():
    starts = torch.tensor([[1.0, 1.0], [0.5, 1.0]]).double()
    well = function(lambda z: (z - 1).square().sum(-1))
    assert stationary_points(well, starts, steps=0).value.tolist() == [[1.0, 1.0]]


def test_rows_of_one_energy_may_differ_in_what_it_does_not_read():
    starts = plane(9)
    assert len(stationary_points(AnchoredEnergy(LogSumExp(KEYS, 3.0), starts), starts)) > 0
