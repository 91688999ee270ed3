"""The contract of a potential: inherit `PotentialContract` and say how to make one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..potentials import Potential
from .numerics import check_autocast, check_close, check_derivatives, random, relative_error

#: Two batch entries, three queries, five dimensions: shapes that break wrong axes.
STATE = (2, 3, 5)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators inside this context, and how many numbers the largest tensor stores."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []
        self.largest = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operators.append(str(function))
        inputs = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            # A view of an input is no allocation, and an expanded tensor is as small as its storage.
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


class PotentialContract:
    """Tests that every potential passes. A subclass defines `make(dtype)` for states of shape (2, 3, 5).

    They are six problems, or two with `event_ndim` 2.
    """

    #: Potentials without a closed form cannot be restricted to rows and need not be compared with themselves.
    selects = True

    def make(self, dtype: torch.dtype) -> Potential:
        raise NotImplementedError

    def state(self, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
        return random(*STATE, seed=seed, dtype=dtype)

    def differentiable(self) -> tuple[Potential, list[int]]:
        """The potential, and which of its tensors can be differentiated."""
        potential = self.make(torch.float64)
        return potential, [i for i, t in enumerate(potential.tensors()) if t.is_floating_point()]

    def test_shapes(self) -> None:
        potential, z = self.make(torch.float64), self.state()
        assert potential.value(z).shape == STATE[: 3 - potential.event_ndim]
        assert potential.mean(z).shape == STATE
        assert potential.covariance_product(z, z).shape == STATE

    def test_mean_is_the_gradient_of_value(self) -> None:
        z = self.state().requires_grad_()
        potential = self.make(torch.float64)
        (gradient,) = torch.autograd.grad(potential.value(z).sum(), z)
        check_close(potential.mean(z), gradient, 1e-12, 1e-13)

    def test_mean_has_a_graph_to_all_that_it_reads(self) -> None:
        """Second derivatives (create_graph=True) of a solution would silently be zero without."""
        potential, where = self.differentiable()
        names = ["z", *(name for name, _ in potential.named_tensors())]
        arguments = [self.state(), *potential.tensors()]
        mean = potential.mean(arguments[0])
        for i in (0, *(1 + i for i in where)):
            moved = [*arguments[:i], (1.1 * arguments[i].detach() + 0.1).requires_grad_(), *arguments[i + 1 :]]
            after = potential.replace(*moved[1:]).mean(moved[0])
            if not torch.equal(after.detach(), mean.detach()):
                linked = after.requires_grad and torch.autograd.grad(after.sum(), moved[i], allow_unused=True)[0]
                assert isinstance(linked, Tensor), f"`{type(potential).__name__}.mean` has no graph to {names[i]}"

    def test_autocast_changes_no_bit(self) -> None:
        potential, z, v = self.make(torch.float32), self.state(dtype=torch.float32), self.state(2, torch.float32)
        for method in (potential.value, potential.mean, potential.evaluate):
            check_autocast(method, z)
        check_autocast(potential.covariance_product, z, v)

    def test_covariance_is_the_derivative_of_mean(self) -> None:
        potential, v = self.make(torch.float64), self.state(2)
        z = self.state().requires_grad_()
        (product,) = torch.autograd.grad(potential.mean(z), z, v)
        check_close(potential.covariance_product(z, v), product, 1e-12, 1e-13)

    def test_covariance_is_symmetric(self) -> None:
        potential, z, u, v = self.make(torch.float64), self.state(), self.state(2), self.state(3)
        axes = tuple(range(-potential.event_ndim, 0))
        left = (u * potential.covariance_product(z, v)).sum(axes)
        right = (v * potential.covariance_product(z, u)).sum(axes)
        check_close(left, right, 1e-12, 1e-13)

    def test_fast_paths_equal_the_differentiable_ones(self) -> None:
        potential, z, v = self.make(torch.float64), self.state(), self.state(2)
        tracked = z.clone().requires_grad_()
        check_close(potential.mean(z), potential.mean(tracked).detach(), 1e-12, 1e-13)
        check_close(tuple(potential.evaluate(z)), (potential.value(z), potential.mean(z)), 1e-12, 1e-13)
        linear = potential.linearize(z)
        if linear is not None:
            check_close(linear.product(v), potential.covariance_product(z, v), 1e-12, 1e-13)

    def test_linearized_pullback_equals_autograd(self) -> None:
        potential, z, u = self.make(torch.float64), self.state(), self.state(2)
        linear = potential.linearize(z)
        if linear is None:
            return
        tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in potential.tensors()]
        mean, floating = potential.replace(*tensors).mean(z), [t for t in tensors if t.requires_grad]
        expected = torch.autograd.grad(mean, floating, u, materialize_grads=True) if floating else ()
        gradients = zip(tensors, linear.vjp_tensors(u), strict=True)
        check_close(tuple(gradient for tensor, gradient in gradients if tensor.requires_grad), expected, 1e-11, 1e-12)

    def test_first_and_second_derivatives(self) -> None:
        potential, where = self.differentiable()
        tensors = potential.tensors()
        # Finite differences cannot move an entry that is masked by -inf.
        usable = [i for i in where if bool(torch.isfinite(tensors[i]).all())]

        def functions(z: Tensor, *new: Tensor) -> tuple[Tensor, Tensor]:
            both = dict(enumerate(tensors)) | dict(zip(usable, new, strict=True))
            changed = potential.replace(*both.values())
            return changed.value(z), changed.mean(z)

        inputs = [self.state().requires_grad_(), *(tensors[i].detach().clone().requires_grad_() for i in usable)]
        check_derivatives(functions, inputs)

    def test_problems_do_not_see_each_other(self) -> None:
        potential, z = self.make(torch.float64), self.state()
        changed = z.clone()
        one = (slice(None), 1) if potential.event_ndim == 1 else 1
        changed[one] = torch.nan
        other = torch.ones(STATE[: 3 - potential.event_ndim], dtype=torch.bool)
        other[one] = False
        for method in (potential.value, potential.mean, lambda x: potential.covariance_product(x, self.state(2))):
            assert torch.equal(method(z)[other], method(changed)[other])

    def test_convexity_as_declared(self) -> None:
        potential = self.make(torch.float64)
        if not potential.convex:
            return
        for seed in range(20):
            a, b = 3 * self.state(seed), 3 * self.state(seed + 100)
            middle = potential.value((a + b) / 2)
            assert bool((middle <= (potential.value(a) + potential.value(b)) / 2 + 1e-12).all())

    def test_lipschitz_bound_holds(self) -> None:
        potential = self.make(torch.float64)
        bound = potential.lipschitz()
        if bound is None:
            return
        for seed in range(20):
            z, v = 2 * self.state(seed), self.state(seed + 100)
            stretch = potential.covariance_product(z, v).norm(dim=-1) / v.norm(dim=-1)
            assert bool((stretch <= bound[..., None] * (1 + 1e-12)).all())

    def test_replace_returns_the_same_function_of_other_tensors(self) -> None:
        potential, z = self.make(torch.float64), self.state()
        same = potential.replace(*potential.tensors())
        assert torch.equal(same.mean(z), potential.mean(z))
        moved = [t + 0.1 if t.is_floating_point() else t for t in potential.tensors()]
        if moved:
            assert not torch.equal(potential.replace(*moved).mean(z), potential.mean(z))
        with pytest.raises(ValueError, match="tensors"):
            potential.replace(*potential.tensors(), z)

    def test_select_takes_rows(self) -> None:
        potential, z = self.make(torch.float64), self.state()
        index = torch.tensor([[2, 0], [1, 1]])
        chosen = potential.select(index)
        assert (chosen is not None) == self.selects
        if chosen is not None:
            rows = index[..., None].expand(2, 2, 5)
            check_close(chosen.mean(z.gather(1, rows)), potential.mean(z).gather(1, rows), 1e-13, 1e-14)

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
    def test_low_precision_stays_near_float64(self, dtype: torch.dtype, tolerance: float) -> None:
        mean = self.make(dtype).mean(self.state(dtype=dtype))
        assert mean.dtype == dtype
        assert relative_error(mean, self.make(torch.float64).mean(self.state())) < tolerance

    def test_vmap_equals_a_loop(self) -> None:
        potential = self.make(torch.float64)
        states = random(4, *STATE, seed=5)
        each = torch.stack([potential.mean(z) for z in states])
        check_close(torch.vmap(potential.mean)(states), each, 1e-12, 1e-13)

    def test_compiles(self) -> None:
        potential, z = self.make(torch.float64), self.state()
        compiled = torch.compile(potential.mean, backend="eager")
        torch.testing.assert_close(compiled(z), potential.mean(z))

    def test_copies(self) -> None:
        potential, z = self.make(torch.float64), self.state()
        for other in (copy.deepcopy(potential), pickle.loads(pickle.dumps(potential))):
            assert torch.equal(other.mean(z), potential.mean(z))
