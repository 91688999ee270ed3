"""Epanechnikov: the contract, numbers by other routes, mean shift, states out of range, gradients in closed form."""

import math

import pytest
import torch

from implicit_attention import (
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    GradientDescent,
    NewtonKrylov,
    Picard,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.energies import Epanechnikov
from implicit_attention.testing.energy import EnergyContract
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import Allocations

SOLVERS = [Anderson(), Picard(), Broyden(), NewtonKrylov(), Picard(damping=0.3, max_steps=2000)]


def naive(keys, beta, eps, z, weights=None):
    """E, the mean and W/S from the definition, with an (N, M, D) tensor."""
    squares = (z[..., :, None, :] - keys[..., None, :, :]).square().sum(-1)
    kernel = (1 - beta / 2 * squares).relu()
    weights = torch.ones_like(kernel) if weights is None else weights.expand_as(kernel)
    near, total = weights * (kernel > 0), (weights * kernel).sum(-1) + eps
    mean = (near[..., None] * keys[..., None, :, :]).sum(-2) / near.sum(-1, keepdim=True)
    return -total.log() / beta, mean, near.sum(-1) / total


class EpanechnikovContract(EnergyContract):
    """Two tests are replaced, as f(z) - z is -grad E divided by a = W/S."""

    def steepness(self, energy, z):
        """The number a of each row that makes a (f(z) - z) of -grad E."""
        r = energy.fixed_point_map(z) - z
        return -(energy.gradient(z) * r).sum(-1) / r.square().sum(-1)

    def test_residual_of_the_map_is_the_negative_gradient(self):
        energy, z = self.make(), self.state()
        r, steepness = energy.fixed_point_map(z) - z, self.steepness(energy, z)[..., None]
        assert bool((steepness > 0).all())
        torch.testing.assert_close(steepness * r, -energy.gradient(z))

    def test_plain_steps_descend_where_that_is_promised(self):
        # By |f(z) - z|^2/(2 (1 + eps/W)): with W = a S and S = exp(-beta E), eps included.
        energy = self.make()
        for seed in range(10):
            z = self.state(seed)
            mapped, beta = energy.fixed_point_map(z), torch.as_tensor(self.beta)[..., None]
            weight = self.steepness(energy, z) * (-beta * energy.energy(z)).exp()
            bound = (mapped - z).square().sum(-1) / 2 / (1 + energy.eps / weight)
            fall = energy.energy(z) - energy.energy(mapped)
            assert bool(((fall >= bound - 1e-12) | energy.outside(z)).all())


class TestPlain(EpanechnikovContract):
    beta = 0.1

    def make(self):
        return Epanechnikov(random(2, 7, 5), self.beta)


class TestEverything(EpanechnikovContract):
    beta = torch.tensor([0.05, 0.08], dtype=torch.float64)

    def make(self):
        mask = random(2, 3, 7, seed=9) > -0.5
        return Epanechnikov(random(2, 7, 5), self.beta, 0.3, mask=mask, bias=random(2, 3, 7, seed=5))


class TestFoldedBatch(EpanechnikovContract):
    # One set of keys per head for all samples: an axis that is kept comes after one that is folded into rows.
    shape, beta = (2, 4, 3, 5), torch.tensor([[0.05], [0.08]], dtype=torch.float64)

    def make(self):
        return Epanechnikov(random(1, 4, 7, 5), self.beta, 0.01)

    def test_select_takes_problems(self):
        energy, z = self.make(), self.state()
        chosen = energy.select(torch.tensor([2, 0]).expand(2, 4, 2))
        torch.testing.assert_close(chosen.fixed_point_map(z[..., [2, 0], :]), energy.fixed_point_map(z)[..., [2, 0], :])


class TestSharedKeys(EpanechnikovContract):
    # Keys without a batch: the axes of the batch are folded into rows.
    beta = 0.1

    def make(self):
        return Epanechnikov(random(7, 5), self.beta, 0.01)


KEYS = torch.tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]], dtype=torch.float64)
START = torch.tensor([[0.6, -0.3]], dtype=torch.float64)


