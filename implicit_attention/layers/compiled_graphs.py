"""The graphs that torch.compile makes of a block: several evaluations, steps of an adjoint solve, gradients."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _validate
from .._norm import length as size_of
from ..errors import outside

#: f(z, *inputs), a module.
Map: TypeAlias = Callable[..., Tensor]
#: The compiler behind torch.compile.
BACKEND = "inductor"
#: Evaluations in one graph, of which the most are made that are expected to be needed.
LENGTHS = (1, 2, 3, 4, 6, 8)
#: Steps of an adjoint solve in one graph, as many as are expected to be needed or more: the next one begins anew.
STEPS = (2, 3, 4, 5, 6, 8)
#: Graphs of one layer that a warning tells of.
MANY = 100


class System(NamedTuple):
    """The system (I - J^T) u = g, g in units of a power of two for each sample, and where its solve goes on.

    u: the answer so far; r: g - (I - J^T) u.
    """

    g: Tensor
    units: Tensor
    u: Tensor
    r: Tensor


class Stepped(NamedTuple):
    """The end of some steps for a `System`.

    u, r: as there, r by a product with u.
    left: |r|, (*lead).
    sizes: of r after each step by the method's own recurrence, (count, *lead).
    by_name, by_input: (df/dt)^T u units for each tensor t.
    depends: whether J^T u has an entry that is not 0.
    """

    u: Tensor
    r: Tensor
    left: Tensor
    sizes: Tensor
    by_name: dict[str, Tensor]
    by_input: tuple[Tensor, ...]
    depends: Tensor


class Graphs:
    """The compiled graphs of a block, by what they compute and of which shapes, and what was learned of its solves.

    Attributes:
        evaluations: how many the last solve needed.
        products: how many steps the last adjoint solve needed.
        unfit: for each mode of the block that was looked at, why no graph can stand for it; empty if one can.
    """

    def __init__(self) -> None:
        self.evaluations = self.products = 6
        self.unfit: dict[tuple[bool, ...], str] = {}
        self._made: dict[Any, Callable[..., Any]] = {}

    def evaluated(
        self, function: Map, z: Tensor, inputs: Sequence[Tensor], event_ndim: int, count: int, damping: float
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Make `count` evaluations f(z_0), ..., of z = z_0 and of what follows, z_(i+1) = f(z_i) - damping r_i.

        Returns:
            The states z_1, ..., z_count; f(z_(count-1)); and (2 count, *lead) |r_0|, |f(z_0)|, |r_1|, |f(z_1)|, ...
        """
        graph = self._graph(_evaluations, (event_ndim, count, damping), z, inputs)
        states, mapped, sizes = _answer(graph, z.device, function, z, *inputs)
        return states, states[-1] if mapped is None else mapped, sizes

    def adjoint(
        self,
        function: Map,
        z: Tensor,
        system: System,
        own: dict[str, Tensor],
        moving: Sequence[int],
        inputs: Sequence[Tensor],
        event_ndim: int,
        count: int,
    ) -> Stepped:
        """Make `count` steps of GMRES for the system, and gradients by the answer.

        Args:
            function, z: J is the Jacobian of f at z.
            system: where the steps begin.
            own: tensors of the function, by name, of which the gradients are wanted.
            moving: the same for inputs, by number.
            inputs: of the function.
            event_ndim: number of trailing axes of z that are one sample.
            count: how many steps.
        """
        graph = self._graph(_adjoint, (event_ndim, count, tuple(moving)), z, inputs, names=tuple(own))
        given = tuple(inputs[i] for i in moving)
        return Stepped(*_answer(graph, z.device, function, z, *system, own, given, *inputs))

    def _graph(
        self,
        make: Callable[..., Callable[..., Any]],
        options: tuple[Any, ...],
        z: Tensor,
        inputs: Sequence[Tensor],
        names: tuple[str, ...] = (),
    ) -> Callable[..., Any]:
        key = (make, options, names, z.dtype, z.device, z.shape, *(t.shape for t in inputs))
        graph = self._made.get(key)
        if graph is None:
            graph = self._made[key] = _compiled(make(*options), z.device)
            if len(self._made) == MANY:
                remedy = "pad inputs to few shapes, or leave `compiled` out"
                message = (
                    f"`compiled` has made {MANY} graphs, one for each length and shape, each for seconds; {remedy}"
                )
                warnings.warn(message, stacklevel=outside())
        return graph


