"""Problems that are made of a user's function or module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import _validate
from .problem import Problem


class UserProblem(Problem):
    """A problem made of a user's function(z, *inputs) or of a module; `inputs` and the module hold its tensors."""

    def __init__(self, function: Callable[..., Tensor] | nn.Module, *inputs: Any, event_ndim: int) -> None:
        if not callable(function):
            raise TypeError(
                _validate.message("function", "be callable", type(function).__name__, "pass f(z, *tensors)")
            )
        event_ndim = _validate.check_integer("event_ndim", event_ndim, low=0)
        self.function = function
        self.inputs = inputs
        self.event_ndim = event_ndim

    def _check_output(self, result: Any, z: Tensor, shape: torch.Size, meaning: str) -> Tensor:
        name = self._map_name()
        if not isinstance(result, Tensor):
            raise TypeError(_validate.message(name, f"return a tensor of shape {meaning}", type(result).__name__))
        if result.shape != shape:
            raise ValueError(
                _validate.message(name, f"return shape {meaning} = {tuple(shape)}", f"shape {tuple(result.shape)}")
            )
        for what in ("dtype", "device"):
            got, expected = getattr(result, what), getattr(z, what)
            if got != expected:
                raise ValueError(_validate.message(name, f"return the {what} of z ({expected})", got))
        return result

    def _map_name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def _read_by(self) -> str:
        return _closed_over(self.function)

    def _how_to_declare(self) -> str:
        return f"pass it as an argument: {type(self).__name__}(f, tensor, event_ndim=...) with f(z, tensor)"


def _closed_over(function: Any) -> str:
    """Names of the tensors that need grad in a function's closure, globals or bound object."""
    found = []
    code = getattr(function, "__code__", None)
    cells = zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False)
    scope = {name: cell.cell_contents for name, cell in cells}
    scope |= {n: getattr(function, "__globals__", {}).get(n) for n in getattr(code, "co_names", ())}
    scope |= {f"self.{n}": v for n, v in getattr(getattr(function, "__self__", None), "__dict__", {}).items()}
    for name, value in scope.items():
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(f"`{name}`")
        elif isinstance(value, nn.Module) and any(p.requires_grad for p in value.parameters()):
            found.append(f"the parameters of `{name}`")
    return " and ".join(found) or "a tensor"


class FixedPointMap(UserProblem):
    """The problem z = f(z, *tensors) for any map, gradient of an energy or not.

    Args:
        function: f(z, *tensors) -> tensor of z's shape, acting on each problem (the last `event_ndim` axes)
            separately; or an nn.Module, whose parameters are then declared. It leaves z as it is and returns new memory
            at every call: a map that works in place or reuses a buffer raises ValueError.
        *inputs: every tensor that f reads and whose gradient may be wanted.
        event_ndim: number of trailing axes of z that form one problem.
        symmetric: promise that df/dz is symmetric, so that the adjoint may use conjugate gradients.

    Gradients: with respect to every declared tensor, first and second order. A tensor that requires grad and is read
    without being declared raises ValueError in `solve`.

    Not for attention over keys, which has a closed form and fused operations: use `AnchoredEnergy`. Not for an energy
    whose gradient autograd takes: use `EnergyFunction`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> shift = torch.tensor([0.1, 0.2], requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: 0.5 * z.cos() + shift, shift, event_ndim=1)
        >>> solution = solve(problem, torch.zeros(3, 2))
        >>> solution.converged.all().item(), solution.value.requires_grad
        (True, True)
    """

    def __init__(
        self,
        function: Callable[..., Tensor] | nn.Module,
        *inputs: Any,
        event_ndim: int,
        symmetric: bool = False,
    ) -> None:
        super().__init__(function, *inputs, event_ndim=event_ndim)
        self.symmetric = symmetric

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self._check_output(self.function(z, *self.inputs), z, z.shape, "of z")
