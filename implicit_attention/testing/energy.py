"""The contract of an energy: inherit `EnergyContract` and say how to make one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .._solve import solve
from ..energies import Energy
from ..problem import pullback
from ..solvers import Anderson
from .numerics import check_autocast, check_close, dense_jacobian, random


class EnergyContract:
    """Tests that every energy passes. A subclass defines `make()`, and `shape` of its states."""

    shape: tuple[int, ...] = (2, 3, 5)

    def make(self) -> Energy:
        raise NotImplementedError

    def state(self, seed: int = 1) -> Tensor:
        return random(*self.shape, seed=seed)

    def axes(self) -> tuple[int, ...]:
        """The axes of one problem."""
        return tuple(range(-self.make().event_ndim, 0))

    def lead(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.make().event_ndim]

    def test_one_number_per_problem(self) -> None:
        assert self.make().energy(self.state()).shape == self.lead()

    def test_autocast_changes_no_bit(self) -> None:
        problem = self.make()
        floats = (t.float() if t.is_floating_point() else t for t in problem.tensors())
        problem, z, v = problem.replace(*floats), self.state().float(), self.state(2).float()
        for method in (problem.energy, problem.gradient, problem.fixed_point_map):
            check_autocast(method, z)
        check_autocast(problem.hessian_product, z, v)

    def test_gradient_is_the_derivative_of_the_energy(self) -> None:
        energy, z = self.make(), self.state().requires_grad_()
        check_close(energy.gradient(z), torch.autograd.grad(energy.energy(z).sum(), z)[0], 1e-11, 1e-12)

    def test_residual_of_the_map_is_the_negative_gradient(self) -> None:
        """In the metric of the problem, which is the identity for most."""
        energy, z = self.make(), self.state()
        step = energy.metric_product(z, energy.fixed_point_map(z) - z)
        check_close(step, -energy.gradient(z), 1e-11, 1e-12)

    def test_hessian_product_is_the_derivative_of_the_gradient(self) -> None:
        energy, z, v = self.make(), self.state().requires_grad_(), self.state(2)
        check_close(energy.hessian_product(z, v), torch.autograd.grad(energy.gradient(z), z, v)[0], 1e-11, 1e-12)

    def test_linearization_is_the_jacobian_of_the_map(self) -> None:
        energy, z, v = self.make(), self.state(), self.state(2)
        linear = energy.linearize(z)
        flat = v.reshape(*self.lead(), -1)
        jacobian = dense_jacobian(energy, z)
        for product, matrix in ((linear.jvp, jacobian), (linear.vjp, jacobian.mT)):
            expected = (matrix @ flat[..., None]).squeeze(-1).reshape(self.shape)
            check_close(product(v), expected, 1e-10, 1e-11)
        assert energy.symmetric or energy.has_metric
        if energy.symmetric:
            check_close(jacobian, jacobian.mT, 1e-10, 1e-11)

    def test_jacobian_is_symmetric_in_the_metric(self) -> None:
        """df/dz = H M with a symmetric H, and M = M^(1/2) M^(1/2) symmetric, too."""
        energy, z, u, v = self.make(), self.state(), self.state(2), self.state(3)
        outer, axes = energy.linearize(z).outer, self.axes()
        assert (outer is not None) == energy.has_metric
        if outer is None:
            return
        weighed = energy.metric_product(z, v)
        check_close(outer(weighed), energy.linearize(z).jvp(v), 1e-11, 1e-12)
        check_close(outer(v), energy.outer_product(z, v), 1e-11, 1e-12)
        root = energy.metric_root_product
        check_close(root(z, root(z, v)), energy.metric_product(z, v), 1e-11, 1e-12)
        for product in (outer, lambda v: root(z, v)):
            left, right = (u * product(v)).sum(axes), (v * product(u)).sum(axes)
            check_close(left, right, 1e-11, 1e-12)
        assert bool(((v * root(z, v)).sum(axes) > 0).all())

    @pytest.mark.parametrize("further", [False, True])
    def test_linearized_pullback_is_the_one_of_autograd(self, further: bool) -> None:
        """Also with a tensor that the class knows nothing of, whose place among the gradients no formula has."""
        energy, z, u = self.make(), self.state(), self.state(2)
        if further:
            energy.further = random(2)  # type: ignore[attr-defined]
        fast, slow = energy.linearize(z).vjp_tensors(u), pullback(energy, z, u)
        assert [t is None for t in fast] == [t is None for t in slow]
        check_close([t for t in fast if t is not None], [t for t in slow if t is not None], 1e-11, 1e-12)

    def test_evaluate_gives_map_and_energy(self) -> None:
        energy, z = self.make(), self.state()
        mapped, value = energy.evaluate(z, energy=True)
        check_close((mapped, value), (energy.fixed_point_map(z), energy.energy(z)), 1e-12, 1e-13)
        assert energy.evaluate(z, energy=False).energy is None

    def test_problems_do_not_see_each_other(self) -> None:
        energy, z = self.make(), self.state()
        changed = z.clone()
        changed[0] = torch.nan
        assert torch.equal(energy.energy(changed)[1:], energy.energy(z)[1:])
        assert torch.equal(energy.gradient(changed)[1:], energy.gradient(z)[1:])

    def test_stationary_means_fixed(self) -> None:
        energy = self.make()
        solution = solve(energy, self.state(), solver=Anderson(rtol=0.0, atol=1e-10, max_steps=2000))
        gradient = torch.linalg.vector_norm(energy.gradient(solution.value), dim=self.axes())
        assert float(gradient.max()) <= 1e-10

    def test_plain_steps_descend_where_that_is_promised(self) -> None:
        energy = self.make()
        if not energy.plain_steps_descend:
            return
        for seed in range(10):
            z = 3 * self.state(seed)
            mapped = energy.fixed_point_map(z)
            drop = energy.energy(z) - energy.energy(mapped)
            assert bool((drop >= energy.divergence(z, mapped) - 1e-10).all())

    def test_select_takes_problems(self) -> None:
        energy, z = self.make(), self.state()
        index = torch.tensor([[2, 0], [1, 1]])
        chosen = energy.select(index) if energy.event_ndim == 1 else None
        if chosen is None:
            return
        rows = index[..., None].expand(2, 2, self.shape[-1])
        expected = energy.fixed_point_map(z).gather(1, rows)
        check_close(chosen.fixed_point_map(z.gather(1, rows)), expected, 1e-13, 1e-14)