@pytest.mark.parametrize("solver", SOLVERS[:4], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize(
    ("beta", "value", "mean"),
    [
        (0.5, -1.528608749753, [-0.05, 0.075]),
        (1.0, -0.270027137213, [0.65, -0.25]),
        (2.0, 0.239017900471, [0.65, -0.25]),
    ],
)
def test_ground_truth(beta, value, mean, solver):
    energy = Epanechnikov(KEYS, beta)
    by_hand, shifted, _ = naive(KEYS, beta, 0.0, START)
    assert energy.energy(START).item() == pytest.approx(value, abs=1e-12)
    assert by_hand.item() == pytest.approx(value, abs=1e-12)
    assert energy.fixed_point_map(START)[0].tolist() == pytest.approx(mean, abs=1e-15)
    assert shifted[0].tolist() == pytest.approx(mean, abs=1e-15)
    # From there the same keys are in range.
    solution = solve(energy, START, solver=solver)
    assert solution.value[0].tolist() == pytest.approx(mean, abs=1e-15)
    assert (solution.residual.item(), solution.status.item()) == (pytest.approx(0, abs=1e-15), Status.CONVERGED)
    assert energy.gradient(solution.value).abs().max() < 1e-15


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(2, 7, 3), (1, 7, 3), (7, 3)], ids=["own", "one", "shared"])
def test_energy_map_and_hessian_are_those_of_the_definition(eps, shape, biased):
    keys, z, v = random(*shape), random(2, 6, 3, seed=1), random(2, 6, 3, seed=2)
    bias, mask = random(2, 6, 7, seed=5), random(2, 6, 7, seed=6) > -0.8
    weights = (bias.exp() if biased else 1.0) * mask
    energy = Epanechnikov(keys, 0.3, eps, mask=mask, bias=bias if biased else None)
    value, mean, steepness = naive(keys.expand(2, 7, 3), 0.3, eps, z, weights)
    torch.testing.assert_close(energy.gradient(z), steepness[..., None] * (z - mean), rtol=1e-12, atol=1e-13)
    assert not bool(energy.outside(z).any())
    torch.testing.assert_close(energy.energy(z), value, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(energy.fixed_point_map(z), mean, rtol=1e-12, atol=1e-13)
    h = 1e-6
    ahead, behind = (naive(keys.expand(2, 7, 3), 0.3, eps, z + s * h * v, weights) for s in (1, -1))
    slope = (energy.gradient(z) * v).sum(-1)
    torch.testing.assert_close(slope, (ahead[0] - behind[0]) / (2 * h), rtol=1e-7, atol=1e-8)
    curve = (ahead[0] - 2 * value + behind[0]) / h**2
    torch.testing.assert_close((energy.hessian_product(z, v) * v).sum(-1), curve, rtol=1e-2, atol=2e-3)
    assert bool((energy.hessian_product(z, v) * v).sum(-1).gt(0).all())


def test_the_energy_is_not_convex_and_each_key_may_be_a_minimum():
    keys = torch.tensor([[0.0], [3.0]])
    energy = Epanechnikov(keys, 1.0, 0.1)
    states = torch.tensor([[0.0], [1.5], [3.0]])
    ends = energy.energy(states)
    assert ends[1] > (ends[0] + ends[2]) / 2
    found = solve(energy, torch.tensor([[0.9], [2.0]]))
    assert found.value.tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize(
    "solver", SOLVERS, ids=lambda solver: f"{type(solver).__name__}{getattr(solver, 'damping', '')}"
)
def test_mean_shift_through_several_cells_ends_at_the_mean_of_the_keys_in_range(solver):
    keys, start = random(2, 200, 2), random(2, 60, 2, seed=1)
    energy = Epanechnikov(keys, 8.0)
    solution = solve(energy, start, solver=solver, on_failure="ignore")
    here = ~energy.outside(start)
    assert torch.equal(solution.converged, here)
    shifted = naive(keys, 8.0, 0.0, solution.value)[1]
    size = torch.linalg.vector_norm(shifted - solution.value, dim=-1)
    assert bool((size[here] <= solution.tolerance[here] + 1e-12).all())
    assert int(solution.num_steps.max()) > 3


# Out of range.


@pytest.mark.parametrize("solver", SOLVERS[:4], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_a_state_with_no_key_in_range_stays_and_its_status_says_so(eps, solver):
    start = torch.tensor([[0.6, -0.3], [9.0, 9.0]], dtype=torch.float64)
    energy = Epanechnikov(KEYS, 2.0, eps)
    solution = solve(energy, start, solver=solver, on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.OUT_OF_RANGE]
    assert solution.failed.tolist() == [False, True]
    assert torch.equal(solution.value[1], start[1])
    assert solution.residual[1] == 0
    expected = math.inf if eps == 0 else -math.log(eps) / 2
    assert solution.energy[1].item() == pytest.approx(expected)
    assert energy.gradient(start)[1].abs().max() == 0
    assert energy.hessian_product(start, start)[1].abs().max() == 0
    with pytest.raises(ConvergenceError, match=r"out of the range .*; no key is within sqrt\(2/beta\) of the state"):
        solve(energy, start, solver=solver)
    with pytest.warns(ConvergenceWarning, match="start nearer to the keys"):
        solve(energy, start, solver=solver, on_failure="warn")


def test_a_row_without_keys_is_out_of_range_with_gradient_zero():
    mask = torch.tensor([[True] * 4, [False] * 4])
    keys, bias = KEYS.clone().requires_grad_(), torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    energy = Epanechnikov(keys, 1.0, mask=mask, bias=bias)
    solution = solve(energy, START.expand(2, 2).contiguous(), on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.OUT_OF_RANGE]
    gradients = torch.autograd.grad(solution.value[1].sum(), (keys, bias))
    assert all(t.abs().max() == 0 for t in gradients)


def test_a_step_that_leaves_the_support_is_not_kept():
    # E is infinite there while the residual is 0, better than anywhere else.
    energy = Epanechnikov(KEYS, 2.0)
    far = solve(energy, START, solver=GradientDescent(100.0, max_steps=50), on_failure="ignore")
    assert far.status.item() == Status.OUT_OF_RANGE


def test_nan_in_one_row_or_in_a_masked_key_touches_no_other():
    keys, start = KEYS.clone(), START.expand(3, 2).clone()
    expected = solve(Epanechnikov(keys, 1.0), START).value[0]
    start[1, 0] = torch.nan
    solution = solve(Epanechnikov(keys, 1.0), start, on_failure="ignore")
    assert solution.status.tolist() == [0, Status.NONFINITE, 0]
    assert torch.equal(solution.value[[0, 2]], expected.expand(2, 2))
    keys[3, 1] = torch.nan
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 3] = torch.tensor([False, True, False])
    held = keys.requires_grad_()
    solution = solve(Epanechnikov(held, 1.0, mask=mask), START.expand(3, 2).contiguous(), on_failure="ignore")
    assert solution.status.tolist() == [0, Status.NONFINITE, 0]
    torch.testing.assert_close(solution.value[[0, 2]].detach(), expected.expand(2, 2))
    (by_keys,) = torch.autograd.grad(solution.value[0].sum(), held)
    assert bool(torch.isfinite(by_keys).all())
    bias = torch.zeros(3, 4, dtype=torch.float64)
    bias[0, 0], bias[1, 3], bias[2, 3] = torch.nan, torch.inf, -torch.inf
    solution = solve(Epanechnikov(KEYS, 1.0, bias=bias), START.expand(3, 2).contiguous(), on_failure="ignore")
    assert solution.status.tolist() == [Status.NONFINITE, Status.NONFINITE, 0]
    for bad in (torch.nan, torch.inf):
        keys = KEYS.clone()
        keys[0, 0] = bad
        assert solve(Epanechnikov(keys, 1.0), START, on_failure="ignore").status.item() == Status.NONFINITE


# Gradients.


def test_the_derivative_of_an_equilibrium_is_the_weight_of_each_key():
    keys = KEYS.clone().requires_grad_()
    bias = torch.tensor([0.2, 0.0, -0.7, 0.4], dtype=torch.float64, requires_grad=True)
    beta = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    value = solve(Epanechnikov(keys, beta, bias=bias), START).value
    share = bias.detach()[[0, 2]].softmax(0)
    expected = torch.zeros(4, dtype=torch.float64)
    expected[[0, 2]] = share
    for i in range(2):
        by_keys, by_bias, by_beta = torch.autograd.grad(value[0, i], (keys, bias, beta), retain_graph=True)
        torch.testing.assert_close(by_keys[:, i], expected)
        assert by_keys[:, 1 - i].abs().max() == 0
        torch.testing.assert_close(by_bias, expected * (KEYS[:, i] - value[0, i].detach()))
        assert by_beta == 0


def test_gradcheck_gradgradcheck_and_unrolled_steps():
    bias = random(2, 4, seed=5).requires_grad_()
    keys, start = KEYS.clone().requires_grad_(), START.expand(2, 2).contiguous()

    def value(keys, bias, **options):
        return solve(Epanechnikov(keys, 1.0, 0.1, bias=bias), start, **options).value

    assert torch.autograd.gradcheck(value, (keys, bias))
    assert torch.autograd.gradgradcheck(value, (keys, bias))
    unrolled = {"solver": Picard(rtol=0, atol=0, max_steps=20), "adjoint": Unrolled()}
    weights = random(2, 2, seed=7)
    gradients = [torch.autograd.grad((value(keys, bias, **o) * weights).sum(), (keys, bias)) for o in ({}, unrolled)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_unrolled_steps_carry_the_start_of_a_row_that_stays():
    start = torch.tensor([[0.6, -0.3], [9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    solver = Picard(rtol=0, atol=0, max_steps=3)
    value = solve(Epanechnikov(KEYS, 1.0), start, solver=solver, adjoint=Unrolled()).value
    (by_start,) = torch.autograd.grad(value.sum(), start)
    assert by_start.tolist() == [[0, 0], [1, 1]]


# Precision.


def test_keys_far_from_the_origin_keep_their_distances_in_float32():
    # |z - k|^2 is about 1 where |k|^2 is about 1e8: products of the coordinates themselves would lose it.
    keys, start = random(50, 4).float(), random(9, 4, seed=1).float()
    shift = torch.full((4,), 4096.0)
    near, far = (Epanechnikov(keys + s, 0.2) for s in (0 * shift, shift))
    exact = Epanechnikov((keys + shift).double() - 4096, 0.2)
    moved = (start + shift) - 4096
    torch.testing.assert_close(far.energy(start + shift), exact.energy(moved.double()).float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(near.outside(start), far.outside(start + shift))


def test_large_biases_do_not_overflow():
    bias = torch.tensor([1000.0, 1000.0, 1000.0, 1000.0])
    energy = Epanechnikov(KEYS.float(), 1.0, bias=bias)
    plain = Epanechnikov(KEYS.float(), 1.0)
    torch.testing.assert_close(energy.energy(START.float()), plain.energy(START.float()) - 1000, rtol=1e-6, atol=0)
    # The weights of those in range are relative to each other, however heavy a key out of range is.
    low = Epanechnikov(KEYS.float(), 1.0, bias=torch.tensor([-1000.0, 500.0, -1000.0, 500.0]))
    torch.testing.assert_close(low.fixed_point_map(START.float()), torch.tensor([[0.65, -0.25]]))


def test_no_tensor_of_pairs_and_dimensions_is_made():
    keys, start = random(40, 16).requires_grad_(), random(30, 16, seed=1)
    with Allocations() as made:
        solve(Epanechnikov(keys, 0.05, mask=random(30, 40) > -1), start).value.sum().backward()
    assert made.largest <= 2 * 40 * 32


# Arguments.


@pytest.mark.parametrize("far", [0.0, 10.0, 100.0, 1000.0, 1e4])
@pytest.mark.parametrize("bias", [False, True])
def test_float32_tells_the_keys_in_range_of_far_groups(far, bias):
    generator = torch.Generator().manual_seed(0)
    spread = 0.2 * torch.randn(2, 20, 4, generator=generator)
    at = torch.tensor([far, -far])[:, None, None] / 2
    keys = (spread + at).flatten(0, 1)
    start = keys[::3] + 0.02 * torch.randn(14, 4, generator=generator)
    weights = torch.randn(14, 40, generator=generator) if bias else None
    wide = None if weights is None else weights.double()
    single, double = (Epanechnikov(k, beta=8.0, bias=b) for k, b in ((keys, weights), (keys.double(), wide)))
    # No key is so near the border of the range that rounding of the state decides.
    kernel = 1 - 4 * (start.double()[:, None] - keys.double()).square().sum(-1)
    clear = (kernel.abs() > 1e-4 * max(far, 1.0) ** 0.5).all(-1)
    assert clear.sum() > 4
    rounding = 1e-6 * max(far, 1.0)
    for asked in ("energy", "fixed_point_map", "gradient"):
        mine, truth = (getattr(e, asked)(s)[clear] for e, s in ((single, start), (double, start.double())))
        torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=20 * rounding)
    found, truth = solve(single, start), solve(double, start.double())
    assert bool(found.converged.all())
    # The same cells, unless a state passes a border within rounding on its way.
    same = (found.value.double() - truth.value).norm(dim=-1) < 20 * rounding
    assert same[clear].double().mean() > 0.9
