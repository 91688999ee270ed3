"""The contract of an adjoint: inherit `AdjointContract` and name the adjoint, and whether its gradient is exact."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from .._solve import solve
from ..adjoints import Adjoint
from ..energies import AnchoredEnergy, EnergyFunction
from ..failure import OnFailure
from ..potentials import LogSumExp
from ..problem import FixedPointMap, Problem
from ..solvers import Anderson, Picard, Solver
from .numerics import check_close, check_derivatives, dense_gradients, random, relative_error

Inputs = tuple[Tensor, ...]


def attention_inputs(dtype: torch.dtype = torch.float64) -> Inputs:
    """Keys, field, beta, anchor and bias, shaped to break wrong axes."""
    beta, anchor = (torch.tensor(numbers, dtype=torch.float64) for numbers in ([0.3, 0.5], [0.3, 0.6]))
    inputs = (random(2, 7, 5), random(2, 3, 5, seed=1), beta, anchor, random(2, 3, 7, seed=2))
    return tuple(t.to(dtype).requires_grad_() for t in inputs)


def attention_energy(keys: Tensor, field: Tensor, beta: Tensor, anchor: Tensor, bias: Tensor) -> AnchoredEnergy:
    return AnchoredEnergy(LogSumExp(keys, beta, bias=bias), field, anchor)


def rotation_map(weight: Tensor, shift: Tensor) -> FixedPointMap:
    """A contraction whose Jacobian is far from symmetric."""
    return FixedPointMap(lambda z, w, b: torch.tanh(z @ w.mT + b), weight, shift, event_ndim=1)


def coupled_map(weight: Tensor, shift: Tensor) -> FixedPointMap:
    """Sites of a sample see each other: two event axes."""
    return FixedPointMap(lambda z, w, b: torch.tanh(w @ z + b), weight, shift, event_ndim=2)


class AdjointContract:
    """Tests that every adjoint passes, in the strength that its exactness allows."""

    adjoint: ClassVar[Adjoint]
    #: Relative error of its gradients on the attention energy; exact adjoints have 1e-8 or less.
    accuracy: ClassVar[float] = 1e-8
    #: Whether maps with a non-symmetric Jacobian can be differentiated.
    any_map: ClassVar[bool] = True
    solver: ClassVar[Solver] = Anderson(rtol=0.0, atol=1e-13, max_steps=500)
    #: Whether gradients flow to the initial state.
    through_initial: ClassVar[bool] = False

    @property
    def exact(self) -> bool:
        return self.accuracy <= 1e-8

    def equilibrium(self, problem: Problem, initial: Tensor, on_failure: OnFailure = "raise") -> Tensor:
        exact = initial.dtype == torch.float64
        solver, adjoint = (self.solver, self.adjoint) if exact else (Picard(rtol=1e-5), self._for_float32())
        return solve(problem, initial, solver=solver, adjoint=adjoint, on_failure=on_failure).value

    def _for_float32(self) -> Adjoint:
        return self.adjoint

    def attention(self, *inputs: Tensor) -> Tensor:
        return self.equilibrium(attention_energy(*inputs), random(2, 3, 5, seed=1, dtype=inputs[0].dtype))

    def loss(self, *inputs: Tensor) -> Tensor:
        return (self.attention(*inputs) * random(2, 3, 5, seed=7, dtype=inputs[0].dtype)).sum()

    def check_against_dense(self, problem: Problem, initial: Tensor, accuracy: float) -> None:
        value = self.equilibrium(problem, initial)
        cotangent = random(*value.shape, seed=7)
        expected = dense_gradients(problem, value.detach(), cotangent)
        tensors = [t for t in problem.tensors() if t.requires_grad]
        truths = [g for t, g in zip(problem.tensors(), expected, strict=True) if t.requires_grad and g is not None]
        pairs = zip(torch.autograd.grad(value, tensors, cotangent), truths, strict=True)
        assert all(relative_error(*pair) < accuracy for pair in pairs)

    def test_value_is_that_of_the_solver(self) -> None:
        energy = attention_energy(*attention_inputs())
        with torch.no_grad():
            plain = solve(energy, energy.field.detach(), solver=self.solver).value
        tolerance = 1e-12 if self.through_initial else 0.0
        check_close(self.equilibrium(energy, energy.field.detach()), plain, tolerance)

    def test_gradients_against_a_dense_solve(self) -> None:
        energy = attention_energy(*attention_inputs())
        self.check_against_dense(energy, energy.field.detach(), max(self.accuracy, 1e-10))

    def test_gradients_of_maps_that_are_no_gradient(self) -> None:
        if not self.any_map:
            return
        shift = random(2, 3, 5, seed=1).requires_grad_()
        for make, size in ((rotation_map, 5), (coupled_map, 3)):
            problem = make((0.2 * random(size, size)).requires_grad_(), shift)
            self.check_against_dense(problem, torch.zeros(2, 3, 5).double(), max(self.accuracy, 1e-9))

    def test_first_and_second_derivatives(self) -> None:
        if self.exact:
            check_derivatives(self.attention, attention_inputs(), fast_mode=True)

    def test_derivatives_of_maps_that_are_no_gradient(self) -> None:
        if not (self.exact and self.any_map):
            return
        shift = random(2, 2, 3, seed=1).requires_grad_()
        for make, size in ((rotation_map, 3), (coupled_map, 2)):
            weight = (0.2 * random(size, size)).requires_grad_()

            def function(weight: Tensor, shift: Tensor, make: Callable[..., Problem] = make) -> Tensor:
                return self.equilibrium(make(weight, shift), torch.zeros_like(shift))

            check_derivatives(function, (weight, shift), fast_mode=True)

    def test_anchor_zero_with_respect_to_the_keys(self) -> None:
        keys, query = random(2, 4, 5).requires_grad_(), random(2, 3, 5, seed=1)

        def function(keys: Tensor) -> Tensor:
            return self.equilibrium(AnchoredEnergy(LogSumExp(keys, 0.4), query, 0.0), query)

        if self.exact:
            check_derivatives(function, (keys,), fast_mode=True)
        (gradient,) = torch.autograd.grad(function(keys).sum(), keys)
        assert gradient.abs().sum() > 0

    @pytest.mark.parametrize("biased", [True, False], ids=["biased", "as an operation"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_the_scale_of_the_loss_changes_not_one_bit(self, dtype: torch.dtype, biased: bool) -> None:
        keys, field, beta, anchor, bias = inputs = attention_inputs(dtype)
        energy = AnchoredEnergy(LogSumExp(keys, beta, bias=bias if biased else None), field, anchor)
        value = self.equilibrium(energy, field.detach())
        cotangent, inputs = random(2, 3, 5, seed=7, dtype=dtype), inputs if biased else inputs[:4]
        whole = torch.autograd.grad(value, inputs, cotangent, retain_graph=True)
        exponents = [-90, -70, 70, 110] if dtype == torch.float32 else [-900, -540, 520, 1000]
        if self.through_initial:
            # The graph of many steps passes on numbers far larger than the gradient.
            exponents = [-40, 40]
        for exponent in exponents:
            scaled = torch.autograd.grad(value, inputs, cotangent * 2.0**exponent, retain_graph=True)
            check_close(scaled, tuple(gradient * 2.0**exponent for gradient in whole), 0.0)

    def test_zero_cotangent_gives_zero(self) -> None:
        inputs = attention_inputs()
        assert not any(g.any() for g in torch.autograd.grad(0.0 * self.attention(*inputs).sum(), inputs))

    def test_initial_state(self) -> None:
        energy = attention_energy(*attention_inputs())
        initial = energy.field.detach().clone().requires_grad_()
        value = self.equilibrium(energy, initial)
        (gradient,) = torch.autograd.grad(value.sum(), initial, allow_unused=True, materialize_grads=True)
        # Unrolled to convergence, the gradient to the start is as small as the contraction over all steps.
        assert gradient.abs().max() < 1e-6
        assert self.through_initial or gradient.eq(0).all()

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test_func_transforms(self) -> None:
        inputs = attention_inputs()
        expected = torch.autograd.grad(self.loss(*inputs), inputs)
        detached = tuple(t.detach() for t in inputs)
        gradients = torch.func.grad(self.loss, tuple(range(len(inputs))))(*detached)
        assert all(relative_error(*pair) < 1e-8 for pair in zip(gradients, expected, strict=True))
        tangents = tuple(random(*t.shape, seed=20 + i) for i, t in enumerate(inputs))
        slope = torch.func.jvp(self.loss, detached, tangents)[1]
        along = sum((t * g).sum() for t, g in zip(tangents, expected, strict=True))
        assert relative_error(slope, torch.as_tensor(along)) < 1e-8

    def test_vmap_equals_a_loop(self) -> None:
        keys, *rest = (t.detach() for t in attention_inputs())
        stack = random(3, *keys.shape, seed=30)
        for function in (self.attention, torch.func.grad(self.loss)):
            batched = torch.vmap(function, in_dims=(0, None, None, None, None))(stack, *rest)
            check_close(batched, torch.stack([function(k, *rest) for k in stack]), 1e-8, 1e-9)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test_second_derivatives_agree_in_all_modes(self) -> None:
        if not self.exact:
            return
        keys, *rest = (t.detach() for t in attention_inputs())

        def function(shift: Tensor) -> Tensor:
            moved = keys + torch.linspace(-1, 1, 70, dtype=torch.float64).view_as(keys) * shift
            return (self.attention(moved, *rest) ** 2).sum()

        at = torch.tensor(0.1, dtype=torch.float64)
        twice = torch.func.grad(torch.func.grad(function))(at)
        mixed = torch.func.hessian(function)(at)
        step = 1e-4
        slopes = [torch.func.grad(function)(at + s) for s in (-step, step)]
        assert relative_error(mixed, twice) < 1e-7
        assert relative_error((slopes[1] - slopes[0]) / (2 * step), twice) < 1e-5

    def test_a_problem_that_starts_at_its_solution_has_a_gradient(self) -> None:
        keys = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
        field = torch.tensor([[0.5, 0.5], [3.0, -1.0]], dtype=torch.float64)
        energy = AnchoredEnergy(LogSumExp(keys, 0.8), field, 0.3)
        start = torch.tensor([[0.5, 0.5], [0.0, 0.0]], dtype=torch.float64)
        (gradient,) = torch.autograd.grad(self.equilibrium(energy, start).sum(), keys)
        assert gradient.isfinite().all()

    def test_a_failed_problem_that_the_loss_leaves_out_reaches_nobody(self) -> None:
        inputs = attention_inputs()
        field = inputs[1].detach().clone()
        field[0, 1] = torch.nan
        good = field.isfinite().all(-1)

        def gradients(field: Tensor, create_graph: bool) -> tuple[Tensor, ...]:
            keys, _, beta, anchor, bias = inputs
            energy = attention_energy(keys, field, beta, anchor, bias)
            loss = self.equilibrium(energy, random(2, 3, 5, seed=1), "ignore")[good].square().sum()
            return torch.autograd.grad(loss, (keys, beta, anchor, bias), create_graph=create_graph)

        expected = gradients(inputs[1].detach(), False)
        for create_graph in (False, True):
            check_close(gradients(field, create_graph), expected, 1e-8, 1e-9)

    @pytest.mark.parametrize("where", ["beta", "anchor", "bias", "keys", "map"])
    def test_a_nan_of_a_sample_that_the_loss_leaves_out_reaches_nobody(self, where: str) -> None:
        if where == "map" and not self.any_map:
            return
        keys, field, beta, anchor, bias = (t.detach() for t in attention_inputs())
        shared = (0.3 * random(5, 5)).requires_grad_()

        def gradient(poison: float, create_graph: bool) -> Tensor:
            own = {"beta": beta, "anchor": anchor, "bias": bias, "keys": keys, "map": field}[where].clone()
            own.view(2, -1)[1, 0] += poison
            parts = {"keys": keys, "beta": beta, "anchor": anchor, "bias": bias}
            parts |= {where: own} if where != "map" else {}
            # What is shared by all samples is a weight that makes the keys, and the weight of the map.
            if where == "keys":
                parts["beta"] = shared[0, 0].abs()
            else:
                parts["keys"] = parts["keys"][:1] @ shared
            problem = rotation_map(shared, own) if where == "map" else attention_energy(field=field, **parts)
            value = self.equilibrium(problem, 0 * field, "ignore")
            assert value[0].isfinite().all()
            assert value[1].isnan().any() == (poison != 0)
            return torch.autograd.grad(value[0].square().sum(), shared, create_graph=create_graph)[0]

        for create_graph in (False, True):
            expected = gradient(0.0, create_graph)
            check_close(gradient(torch.nan, create_graph), expected, 1e-8, 1e-9)

    def test_gradients_flow_in_eval_mode(self) -> None:
        layer = nn.Linear(5, 5).double().eval()
        keys = random(2, 7, 5)
        field = layer(random(2, 3, 5, seed=1))
        loss = self.equilibrium(AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.5), field).sum()
        torch.autograd.backward(loss)
        assert layer.weight.grad is not None
        assert layer.weight.grad.abs().sum() > 0

    def test_second_forward_and_repeated_backward(self) -> None:
        inputs = attention_inputs()
        loss = self.loss(*inputs)
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        again = torch.autograd.grad(loss, inputs)
        other = torch.autograd.grad(self.loss(*inputs), inputs)
        check_close((again, other), (first, first), 0.0)

    def test_autocast_does_not_touch_the_solve(self) -> None:
        inputs = attention_inputs(torch.float32)
        outside = torch.autograd.grad(self.loss(*inputs), inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.loss(*inputs)
        check_close(torch.autograd.grad(loss, inputs), outside, 0.0)

    def test_half_precision_inputs_get_half_precision_gradients(self) -> None:
        inputs = attention_inputs(torch.bfloat16)
        gradients = torch.autograd.grad(self.attention(*inputs).sum(), inputs)
        assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in gradients)

    def test_masked_rows_have_finite_gradients(self) -> None:
        keys, field = random(2, 7, 5).requires_grad_(), random(2, 3, 5, seed=1).requires_grad_()
        mask = random(2, 3, 7, seed=9) > 0
        mask[0, 1] = False
        for anchor in (0.0, 0.5):
            energy = AnchoredEnergy(LogSumExp(keys, 0.4, mask=mask), field, anchor)
            value = self.equilibrium(energy, field.detach())
            torch.testing.assert_close(value[0, 1], anchor * field[0, 1])
            gradients = torch.autograd.grad(value.square().sum(), (keys, field), materialize_grads=True)
            assert all(g.isfinite().all() for g in gradients)

    def test_energies_of_users(self) -> None:
        weight = (random(5).abs() / 2).requires_grad_()
        energy = EnergyFunction(_bowl, weight, event_ndim=1)
        self.check_against_dense(energy, random(2, 3, 5), 1e-8 if self.exact else 1.0)

    def test_copies_are_equal(self) -> None:
        assert copy.deepcopy(self.adjoint) == self.adjoint == pickle.loads(pickle.dumps(self.adjoint))


def _bowl(z: Tensor, weight: Tensor) -> Any:
    return ((1 + weight) * z.square() / 2 - z.sin()).sum(-1) / 2
