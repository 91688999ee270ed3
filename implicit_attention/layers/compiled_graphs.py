"""The graphs that torch.compile makes of a block: several evaluations each."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
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
#: Graphs of one layer that a warning tells of.
MANY = 100


class Graphs:
    """The compiled graphs of a block, by what they compute and of which shapes, and what was learned of its solves.

    Attributes:
        evaluations: how many the last solve needed.
        unfit: for each mode of the block that was looked at, why no graph can stand for it; empty if one can.
    """

    def __init__(self) -> None:
        self.evaluations = 6
        self.unfit: dict[tuple[bool, ...], str] = {}
        self._made: dict[Any, Callable[..., Any]] = {}

    def evaluated(
        self, function: Map, z: Tensor, inputs: Sequence[Tensor], event_ndim: int, count: int, damping: float
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Make `count` evaluations f(z_0), ..., of z = z_0 and of what follows, z_(i+1) = f(z_i) - damping r_i.

        Returns:
            The states z_1, ..., z_count; f(z_(count-1)); and (2 count, *lead) |r_0|, |f(z_0)|, |r_1|, |f(z_1)|, ...
        """
        graph = self._graph((event_ndim, count, damping), z, inputs)
        states, mapped, sizes = _answer(graph, z.device, function, z, *inputs)
        return states, states[-1] if mapped is None else mapped, sizes

    def _graph(self, options: tuple[int, int, float], z: Tensor, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        key = (options, z.dtype, z.device, z.shape, *(t.shape for t in inputs))
        graph = self._made.get(key)
        if graph is None:
            graph = self._made[key] = _compiled(_evaluations(*options), z.device)
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


def _rows(tensor: Tensor, event_ndim: int) -> Tensor:
    """(*lead, *event) -> (*lead, n)."""
    return tensor.flatten(tensor.ndim - event_ndim) if event_ndim else tensor[..., None]
