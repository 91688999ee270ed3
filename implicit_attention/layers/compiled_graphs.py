"""Compiled solves of a block, by graphs that torch.compile makes of several evaluations each."""

from __future__ import annotations

import dataclasses
import math
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import is_fake, transforms_active
from ..adjoints import Unrolled
from ..failure import outside
from ..options import SolveOptions
from ..problem import FixedPointMap, Problem, writes_to
from ..solvers import Iteration, Picard, Solver
from ..solvers.loop import Best, Images, Loop, flat, plain_steps, unflat

#: f(z, *inputs), a module.
Map: TypeAlias = Callable[..., Tensor]
#: The compiler behind torch.compile.
BACKEND = "inductor"
#: Evaluations in one graph, of which the most are made that are expected to be needed.
LENGTHS = (1, 2, 3, 4, 6, 8)
#: Graphs of one layer that a warning tells of.
MANY = 100
#: Samples leave the work where as many evaluations are still expected: fewer are not worth graphs of another size.
WORTH = 4


def check_compiled(options: SolveOptions) -> None:
    """Raise where a compiled layer cannot solve by these."""
    solver = options.effective_solver
    if type(solver) is not Picard:
        remedy = "use Picard(damping=...), or leave `compiled` out"
        required = "be Picard() in a layer with compiled=True, whose graphs hold plain steps"
        raise ValueError(_validate.message("solver", required, repr(solver), remedy))
    if options.adjoint is None and solver.fixed_budget:
        remedy = "use steps=k and compile what is around the layer, or leave `compiled` out"
        required = "have a tolerance in a layer with compiled=True: a fixed budget is differentiated as a loop is"
        raise ValueError(_validate.message("solver", required, repr(solver), remedy))
    if isinstance(options.adjoint, Unrolled):
        remedy = "use Implicit() or Phantom(), or leave `compiled` out"
        required = "not be Unrolled() in a layer with compiled=True, whose steps leave no graph of autograd"
        raise ValueError(_validate.message("adjoint", required, repr(options.adjoint), remedy))


@dataclasses.dataclass(frozen=True)
class CompiledPicard(Picard):
    """`Picard` in graphs of several evaluations.

    Args:
        graphs: of the layer's block.
    """

    graphs: Graphs = dataclasses.field(default_factory=lambda: Graphs(), repr=False, compare=False)

    @classmethod
    def like(cls, solver: Solver, graphs: Graphs) -> CompiledPicard:
        """The compiled form of a `Picard`."""
        return cls(**vars(solver), graphs=graphs)

    def _loop(self, problem: Problem, initial: Tensor) -> type[Loop]:
        lead = initial.ndim - problem.event_ndim
        fits = lead and initial.numel() > 0 and may_compile(self.graphs, problem, initial)
        return Stretches if fits and not problem.mixes else Loop


# Messages name what was passed to the layer.
CompiledPicard.__name__ = CompiledPicard.__qualname__ = Picard.__name__


class Stretches(Loop):
    """A solve whose evaluations are made before they are asked for, several in one graph; then the host looks."""

    solver: CompiledPicard

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows.few_sizes = True
        self.ahead: list[Images] = []
        self.needed = self.solver.graphs.evaluations

    def run(self) -> tuple[Best, Iteration, Tensor]:
        best, point, tolerance = super().run()
        self.solver.graphs.evaluations = int(best.record.num_evals.max())
        return best, point, tolerance

    def evaluate(self, z: Tensor, index: int) -> Images:
        if not self.ahead:
            problem: Any = self.rows.problem
            tensors = problem.tensors()
            if not all(tensor.is_leaf for tensor in tensors[: len(tensors) - len(problem.inputs)]):
                # Inside a graph without autograd a compiler has no use for theirs, and warns of it.
                problem = problem.replace(*(tensor.detach() for tensor in tensors))
            left = self.last + 1 - index
            expected = left if self.rule.fixed_budget else min(max(self.needed, 1), left)
            count = max(length for length in LENGTHS if length <= expected)
            inputs, state = [tensor.detach() for tensor in problem.inputs], unflat(z.contiguous(), self.rows.event)
            pairs = self.solver.graphs.evaluated(problem.function, state, inputs, count, self.solver.damping)
            self.ahead = [(flat(z, self.rows.event), flat(image, self.rows.event), None) for z, image in pairs]
        return self.ahead.pop(0)

    def due(self, index: int) -> bool:
        return not self.ahead

    def leaving(self, left: int, index: int, *measured: Tensor) -> Tensor | None:
        # One residual tells nothing; the last solve does.
        expected = self.looks.needed(index, *measured) if index else self.solver.graphs.evaluations - 1
        self.needed = math.ceil(min(expected, self.last))
        return None if self.needed < WORTH else super().leaving(left, index, *measured)


def may_compile(graphs: Graphs, problem: Problem, z: Tensor) -> bool:
    """Whether graphs may stand for the block here: plain numbers, and a block that is one function of its arguments.

    Warns where the block is none.
    """
    if (
        not isinstance(problem, FixedPointMap)
        or transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or is_fake(z)
    ):
        return False
    function: Any = problem.function
    mode = tuple(part.training for part in function.block.modules())
    reason = graphs.unfit.get(mode)
    if reason is None:
        reason = graphs.unfit[mode] = _unfit(problem, z)
        if reason:
            message = f"`compiled` has no effect for the block {function.__name__}, which {reason}"
            warnings.warn(message, stacklevel=outside())
    return not reason


@torch.no_grad()
def _unfit(problem: Problem, z: Tensor) -> str:
    """Why no graph can stand for the block, found by one evaluation; empty if one can."""
    beside: Any = problem.apart()
    buffers = list(beside.function.block.buffers())
    before = [writes_to(buffer) for buffer in buffers]
    beside.fixed_point_map(z)
    if beside.draws.repeated:
        return "draws random numbers, the same ones at each evaluation of a call: call eval(), or leave dropout out"
    if any(writes_to(buffer) != count for buffer, count in zip(buffers, before, strict=True)):
        return "writes to its buffers, once for each evaluation: call eval(), or use a normalisation without statistics"
    return ""


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
        self, function: Map, z: Tensor, inputs: Sequence[Tensor], count: int, damping: float
    ) -> list[tuple[Tensor, Tensor]]:
        """`count` states and their images: z, and those that steps of `Picard(damping)` lead to."""
        key = (count, damping, z.dtype, z.device, z.shape, *(t.shape for t in inputs))
        graph = self._made.get(key)
        if graph is None:
            graph = self._made[key] = _compiled(_evaluations(count, damping), z.device)
            if len(self._made) == MANY:
                remedy = "pad inputs to few shapes, or leave `compiled` out"
                message = (
                    f"`compiled` has made {MANY} graphs, one for each length and shape, each for seconds; {remedy}"
                )
                warnings.warn(message, stacklevel=outside())
        images, states = _answer(graph, z.device, function, z, *inputs)
        return list(zip((z, *(states or images[:-1])), images, strict=True))


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


def _evaluations(count: int, damping: float) -> Callable[..., Any]:
    """The function of which a graph is made: `count` images, and the states behind the first if they are others."""

    def evaluations(function: Map, z: Tensor, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        pairs: list[tuple[Tensor, Tensor]] = []

        def seen(pair: tuple[Tensor, Tensor], index: int) -> None:
            pairs.append(pair)

        plain_steps(lambda state: function(state, *inputs), z, count, damping, seen)
        return [image for _, image in pairs], [state for state, _ in pairs[1:]] if damping else []

    return evaluations
