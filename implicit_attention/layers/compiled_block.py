"""Compiled solves of a block: the loop in stretches, each one graph, after which the host looks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .._autograd import is_fake, transforms_active
from ..adjoints import Unrolled
from ..errors import outside
from ..fixed_point_map import FixedPointMap
from ..options import SolveOptions
from ..problem import Problem, share_memory, writes_to
from ..solvers import Outcome, Picard, Solver
from ..solvers._rows import Rows, flat, unflat
from ..solvers.iterate import Ended, judged, loop
from ..solvers.progress import Iteration, LoopState, compared
from .compiled_graphs import LENGTHS, Graphs

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
    """`Picard` in graphs of several evaluations, with the decisions of the general loop about each of them.

    Args:
        graphs: of the layer's block.
    """

    graphs: Graphs = dataclasses.field(default_factory=Graphs, repr=False, compare=False)

    @classmethod
    def like(cls, solver: Solver, graphs: Graphs) -> CompiledPicard:
        """The compiled form of a `Picard`."""
        assert isinstance(solver, Picard)
        return cls(solver.damping, **_options(solver), graphs=graphs)

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        lead = initial.ndim - problem.event_ndim
        fits = lead and initial.numel() > 0 and may_compile(self.graphs, problem, initial)
        if trace or graph or not fits or problem.mixes:
            return super().run(problem, initial, trace=trace, graph=graph)
        assert isinstance(problem, FixedPointMap)
        with torch.no_grad():
            tensors = problem.tensors()
            if not all(tensor.is_leaf for tensor in tensors[: len(tensors) - len(problem.inputs)]):
                # Inside a graph without autograd a compiler has no use for theirs, and warns of it.
                problem = problem.replace(*(tensor.detach() for tensor in tensors))
            rows = _FewSizes(problem, initial, compact=True)
            going = functools.partial(loop, self, every=1, traced=None, callback=None)
            value, record = judged(self, rows, self._stretched, going, every=1)
            self.graphs.evaluations = int(record.num_evals.max())
        if share_memory(value, initial):
            value = value.clone()
        return Outcome(value.reshape(initial.shape), record)

    def _stretched(self, rows: Rows) -> Ended:
        """The best states, by one stretch of evaluations after the other, and the last evaluation."""
        z, event, rule = rows.initial.contiguous(), rows.event, self.end_rule
        progress = LoopState(rule, rows, energy=False, descends=False)
        done, needed, most, before = 0, float(self.graphs.evaluations), self.max_steps + 1, None
        while True:
            problem: Any = rows.problem
            left = min(max(needed, 1.0) if not self.fixed_budget else most, most - done)
            count = max(length for length in LENGTHS if length <= left)
            given = problem.function, unflat(z, event), [tensor.detach() for tensor in problem.inputs]
            states, mapped, sizes = self.graphs.evaluated(*given, len(event), count, self.damping)
            states, mapped = [z, *(flat(state, event) for state in states)], flat(mapped, event)
            residual, tolerance = sizes[0::2], rule.atol + rule.rtol * sizes[1::2]
            if not _are_ordinary(sizes):
                residual, tolerance = self._measured_anew(states, mapped)
            for i in range(count):
                # Decisions read states and sizes alone.
                point = Iteration(states[i], states[i + 1], states[i + 1], residual[i], None, done + i, event)
                progress.decide(point, tolerance[i], None, None)
            done, z, rows.untried = done + count, states[-1], False
            if done == most or not progress.unfinished():
                break
            before = residual[-2] if count > 1 else before
            needed = _remaining(residual[-1], before, tolerance[-1], progress.active, self.graphs.evaluations - done)
            before = residual[-1]
            shrinks = needed >= WORTH and not progress.whole
            if shrinks and (order := rows.compaction(progress.active)) is not None:
                z, before, parts = rows.take(order, progress.best, (z, before, progress.tree()))
                progress.restrict(*parts)
        progress.end(progress.active, self.exhausted)
        point = Iteration(states[-2], mapped, mapped - states[-2], residual[-1], None, done - 1, event)
        return Ended(progress.result(), point, tolerance[-1])

    def _measured_anew(self, states: list[Tensor], mapped: Tensor) -> tuple[Tensor, Tensor]:
        """|r| and the tolerances of all evaluations of a stretch, where squares leave the range of the precision."""
        images = [mapped]
        for z, following in reversed(list(itertools.pairwise(states[:-1]))):
            images.append(following if self.damping == 0 else z + (following - z) / (1 - self.damping))
        pairs = zip(states, reversed(images), strict=False)
        found = [compared(self.end_rule, z, image)[1:] for z, image in pairs]
        residual, tolerance = zip(*found, strict=True)
        return torch.stack(residual), torch.stack(tolerance)


# Messages name what was passed to the layer.
CompiledPicard.__name__ = CompiledPicard.__qualname__ = Picard.__name__


def _options(solver: Solver) -> dict[str, Any]:
    return {name: getattr(solver, name) for name in ("rtol", "atol", "max_steps", "check_every")}


class _FewSizes(Rows):
    """The working set in as few sizes as powers of two are, so that few graphs serve it."""

    def _rounded_up(self, count: int) -> int:
        return min(1 << max(count - 1, 0).bit_length(), self.count)


def _are_ordinary(sizes: Tensor) -> bool:
    """Whether squares of vectors of these sizes have all their digits."""
    info = torch.finfo(sizes.dtype)
    low, high = torch.aminmax(sizes)
    return math.sqrt(info.tiny / info.eps) <= float(low) and float(high) < math.inf


def _remaining(last: Tensor, before: Tensor | None, tolerance: Tensor, active: Tensor, otherwise: int) -> float:
    """The number of evaluations that the slowest unfinished sample needs if its residual falls on as it fell last.

    otherwise: the answer where nothing is known.
    """
    if before is None:
        return float(otherwise)
    rate = (last / before).clamp(1e-6, 1 - 1e-6)
    needed = ((tolerance / last).log() / rate.log()).masked_fill(~active, 0.0)
    return math.ceil(min(float(needed.nan_to_num(math.inf).amax()), 1e6))


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