def _compiled(graph: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    # The compiler keeps, and limits, what it makes by the code of a function; each graph has code of its own.
    assert isinstance(graph, types.FunctionType)
    own = types.FunctionType(graph.__code__.replace(), graph.__globals__, graph.__name__, None, graph.__closure__)
    options: dict[str, Any] = {}
    if BACKEND == "inductor":
        # On a GPU one launch for all kernels of a graph, on a CPU calls of kernels that pass no interpreter.
        options = {"mode": "reduce-overhead"} if device.type == "cuda" else {"options": {"cpp_wrapper": True}}
    return torch.compile(own, backend=BACKEND, fullgraph=True, dynamic=False, **options)


def _answer(graph: Callable[..., Any], device: torch.device, *given: Any) -> Any:
    """graph(*given), in memory that no later graph writes to; an error with its remedy where the compiler fails."""
    recorded = device.type == "cuda"
    if recorded:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    try:
        answer = graph(*given)
    except Exception as error:
        if _is_of_compiler(error):
            raise _uncompilable(error, type(given[0].block).__name__) from error
        raise
    return pytree.tree_map_only(Tensor, torch.clone, answer) if recorded else answer


def _is_of_compiler(error: BaseException) -> bool:
    packages = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
    return type(error).__module__.startswith(packages)


def _uncompilable(error: BaseException, name: str) -> RuntimeError:
    """The error for a block of which torch.compile makes no graph."""
    required = f"be False where torch.compile cannot make one graph of the block {name}"
    received = f"True, and {type(error).__name__}: {error}"
    remedy = "leave `compiled` out, or give the block a forward without branches on numbers in tensors"
    text = f"{type(error).__name__} {error}"
    if "CxxCompiler" in text:
        required = "be False where torch.compile finds no C++ compiler"
        remedy = "install one (g++ or clang++; CXX names it), or leave `compiled` out"
    elif "recompile" in text.lower():
        remedy = "pass numbers that change from call to call as tensors, or leave `compiled` out"
    return RuntimeError(_validate.message("compiled", required, received, remedy))


# The functions of which graphs are made.


def _evaluations(event_ndim: int, count: int, damping: float) -> Callable[..., Any]:
    def evaluations(function: Map, z: Tensor, *inputs: Tensor) -> tuple[list[Tensor], Tensor | None, Tensor]:
        states, sizes = [], []
        mapped = z
        for _ in range(count):
            mapped = function(z, *inputs)
            r = mapped - z
            sizes += [size_of(_rows(r, event_ndim)), size_of(_rows(mapped, event_ndim))]
            z = mapped if damping == 0 else mapped - damping * r
            states.append(z)
        return states, None if damping == 0 else mapped, torch.stack(sizes)

    return evaluations


def _adjoint(event_ndim: int, count: int, moving: tuple[int, ...]) -> Callable[..., Any]:
    def adjoint(
        function: Map,
        z: Tensor,
        g: Tensor,
        units: Tensor,
        u: Tensor,
        r: Tensor,
        own: dict[str, Tensor],
        given: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> tuple[Any, ...]:
        def mapped(state: Tensor, own: dict[str, Tensor], given: tuple[Tensor, ...]) -> Any:
            arguments = list(inputs)
            for i, tensor in zip(moving, given, strict=True):
                arguments[i] = tensor
            return torch.func.functional_call(cast(nn.Module, function), own, (state, *arguments))

        transposed = torch.func.vjp(mapped, z, own, given)[1]

        def product(v: Tensor) -> Tensor:
            # A compiler leaves out what is not asked for.
            return _rows(transposed(v.reshape(z.shape))[0], event_ndim)

        change, sizes = _steps(product, _rows(r, event_ndim), count)
        u = u + change.reshape(z.shape)
        by_state, by_name, by_input = transposed(u * units)
        r = g - (u - by_state / units)
        return u, r, size_of(_rows(r, event_ndim)), sizes, by_name, by_input, (by_state != 0).any()

    return adjoint


def _steps(product: Callable[[Tensor], Tensor], r: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Make `count` steps of GMRES for u - product(u) = r (*lead, n): u, and the size of what is left after each."""
    pending = size_of(r)
    basis, columns = [_divided(r, pending)], []
    turns: list[tuple[Tensor, Tensor]] = []
    target, sizes = [], []
    for _ in range(count):
        w = basis[-1] - product(basis[-1])
        size, column = size_of(w), []
        for vector in basis:
            column.append((vector * w).sum(-1))
            w = w - column[-1][..., None] * vector
        height = size_of(w)
        # Nothing new is in the Krylov space.
        height = torch.where(height <= 10 * torch.finfo(w.dtype).eps * size, 0.0, height)
        basis.append(_divided(w, height))
        for i, (cosine, sine) in enumerate(turns):
            upper, lower = column[i], column[i + 1]
            column[i], column[i + 1] = cosine * upper + sine * lower, cosine * lower - sine * upper
        pivot = (column[-1].square() + height.square()).sqrt()
        safe = torch.where(pivot == 0, 1.0, pivot)
        cosine, sine = column[-1] / safe, height / safe
        turns.append((cosine, sine))
        column[-1] = safe
        columns.append(column)
        target.append(cosine * pending)
        pending = -sine * pending
        sizes.append(pending.abs())
    weights: dict[int, Tensor] = {}
    for row in reversed(range(count)):
        rest = target[row]
        for i in range(row + 1, count):
            rest = rest - columns[i][row] * weights[i]
        weights[row] = rest / columns[row][row]
    change = torch.zeros_like(r)
    for row in range(count):
        change = change + weights[row][..., None] * basis[row]
    return change, torch.stack(sizes)


def _rows(tensor: Tensor, event_ndim: int) -> Tensor:
    """(*lead, *event) -> (*lead, n)."""
    return tensor.flatten(tensor.ndim - event_ndim) if event_ndim else tensor[..., None]


def _divided(vector: Tensor, size: Tensor) -> Tensor:
    """Vector / size, and 0 where the size is 0."""
    zero = (size == 0)[..., None]
    return torch.where(zero, 0.0, vector / torch.where(zero, 1.0, size[..., None]))
