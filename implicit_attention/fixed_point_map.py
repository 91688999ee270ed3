"""Problems of a user's function or module."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Self

from . import _validate
from ._autograd import HALF, transforms_active
from ._declared import changed, modules_in, named, picked, walk
from .problem import Problem, counted, is_like, refuse_writes


@dataclasses.dataclass(frozen=True, eq=False)
class PerSample:
    """An input of a map of which every problem has its own part: its leading axes are those of the state.

    With such an input the problem can be restricted: finished problems leave the work, and a NaN in the part of one
    reaches no other.

    Args:
        value: a tensor (*lead, ...) for states (*lead, *event), or a tuple, list or dict of such tensors.

    Not for weights and other tensors that all problems read: wrap those in `Shared`, or pass them as they are.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, PerSample, solve
        >>> x, weight = torch.tensor([[0.1], [0.2], [0.3]]), torch.tensor([[0.5]], requires_grad=True)
        >>> f = lambda z, x, weight: torch.tanh(z @ weight + x)
        >>> solution = solve(FixedPointMap(f, PerSample(x), weight, event_ndim=1), torch.zeros(3, 1))
        >>> solution.converged.tolist()
        [True, True, True]
    """

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """An input of a map that all problems read, whatever its shape.

    A map of which every tensor is wrapped can be restricted to some of its problems; see `PerSample`.

    Args:
        value: a tensor, or a tuple, list or dict of tensors.

    Not for tensors of which every problem has its own part: those are `PerSample`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Shared, solve
        >>> problem = FixedPointMap(lambda z, b: z.cos() / 2 + b, Shared(torch.tensor([0.5])), event_ndim=1)
        >>> solve(problem, torch.zeros(3, 1)).converged.tolist()
        [True, True, True]
    """

    value: Any


class UserProblem(Problem):
    """A problem of a user's function(z, *inputs) or module; its tensors are those of `inputs` and of the module."""

    separates, dtypes = False, "any"

    def __init__(
        self, function: Callable[..., Tensor] | nn.Module, *inputs: Any, event_ndim: int | None = None
    ) -> None:
        if event_ndim is None:
            required = "say how many trailing axes of z form one problem"
            remedy = "1: every row is its own problem; 2: the rows of a sample are coupled"
            raise TypeError(_validate.message("event_ndim", required, f"nothing in {type(self).__name__}(...)", remedy))
        if not callable(function):
            raise TypeError(
                _validate.message("function", "be callable", type(function).__name__, "pass f(z, *tensors)")
            )
        event_ndim = _validate.check_integer("event_ndim", event_ndim, low=0)
        for i, given in enumerate(inputs):
            if isinstance(given, PerSample | Shared) and not isinstance(given.value, Tensor | tuple | list | dict):
                kind, received = type(given).__name__, type(given.value).__name__
                required = f"be a tensor, or a tuple, list or dict of tensors, inside {kind}"
                raise TypeError(_validate.message(f"inputs[{i}]", required, received, "pass other objects as they are"))
        self.function = function
        self.inputs = tuple(given.value if isinstance(given, PerSample | Shared) else given for given in inputs)
        self.event_ndim = event_ndim
        self._own = tuple(isinstance(given, PerSample) for given in inputs)
        wrapped = [isinstance(given, PerSample | Shared) for given in inputs]
        # Modules have no tensors of single problems.
        known = (w or isinstance(i, nn.Module) or not any(named(i, "")) for i, w in zip(inputs, wrapped, strict=True))
        self._restrictable = any(self._own) or (any(wrapped) and all(known))

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        """Whether a batch normalisation takes its statistics from the batch."""
        return takes_statistics(modules_in(self))

    def check_state(self, z: Tensor) -> None:
        super().check_state(z)
        lead = z.shape[: z.ndim - self.event_ndim]
        for i, (value, own) in enumerate(zip(self.inputs, self._own, strict=True)):
            for name, tensor in named(value, f"inputs[{i}]") if own else ():
                _validate.require(
                    tensor.shape[: len(lead)] == lead,
                    name,
                    f"have the leading axes {tuple(lead)} of the states, as it is PerSample",
                    f"shape {tuple(tensor.shape)}",
                    "expand it, or wrap what all problems read in Shared",
                )

    @property
    def _undeclared(self) -> str:  # type: ignore[override]
        return closed_over(self.function)

    @property
    def _to_declare(self) -> str:  # type: ignore[override]
        return f"pass it as an argument: {type(self).__name__}(f, tensor, event_ndim=...) with f(z, tensor)"

    def _restricted(self, index: Tensor) -> Self | None:
        return self._with_own(lambda t: counted(picked(t, index, index.ndim - 1))) if self._restrictable else None

    def without(self, left_out: Tensor) -> Self:
        def filled(tensor: Tensor) -> Tensor:
            rows = left_out.reshape((*left_out.shape, *(1,) * (tensor.ndim - left_out.ndim)))
            return tensor.masked_fill(rows, 1.0) if tensor.is_floating_point() else tensor

        return self._with_own(filled)

    def _with_own(self, change: Callable[[Tensor], Tensor]) -> Self:
        clone, pairs = copy.copy(self), zip(self.inputs, self._own, strict=True)
        clone.inputs = tuple(changed(value, change) if own else value for value, own in pairs)
        return clone

    def apart(self) -> Self:
        clone = copy.copy(super().apart())
        clone.function = _original(clone.function)
        return clone

    def _called(self, z: Tensor) -> Any:
        # Transforms refuse modules that write to their buffers, and spoil compiled ones.
        problem = self.apart() if transforms_active() else self
        try:
            return problem.function(z, *problem.inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                refuse_writes(self)
            self.refuse_dtypes(error, z)
            # Torch speaks of sizes that the caller never wrote.
            if type(error) is not RuntimeError or _validate.OF_SHAPES.search(str(error)) is None:
                raise
            required = f"have a shape that `{self._name()}` takes"
            received = f"states of shape {tuple(z.shape)}, for which it raised: {error}"
            axes = f"of which the last {self.event_ndim} axes form one problem"
            remedy = f"start from a tensor of the shape that it returns, {axes}"
            raise ValueError(_validate.message("initial", required, received, remedy)) from error

    def refuse_dtypes(self, error: Exception, z: Tensor) -> None:
        """Raise for dtypes that do not fit each other, if torch's error is about those, with their names."""
        if isinstance(error, RuntimeError) and _validate.OF_DTYPES.search(str(error)):
            _validate.check_same_kind([*self.named_tensors(), ("initial", z)])
            if z.dtype not in HALF:
                told = f"take states of {z.dtype}", f"one that raised: {error}"
                remedy = "convert what it reads with .to(z.dtype)"
                raise ValueError(_validate.message(self._name(), *told, remedy)) from error

    def _check_output(self, result: Any, z: Tensor, shape: torch.Size, meaning: str, remedy: str = "") -> Tensor:
        name = self._name()
        if not isinstance(result, Tensor):
            received, remedy = type(result).__name__, remedy or _validate.joined(result)
            raise TypeError(_validate.message(name, f"return a tensor of shape {meaning}", received, remedy))
        if result.shape != shape:
            required, received = f"return shape {meaning} = {tuple(shape)}", f"shape {tuple(result.shape)}"
            raise ValueError(_validate.message(name, required, received, remedy))
        for what in ("dtype", "device"):
            got, expected = getattr(result, what), getattr(z, what)
            required, remedy = f"return the {what} of z ({expected})", f"convert its result with .to(z.{what})"
            _validate.require(got == expected, name, required, got, remedy)
        return result

    def _name(self) -> str:
        function = getattr(self.function, "_orig_mod", self.function)
        return getattr(function, "__name__", type(function).__name__)


def takes_statistics(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these is a batch normalisation that takes its statistics from the batch."""
    norms = (part for part in modules if isinstance(part, _BatchNorm))
    return any(norm.training or norm.running_mean is None for norm in norms)


def closed_over(function: Any) -> str:
    """Names of the tensors that need grad in a function's closure, globals or bound object."""
    function, names = _original(function), []
    for part in function.modules() if isinstance(function, nn.Module) else (function,):
        for name, value in _scope(part):
            for _, leaf in walk(value):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    names.append(f"`{name}`")
                elif isinstance(leaf, nn.Module) and any(p.requires_grad for p in leaf.parameters()):
                    names.append(f"the parameters of `{name}`")
    return " and ".join(dict.fromkeys(names)) or "a tensor"


def _original(function: Any) -> Any:
    """The function inside what torch.compile made of it; any other one as it is."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def _scope(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function reads by name (closure, globals, bound object), or a module by other names."""
    # Methods of potentials are wrapped by decorators.
    code_of = inspect.unwrap(type(function).forward if isinstance(function, nn.Module) else function)
    if (code := getattr(code_of, "__code__", None)) is not None:
        cells, read = zip(code.co_freevars, code_of.__closure__ or (), strict=False), code_of.__globals__
        yield from ((name, cell.cell_contents) for name, cell in cells)
        yield from ((name, read[name]) for name in code.co_names if name in read)
    bound = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    for name, value in getattr(bound, "__dict__", {}).items():
        if bound is not function or name[:1] != "_":
            yield f"self.{name}", value


class FixedPointMap(UserProblem):
    """The problem z = f(z, *tensors) for any map, gradient of an energy or not.

    Args:
        function: f(z, *tensors) -> tensor of z's shape and dtype, acting on each problem (the last `event_ndim` axes)
            separately; or an nn.Module, whose parameters are then declared. It leaves z as it is and returns new memory
            at every call: a map that works in place or reuses a buffer raises ValueError.
        *inputs: every tensor that f reads and whose gradient may be wanted; f receives `PerSample(t)` and `Shared(t)`
            as the plain tensor t, and converts what has another dtype than z (float32 for half precision).
        event_ndim: number of trailing axes of z that form one problem.
        symmetric: promise that df/dz is symmetric, so that the adjoint may use conjugate gradients.

    With an input that is `PerSample`, or with all inputs wrapped, problems leave the work as they finish: f is then
    called with fewer problems than the initial state has, and inputs that are not wrapped are shared. The last bits of
    a value may depend on how many others are left, as those of torch's kernels do; nothing else does. After some have
    left, one call on all, which `num_evals` leaves out, measures the residuals that are reported: problems above their
    tolerance go on, all together where the map mixes them (sums over graphs). None leaves a batch normalisation in
    training, or a map that raises for fewer problems. Where a map mixes problems they are one problem: make the axis
    that numbers them a part of the event.

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
        event_ndim: int | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__(function, *inputs, event_ndim=event_ndim)
        self.symmetric = symmetric

    # Whole samples: to add some would be as much work again.
    row_block = 1

    def select(self, index: Tensor) -> Self | None:
        return self._restricted(index)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        result = self._called(z)
        return result if is_like(result, z) else self._check_output(result, z, z.shape, "of z")
