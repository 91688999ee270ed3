"""The contract of a method for spin systems: inherit `ApproximationContract` and say how to make one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ..solution import Status
from ..spins import Bonds, SpinSystem, free_energy, magnetization, thermodynamics
from ..spins.approximation import Approximation
from ..spins.thermodynamics import Thermodynamics
from .numerics import check_autocast, check_close, check_derivatives, random

SCALARS = ("free_energy", "log_partition", "internal_energy", "entropy", "heat_capacity")
OUTPUTS = (*SCALARS, "magnetization", "correlations", "susceptibility")
#: Units in the last place by which a sample may differ beside other samples.
ULPS = 4


def output(solution: Thermodynamics, name: str) -> Tensor:
    """One of `OUTPUTS`."""
    value: Tensor = solution.susceptibility() if name == "susceptibility" else getattr(solution, name)
    return value


class ApproximationContract:
    """Tests that every method with a free energy passes. A subclass defines `make` and the attributes of its systems.

    A test that a method is not meant to pass is taken out by name: `test_... = None`, with the reason.

    Attributes:
        dim: D.
        sites: N.
        chain: whether only neighbours may be coupled, and fields collinear.
        precision: of a magnetization that is computed in float32.
    """

    dim = 1
    sites = 3
    chain = False
    precision = 1e-4

    def make(self) -> Approximation:
        raise NotImplementedError

    def test_autocast_changes_no_bit(self) -> None:
        system = self.system(self.field(2), self.weights(2))
        system = system.at(system.field.float(), system.couplings.float(), system.beta)

        def outputs() -> list[Tensor]:
            solution = self.solved(system, on_failure="ignore")
            return [output(solution, name) for name in OUTPUTS]

        check_autocast(outputs)

    def field(self, *batch: int, seed: int = 1) -> Tensor:
        return self.on_axis(0.7 * random(*batch, self.sites, self.dim, seed=seed))

    def on_axis(self, field: Tensor) -> Tensor:
        """The field, of whose vectors those of a chain lie on one axis."""
        return field[..., :1] * random(self.dim, seed=9) if self.chain and self.dim > 1 else field

    def weights(self, *batch: int, seed: int = 2, scale: float = 0.3) -> Tensor:
        """Return the matrices that couplings are made of, (*batch, N, N)."""
        return scale * random(*batch, self.sites, self.sites, seed=seed)

    def couplings(self, weights: Tensor) -> Tensor:
        upper = weights.triu(1) if not self.chain else torch.diag_embed(weights.diagonal(1, -2, -1), 1)
        return upper + upper.mT

    def given(self, couplings: Tensor) -> Any:
        """Couplings as systems get them: the tensor, or its `Bonds`."""
        return couplings

    def system(self, field: Tensor, weights: Tensor, beta: float | Tensor = 0.9, **options: Any) -> SpinSystem:
        return SpinSystem(self.given(self.couplings(weights)), field, beta, **options)

    def solved(self, system: SpinSystem, **options: Any) -> Thermodynamics:
        return thermodynamics(system, self.make(), **options)

    # Derivatives.

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        beta = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
        return self.field().requires_grad_(), self.weights().requires_grad_(), beta

    def function(self, name: str) -> Any:
        def value(field: Tensor, weights: Tensor, beta: Tensor) -> Tensor:
            result = output(self.solved(self.system(self.on_axis(field), weights, beta)), name)
            return (result * random(*result.shape, seed=5)).sum()

        return value

    @pytest.mark.parametrize("name", OUTPUTS)
    def test_derivatives_of_every_output(self, name: str) -> None:
        assert torch.autograd.gradcheck(self.function(name), self.leaves(), fast_mode=True, atol=1e-6)

    # log Z and S are combinations of the others.
    @pytest.mark.parametrize("name", [name for name in OUTPUTS if name not in ("log_partition", "entropy")])
    def test_second_derivatives(self, name: str) -> None:
        assert torch.autograd.gradgradcheck(self.function(name), self.leaves(), fast_mode=True, atol=1e-6)

    def test_outputs_are_the_slopes_of_the_free_energy(self) -> None:
        field, weights, beta, step = self.field(), self.weights(), 0.9, 1e-4
        solution = self.solved(self.system(field, weights, beta))

        def free(field: Tensor = field, weights: Tensor = weights, beta: float = beta) -> Any:
            return free_energy(self.system(field, weights, beta), self.make())

        def slope(function: Any) -> Any:
            near, far = function(step) - function(-step), function(2 * step) - function(-2 * step)
            return (8 * near - far) / (12 * step)

        direction = self.field(seed=3)
        check_close((solution.magnetization * direction).sum(), -slope(lambda t: free(field + t * direction)), 1e-8)
        check_close(solution.internal_energy, slope(lambda t: (beta + t) * free(beta=beta + t)), 1e-8)
        check_close(solution.entropy, beta * (solution.internal_energy - solution.free_energy), 1e-12)
        turned = self.weights(seed=4)
        # Pairs of a tensor are counted in both orders, each with one half.
        given = self.given(self.couplings(turned))
        change = given.values if isinstance(given, Bonds) else given / 2
        slope_bonds = -slope(lambda t: free(weights=weights + t * turned))
        check_close((solution.correlations * change).sum(), slope_bonds, 1e-8)

        def response(t: float) -> Any:
            return magnetization(self.system(field + t * direction, weights, beta), self.make())

        check_close(solution.susceptibility_product(direction), slope(response), 1e-7)

    def test_susceptibility_is_symmetric(self) -> None:
        chi = self.solved(self.system(self.field(2), self.weights())).susceptibility()
        check_close(chi, chi.permute(0, 3, 4, 1, 2), 1e-8)

    def test_what_a_method_answers_is_the_slope_at_fixed_couplings(self) -> None:
        method, mask = self.make(), torch.arange(self.sites) < self.sites - 1
        for options in ({}, {"mask": mask}):
            system = self.system(self.field(2), self.weights(), **options)
            m, answer = magnetization(system, method, return_answer=True)
            check_close(m, self.solved(system, check="none").magnetization, 1e-8)
            assert torch.equal(answer.magnetization, m)
            assert bool(answer.report.converged.all())

    def test_magnetization_has_derivatives(self) -> None:
        def value(field: Tensor, weights: Tensor, beta: Tensor) -> Any:
            return magnetization(self.system(self.on_axis(field), weights, beta), self.make())

        check_derivatives(value, self.leaves(), fast_mode=True, atol=1e-6)

    # Symmetries and limits.

    def test_the_order_of_sites_does_not_matter(self) -> None:
        order = torch.randperm(self.sites, generator=torch.Generator().manual_seed(0))
        order = torch.arange(self.sites).flip(0) if self.chain else order
        couplings, field = self.couplings(self.weights()), self.field()
        solution = self.solved(SpinSystem(self.given(couplings), field, 0.9))
        moved = self.solved(SpinSystem(self.given(couplings[order][:, order]), field[order], 0.9))
        check_close(moved.free_energy, solution.free_energy, 1e-10)
        check_close(moved.heat_capacity, solution.heat_capacity, 1e-7)
        check_close(moved.magnetization, solution.magnetization[order], 1e-8)

    def test_a_rotation_of_all_fields_rotates_all_magnetizations(self) -> None:
        q = torch.linalg.qr(random(self.dim, self.dim, seed=8))[0]
        field, weights = self.field(), self.weights()
        solution, turned = (self.solved(self.system(h, weights)) for h in (field, field @ q))
        for name in SCALARS:
            check_close(getattr(turned, name), getattr(solution, name), 1e-7)
        check_close(turned.magnetization, solution.magnetization @ q, 1e-8)

    def test_spins_without_couplings_answer_alone(self) -> None:
        method, field = self.make(), self.field()
        solution = self.solved(self.system(field, torch.zeros_like(self.weights()), 1.3))
        response, radius = method.site_response(), self.dim**0.5
        check_close(solution.log_partition, response.log_partition(field, 1.3, radius).sum(), 1e-9)
        check_close(solution.magnetization, response.magnetization(field, 1.3, radius), 1e-8)

    def test_parts_without_couplings_between_them_add_up(self) -> None:
        field, weights = self.field(2), self.couplings(self.weights(2))
        apart = self.solved(SpinSystem(self.given(weights), field, 0.9))
        whole = torch.block_diag(*weights)  # type: ignore[no-untyped-call]
        together = self.solved(SpinSystem(self.given(whole), field.flatten(0, 1), 0.9))
        for name in SCALARS:
            check_close(getattr(together, name), getattr(apart, name).sum(), 1e-7)
        check_close(together.magnetization, apart.magnetization.flatten(0, 1), 1e-8)

    # Samples, masks and precision.

    def test_a_sample_does_not_depend_on_its_company(self) -> None:
        """A hard neighbour, more samples, and a lost one change nothing beyond rounding."""
        field, weights = self.field(4), self.weights(4)
        weights[2] *= 20
        if not (self.chain and self.dim > 1):
            field[3, 0, 0] = torch.nan
        beta = torch.tensor([0.9, 0.5, 3.0, 0.7], dtype=torch.float64)
        together = self.solved(self.system(field, weights, beta), on_failure="ignore")
        alone = self.solved(self.system(field[:1], weights[:1], beta[:1]))
        for name in OUTPUTS:
            a, b = output(together, name)[0], output(alone, name)[0]
            # Of the terms that cancel in an answer the largest are of order 1.
            limit = ULPS * torch.finfo(b.dtype).eps * b.abs().max().clamp(min=1.0)
            assert bool((a - b).abs().max() <= limit), (name, float((a - b).abs().max() / limit))
        if not (self.chain and self.dim > 1):
            assert together.report.status[3] == Status.NONFINITE
            assert bool(together.free_energy[3].isnan())

    def test_a_masked_site_changes_nothing(self) -> None:
        kept = torch.arange(self.sites) != (self.sites - 1 if self.chain else 1)
        field, couplings = self.field(), self.couplings(self.weights())
        small = self.solved(SpinSystem(self.given(couplings[kept][:, kept]), field[kept], 0.9))
        field[~kept], couplings[~kept], couplings[:, ~kept] = (torch.nan,) * 3
        masked = self.solved(SpinSystem(self.given(couplings), field, 0.9, mask=kept))
        for name in SCALARS:
            check_close(getattr(masked, name), getattr(small, name), 1e-8)
        check_close(masked.magnetization[kept], small.magnetization, 1e-8)
        assert not masked.magnetization[~kept].any()

    def test_single_precision_is_single_precision(self) -> None:
        system = self.system(self.field(2), self.weights())
        low = self.system(self.field(2).float(), self.weights().float())
        exact, solution = (self.solved(s) for s in (system, low))
        assert solution.free_energy.dtype == torch.float32
        assert bool(solution.report.converged.all())
        check_close(solution.free_energy.double(), exact.free_energy, 1e-5)
        check_close(solution.magnetization.double(), exact.magnetization, self.precision)

    def test_vmap_is_a_batch(self) -> None:
        field, weights = self.field(3), self.weights()
        batch = free_energy(self.system(field, weights), self.make())
        each = torch.vmap(lambda h: free_energy(self.system(h, weights), self.make()))(field)
        check_close(each, batch, 1e-10)

    def test_every_solve_has_evidence(self) -> None:
        evidence = self.solved(self.system(self.field(2), self.weights())).report
        assert bool(evidence.converged.all())
        assert bool((evidence.residual <= evidence.tolerance).all())
