"""SphereEnergy: the contract, numbers by other routes, states on the sphere whatever the solver, exact gradients."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F

from implicit_attention import (
    Anderson,
    Broyden,
    ConvergenceError,
    GradientDescent,
    LogSumExp,
    NewtonKrylov,
    Picard,
    Potential,
    SquaredScores,
    Status,
    solve,
)
from implicit_attention.energies import SphereEnergy
from implicit_attention.potentials import Exponential, Polynomial, SelfAttention, Softmax1
from implicit_attention.testing.energy import EnergyContract
from implicit_attention.testing.numerics import dense_jacobian, random

EXACT = Anderson(rtol=0, atol=1e-13, max_steps=2000)
SOLVERS = [EXACT, *(method(rtol=0, atol=1e-13, max_steps=2000) for method in (Picard, Broyden, NewtonKrylov))]


def per_row(number):
    return number[:, None, None] if isinstance(number, torch.Tensor) else number


class SphereContract(EnergyContract):
    """Three tests are replaced: f(z) - z is -grad E in other units, and has a part along z."""

    def pull(self, energy, z):
        """|g|/r from the definition."""
        mean, anchor = energy.potential.mean(energy.retract(z)), per_row(energy.anchor)
        g = anchor * energy.field + (1 - anchor) * mean
        g = g - g.mean(-1, keepdim=True) if energy.mean_zero else g
        return g.norm(dim=-1, keepdim=True) / per_row(energy.radius)

    def test_residual_of_the_map_is_the_negative_gradient(self):
        # Along the sphere, and with the factor r/|g|.
        energy, z = self.make(), self.make().retract(self.state())
        r = energy.fixed_point_map(z) - z
        along = r - z * (r * z).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True)
        torch.testing.assert_close(along, -energy.gradient(z) / self.pull(energy, z), rtol=1e-11, atol=1e-12)

    def test_linearization_is_the_jacobian_of_the_map(self):
        # At a solution: nowhere else is the Jacobian symmetric; of tokens together, where each has its |g|, not there.
        energy, v = self.make(), self.state(2)
        z = solve(energy, self.state(), solver=EXACT).value
        flat, linear = v.reshape(*self.lead(), -1), energy.linearize(z)
        jacobian = dense_jacobian(energy, z)
        for product, matrix in ((linear.jvp, jacobian), (linear.vjp, jacobian.mT)):
            expected = (matrix @ flat[..., None]).squeeze(-1).reshape(self.shape)
            torch.testing.assert_close(product(v), expected, rtol=1e-9, atol=1e-10)
        assert energy.symmetric == torch.allclose(jacobian, jacobian.mT, rtol=1e-9, atol=1e-10)

    def test_stationary_means_fixed(self):
        # |grad E| is the residual times |g|/r.
        energy = self.make()
        solution = solve(energy, self.state(), solver=Anderson(rtol=0.0, atol=1e-10, max_steps=2000))
        gradient = energy.gradient(solution.value) / self.pull(energy, solution.value)
        assert float(gradient.flatten(len(self.lead())).norm(dim=-1).max()) <= 1e-10

    def test_plain_steps_descend_where_that_is_promised(self):
        # By |g|/(2 r) |f(z) - z|^2, from a state on the sphere.
        energy = self.make()
        assert energy.plain_steps_descend == energy.potential.convex
        for seed in range(10 if energy.potential.convex else 0):
            z = energy.retract(self.state(seed))
            mapped = energy.fixed_point_map(z)
            least = (self.pull(energy, z) / 2 * (mapped - z).square()).flatten(len(self.lead())).sum(-1)
            assert bool((energy.energy(z) - energy.energy(mapped) >= least - 1e-12).all())

    def test_the_hessian_on_the_tangent_space(self):
        # (|g|/r) P - (1 - anchor) P Cov P at a solution, dense.
        energy, v = self.make(), self.state(2)
        z = solve(energy, self.state(), solver=EXACT).value

        def tangential(t):
            t = t - t.mean(-1, keepdim=True) if energy.mean_zero else t
            return t - z * (t * z).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True)

        moved = energy.potential.covariance_product(z, tangential(v))
        expected = self.pull(energy, z) * tangential(v) - (1 - per_row(energy.anchor)) * tangential(moved)
        torch.testing.assert_close(energy.hessian_product(z, v), expected, rtol=1e-9, atol=1e-10)


class TestLogSumExp(SphereContract):
    def make(self):
        return SphereEnergy(LogSumExp(random(2, 7, 5), 0.6), random(2, 3, 5, seed=3), 0.3)


class TestTensors(SphereContract):
    def make(self):
        numbers = {"anchor": [0.2, 0.9], "radius": [0.4, 3.0]}
        numbers = {name: torch.tensor(t, dtype=torch.float64) for name, t in numbers.items()}
        mask = random(2, 3, 7, seed=9) > 0
        mask[0, 1] = False
        beta = torch.tensor([0.5, 1.1], dtype=torch.float64)
        potential = LogSumExp(random(2, 7, 5), beta, mask=mask, bias=random(2, 3, 7, seed=5))
        return SphereEnergy(potential, random(2, 3, 5, seed=3), **numbers)


class TestMeanZero(SphereContract):
    def make(self):
        potential = LogSumExp(random(2, 7, 5), 0.6)
        return SphereEnergy(potential, random(2, 3, 5, seed=3), 0.3, math.sqrt(5), mean_zero=True)


class TestUnboundedPotential(SphereContract):
    def make(self):
        return SphereEnergy(Polynomial(random(2, 7, 5), 0.7, degree=3), random(2, 3, 5, seed=3), 0.3, 2.0)


class TestTokensTogether(SphereContract):
    def make(self):
        return SphereEnergy(SelfAttention(0.6), random(2, 3, 5, seed=3), 0.6)


class ValueOnly(Potential):
    def __init__(self, weights):
        self.weights = weights

    def value(self, z):
        return (z @ self.weights).square().log1p().sum(-1)


class TestNonConvexPotential(SphereContract):
    def make(self):
        return SphereEnergy(ValueOnly(random(5, 4)), random(2, 3, 5, seed=3), 0.3)


KEYS = torch.tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]], dtype=torch.float64)
START = torch.tensor([[0.6, -0.3]], dtype=torch.float64)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
def test_ground_truth(solver):
    phi = LogSumExp(KEYS, 1.5)
    value = solve(SphereEnergy(phi, START), START, solver=solver).value
    assert value[0].tolist() == pytest.approx([-0.361665266640, 0.932308015039], abs=1e-12)
    assert phi.value(value).item() == pytest.approx(1.492906227551, abs=1e-12)
    assert phi.mean(value).norm().item() == pytest.approx(0.961057829786, abs=1e-12)


def test_the_minimum_over_the_angle():
    # Another route: E along the circle, without derivatives of this library.
    def energy(angle):
        z = np.array([math.cos(angle), math.sin(angle)])
        return -math.log(np.exp(1.5 * KEYS.numpy() @ z).sum()) / 1.5

    angle = scipy.optimize.minimize_scalar(energy, bounds=(1.0, 2.5), method="bounded", options={"xatol": 1e-10}).x
    solution = solve(SphereEnergy(LogSumExp(KEYS, 1.5), START), START, solver=EXACT)
    assert solution.value[0].tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-7)
    assert solution.energy.item() == pytest.approx(energy(angle), abs=1e-12)


@pytest.mark.parametrize("solver", SOLVERS[:1] + SOLVERS[2:], ids=lambda solver: type(solver).__name__)
def test_squared_scores_are_power_iteration(solver):
    keys = random(3, 9, 6)
    values, vectors = torch.linalg.eigh(keys.mT @ keys)
    # Random starts, and one beside the second eigenvector, which is a saddle.
    start = torch.stack([random(3, 6), vectors[..., -2] + 1e-3 * vectors[..., -1]], -2)
    energy = SphereEnergy(SquaredScores(keys, 0.7), start, radius=1.5)
    solution = solve(energy, start, solver=solver)
    overlap = (solution.value * vectors[..., None, :, -1]).sum(-1).abs()
    torch.testing.assert_close(overlap, torch.full_like(overlap, 1.5), rtol=1e-12, atol=0)
    expected = -0.7 / 2 * values[:, -1:] * 1.5**2
    torch.testing.assert_close(solution.energy, expected.expand(3, 2), rtol=1e-12, atol=0)


def test_mean_zero_is_layer_norm():
    potential, field = LogSumExp(random(2, 7, 5), 0.6), random(2, 3, 5, seed=3)
    energy = SphereEnergy(potential, field, 0.3, math.sqrt(5), mean_zero=True)
    z = field
    for _ in range(400):
        z = F.layer_norm(0.3 * field + 0.7 * potential.mean(z), (5,), eps=0.0)
    torch.testing.assert_close(solve(energy, field, solver=EXACT).value, z, rtol=1e-12, atol=1e-12)


def test_acceleration_is_not_refused_where_the_pull_is_small():
    # |g|/r is about .1, so that E falls by much less than |f(z) - z|^2/4.
    field = random(64, 16, seed=3)
    energy = SphereEnergy(LogSumExp(0.25 * random(32, 16), 1.0), field, radius=6.0)
    tolerance = {"rtol": 0.0, "atol": 1e-9, "max_steps": 5000}
    plain, mixed = (solve(energy, field, solver=s(**tolerance)) for s in (Picard, Anderson))
    assert int(mixed.num_evals.sum()) < 0.6 * int(plain.num_evals.sum())


LOOSE = [method(rtol=1e-2) for method in (Anderson, Broyden, NewtonKrylov)]
LOOSE += [GradientDescent(0.4, rtol=1e-2), Picard(damping=0.5)]


@pytest.mark.parametrize("solver", LOOSE, ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("mean_zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_value_lies_on_the_sphere_with_its_own_residual(solver, mean_zero, dtype):
    field = random(2, 40, 5, seed=3, dtype=dtype)
    radius = torch.tensor([0.3, 20.0], dtype=dtype)
    energy = SphereEnergy(LogSumExp(random(2, 7, 5, dtype=dtype), 1.0), field, 0.2, radius, mean_zero=mean_zero)
    solution = solve(energy, 5 * field, solver=solver)
    eps = torch.finfo(dtype).eps
    lengths = solution.value.norm(dim=-1)
    torch.testing.assert_close(lengths, radius[:, None].expand(2, 40), rtol=8 * eps, atol=0)
    if mean_zero:
        assert bool((solution.value.sum(-1).abs() <= 40 * eps * radius[:, None]).all())
    residual = (energy.fixed_point_map(solution.value) - solution.value).norm(dim=-1)
    torch.testing.assert_close(residual, solution.residual, rtol=1e-3, atol=20 * eps)
    assert bool(solution.converged.all())


def parts(requires_grad=False):
    """Keys, beta, bias, field, anchor, radius."""
    given = [random(2, 6, 4), torch.tensor([0.5, 1.1]), random(2, 3, 6, seed=5), random(2, 3, 4, seed=3)]
    given += [torch.tensor([0.3, 0.6]), torch.tensor([0.7, 2.0])]
    return [t.double().requires_grad_(requires_grad) for t in given]


def solved(keys, beta, bias, field, anchor, radius, mean_zero=False, **options):
    energy = SphereEnergy(LogSumExp(keys, beta, bias=bias), field, anchor, radius, mean_zero=mean_zero)
    start = random(2, 3, 4, seed=8, dtype=field.dtype)
    return solve(energy, start, **({"solver": EXACT} | options)).value


@pytest.mark.parametrize("mean_zero", [False, True])
def test_gradcheck_and_gradgradcheck_through_solve(mean_zero):
    keys, bias, field = (random(n, 3, seed=i).requires_grad_() for i, n in enumerate((3, 2, 2)))
    beta, anchor, radius = (torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in (0.8, 0.4, 1.7))

    def value(keys, beta, bias, field, anchor, radius):
        energy = SphereEnergy(LogSumExp(keys, beta, bias=bias), field, anchor, radius, mean_zero=mean_zero)
        return solve(energy, random(2, 3, seed=8), solver=EXACT).value[..., :2]

    tensors = (keys, beta, bias, field, anchor, radius)
    assert torch.autograd.gradcheck(value, tensors)
    assert torch.autograd.gradgradcheck(value, tensors, fast_mode=True)


# Rows that are special.


def test_a_start_at_zero_goes_where_the_field_and_the_keys_pull():
    energy = SphereEnergy(LogSumExp(KEYS, 1.5), START, 0.2)
    solution = solve(energy, torch.zeros_like(START), solver=EXACT)
    g = 0.2 * START + 0.8 * KEYS.mean(0)
    torch.testing.assert_close(solution.value, solve(energy, g, solver=EXACT).value)
    assert solution.value.norm().item() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("vmapped", [False, True])
def test_no_pull_leaves_the_state_where_it_is_and_its_length_to_the_radius(vmapped):
    mask = torch.tensor([[True] * 4, [False] * 4])
    start = START.expand(2, 2).contiguous()

    def solution(keys, radius):
        energy = SphereEnergy(LogSumExp(keys, 1.5, mask=mask), start, 0.0, radius)
        return solve(energy, start, solver=EXACT, on_failure="ignore")

    def entry(keys, radius):
        return solution(keys, radius).value[1, 0]

    radius = torch.tensor([0.5, 2.0], dtype=torch.float64)
    assert solution(KEYS, 2.0).converged.tolist() == [True, True]
    torch.testing.assert_close(solution(KEYS, 2.0).value[1], 2 * F.normalize(START[0], dim=0))
    if vmapped:
        by_keys, by_radius = torch.func.vmap(torch.func.grad(entry, argnums=(0, 1)), in_dims=(None, 0))(KEYS, radius)
    else:
        leaves = KEYS.clone().requires_grad_(), radius[1].clone().requires_grad_()
        by_keys, by_radius = torch.autograd.grad(entry(*leaves), leaves)
    assert by_keys.abs().max() == 0
    torch.testing.assert_close(by_radius, F.normalize(START[0], dim=0)[0].expand_as(by_radius))


def test_bad_rows_are_not_finite_and_touch_no_other():
    # A row of NaN, and one whose start and pull are both zero.
    start = random(1, 4, 5, seed=3)
    expected = solve(SphereEnergy(SquaredScores(random(7, 5), 1.0), start, 0.0), start, solver=EXACT).value
    start[0, 1, 2], start[0, 2] = torch.nan, 0.0
    keys = random(7, 5).requires_grad_()
    energy = SphereEnergy(SquaredScores(keys, 1.0), start, 0.0)
    solution = solve(energy, start, solver=EXACT, on_failure="ignore")
    assert solution.status.tolist() == [[0, Status.NONFINITE, Status.NONFINITE, 0]]
    assert torch.equal(solution.value[0, [0, 3]].detach(), expected[0, [0, 3]])
    (by_keys,) = torch.autograd.grad(solution.value[0, [0, 3]].square()[:, 0].sum(), keys)
    assert bool(torch.isfinite(by_keys).all())
    with pytest.raises(ConvergenceError, match="not finite at the initial state"):
        solve(energy, start)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_pulls_of_any_size_have_a_direction(scale):
    # In float32 the square of either pull is 0 or infinite.
    keys = torch.tensor([[3.0, 4.0]])
    energy = SphereEnergy(scale * Softmax1(keys, 1.0), torch.ones(1, 2), 0.0)
    torch.testing.assert_close(solve(energy, torch.ones(1, 2)).value, torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(energy.retract(scale * keys), torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("size", [3, 6, 7, 11])
def test_entries_that_are_all_the_same_have_no_direction_of_mean_zero(size):
    # Their mean is off by rounding.
    field = torch.full((1, 1, size), 0.7) * torch.linspace(0.1, 1.3, 40)[:, None, None]
    energy = SphereEnergy(LogSumExp(torch.ones(2, size), 1.0), field, 0.5, mean_zero=True)
    assert energy.retract(field).abs().max() == 0
    status = solve(energy, field, on_failure="ignore").status
    assert bool((status == Status.NONFINITE).all())


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_unbounded_potentials_have_solutions(degree):
    field = random(2, 8, 5, seed=3)
    for potential in (Polynomial(random(2, 7, 5), 2.0, degree=degree), Exponential(random(2, 7, 5), 2.0)):
        solution = solve(SphereEnergy(potential, field, 0.1, 3.0), field, solver=Anderson(rtol=1e-9), trace=True)
        assert bool(solution.converged.all())
        assert bool((solution.trace.energy[-1] <= solution.trace.energy[0] + 1e-12).all())


def test_a_potential_that_is_not_convex_is_descended():
    field = random(2, 16, 5, seed=3)
    energy = SphereEnergy(ValueOnly(3 * random(5, 4)), field, 0.1)
    solution = solve(energy, field, solver=Anderson(rtol=1e-9, max_steps=2000))
    assert bool((solution.energy <= energy.energy(field) + 1e-12).all())


# Arguments.
