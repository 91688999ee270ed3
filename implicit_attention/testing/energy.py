"""The contract of an energy: inherit `EnergyContract` and say how to make one."""

from __future__ import annotations

import torch
from torch import Tensor

from .._solve import solve
from ..energies import Energy
from ..problem import pullback
from ..solvers import Anderson
from .numerics import dense_jacobian, random


class EnergyContract:
    """Tests that every energy passes. A subclass defines `make()`, and `shape` of its states."""

    shape: tuple[int, ...] = (2, 3, 5)

    def make(self) -> Energy:
        raise NotImplementedError

    def state(self, seed: int = 1) -> Tensor:
        return random(*self.shape, seed=seed)

    def lead(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.make().event_ndim]

    def test_one_number_per_problem(self) -> None:
        assert self.make().energy(self.state()).shape == self.lead()

    def test_autocast_changes_no_bit(self) -> None:
        problem = self.make()
        floats = (t.float() if t.is_floating_point() else t for t in problem.tensors())
        problem, z, v = problem.replace(*floats), self.state().float(), self.state(2).float()
        for name, given in (
            ("energy", (z,)),
            ("gradient", (z,)),
            ("fixed_point_map", (z,)),
            ("hessian_product", (z, v)),
        ):
            plain = getattr(problem, name)(*given)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                lowered = getattr(problem, name)(*given)
            assert plain.dtype == lowered.dtype, name
            assert torch.equal(plain, lowered), name

    def test_gradient_is_the_derivative_of_the_energy(self) -> None:
        energy, z = self.make(), self.state().requires_grad_()
        (gradient,) = torch.autograd.grad(energy.energy(z).sum(), z)
        torch.testing.assert_close(energy.gradient(z), gradient, rtol=1e-11, atol=1e-12)

    def test_residual_of_the_map_is_the_negative_gradient(self) -> None:
        """In the metric of the problem, which is the identity for most."""
        energy, z = self.make(), self.state()
        expected = -energy.gradient(z)
        found = energy.metric_product(z, energy.fixed_point_map(z) - z)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)

    def test_hessian_product_is_the_derivative_of_the_gradient(self) -> None:
        energy, v = self.make(), self.state(2)
        z = self.state().requires_grad_()
        (product,) = torch.autograd.grad(energy.gradient(z), z, v)
        torch.testing.assert_close(energy.hessian_product(z, v), product, rtol=1e-11, atol=1e-12)

    def test_linearization_is_the_jacobian_of_the_map(self) -> None:
        energy, z, v = self.make(), self.state(), self.state(2)
        linear = energy.linearize(z)
        flat = v.reshape(*self.lead(), -1)
        jacobian = dense_jacobian(energy, z)
        for product, matrix in ((linear.jvp, jacobian), (linear.vjp, jacobian.mT)):
            expected = (matrix @ flat[..., None]).squeeze(-1).reshape(self.shape)
            torch.testing.assert_close(product(v), expected, rtol=1e-10, atol=1e-11)
        assert energy.symmetric or energy.has_metric
        if energy.symmetric:
            torch.testing.assert_close(jacobian, jacobian.mT, rtol=1e-10, atol=1e-11)

    def test_jacobian_is_symmetric_in_the_metric(self) -> None:
        """df/dz = H M with a symmetric H, and M = M^(1/2) M^(1/2) symmetric, too."""
        energy, z, u, v = self.make(), self.state(), self.state(2), self.state(3)
        outer, axes = energy.linearize(z).outer, tuple(range(len(self.lead()), len(self.shape)))
        assert (outer is not None) == energy.has_metric
        if outer is None:
            return
        weighed = energy.metric_product(z, v)
        torch.testing.assert_close(outer(weighed), energy.linearize(z).jvp(v), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(outer(v), energy.outer_product(z, v), rtol=1e-11, atol=1e-12)
        root = energy.metric_root_product
        torch.testing.assert_close(root(z, root(z, v)), energy.metric_product(z, v), rtol=1e-11, atol=1e-12)
        for product in (outer, lambda v: root(z, v)):
            left, right = (u * product(v)).sum(axes), (v * product(u)).sum(axes)
            torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)
        assert bool(((v * root(z, v)).sum(axes) > 0).all())

    def test_linearized_pullback_is_the_one_of_autograd(self) -> None:
        energy, z, u = self.make(), self.state(), self.state(2)
        for fast, slow in zip(energy.linearize(z).vjp_tensors(u), pullback(energy, z, u), strict=True):
            assert (fast is None) == (slow is None)
            if fast is not None and slow is not None:
                torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)

    def test_evaluate_gives_map_and_energy(self) -> None:
        energy, z = self.make(), self.state()
        mapped, value = energy.evaluate(z, energy=True)
        torch.testing.assert_close(mapped, energy.fixed_point_map(z), rtol=1e-12, atol=1e-13)
        assert value is not None
        torch.testing.assert_close(value, energy.energy(z), rtol=1e-12, atol=1e-13)
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
        axes = tuple(range(len(self.lead()), len(self.shape)))
        gradient = torch.linalg.vector_norm(energy.gradient(solution.value), dim=axes)
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
        if energy.event_ndim != 1:
            return
        index = torch.tensor([[2, 0], [1, 1]])
        chosen = energy.select(index)
        if chosen is None:
            return
        rows = index[..., None].expand(2, 2, self.shape[-1])
        expected = energy.fixed_point_map(z).gather(1, rows)
        torch.testing.assert_close(chosen.fixed_point_map(z.gather(1, rows)), expected, rtol=1e-13, atol=1e-14)
