"""One call of an `Equilibrium`: its fixed point by `solve`, or the state after some steps by a bare loop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._autograd import HALF, at_least_single, is_batched
from .._norm import norm
from .._solve import solve
from ..adjoints import Adjoint, Implicit, Unrolled
from ..fixed_point_map import PerSample, Shared
from ..linear import GMRES
from ..options import SolveOptions
from ..solution import AdjointReport, Record, Solution
from ..solvers import Picard, Solver
from ..status import Status
from .block_map import BlockMap, BlockProblem

#: What the adjoint is solved to where autocast makes its products in half precision.
HALF_RTOL = 1e-2


class BlockCall:
    """One call of the layer: the map, where it starts, and what it reads."""

    def __init__(
        self,
        function: BlockMap,
        initial: Any,
        inputs: tuple[PerSample | Shared, ...],
        options: SolveOptions,
        asked: set[tuple[bool, str]],
        on_failure: Any,
    ) -> None:
        self.on_failure = on_failure
        self.map, self.initial, self.inputs, self.options, self.asked = function, initial, inputs, options, asked
        self.tensors = tuple(given.value for given in inputs)

    def solved(self, solver: Solver | None = None, adjoint: Adjoint | None = None) -> tuple[Any, Solution]:
        """The fixed point, or what `solver` and `adjoint` make in its place."""
        layout, options = self.map.layout, self.options
        problem = BlockProblem(self.map, *self.inputs, event_ndim=layout.event_ndim, asked=self.asked)
        packed = layout.pack(self.initial)
        if not torch.compiler.is_exporting():
            problem.check_axes(packed)
        solution = solve(
            problem,
            packed,
            solver=options.effective_solver if solver is None else solver,
            adjoint=self._adjoint() if adjoint is None else adjoint,
            on_failure=self.on_failure,
        )
        state = layout.unpack(solution.value)
        if not layout.single:
            solution = BlockSolution(**vars(solution) | {"value": state, "packed": solution.value})
        if layout.dtype in HALF:
            state = pytree.tree_map(lambda t: t.to(layout.dtype), state)
        return state, solution

    def _adjoint(self) -> Adjoint | None:
        adjoint = self.options.effective_adjoint
        if adjoint is None and self.map.autocast in HALF:
            # Products in half precision carry no more.
            return Implicit(GMRES(rtol=HALF_RTOL))
        return adjoint

    def looped(self, steps: int, measured: bool) -> tuple[Any, Solution | Record]:
        """The state after plain steps, by a bare loop: what a loop written by hand costs."""
        state, layout = self.initial, self.map.layout
        solver = self.options.effective_solver
        damping = solver.damping if isinstance(solver, Picard) else 0.0
        arguments = self.map.frame.filled(self.tensors)
        for _ in range(steps):
            mapped = self.map.step(state, arguments)
            state = mapped if damping == 0 else pytree.tree_map(lambda f, z: f - damping * (f - z), mapped, state)
        detached = pytree.tree_map(lambda z: z.detach(), state)
        finite = layout.per_sample(torch.isfinite, detached)
        if not torch.compiler.is_compiling() and not is_batched(finite) and not bool(finite.all()):
            # Their gradient, 0 * NaN, must not reach what all samples share.
            budget = Picard(rtol=0, atol=0, max_steps=steps, damping=damping)
            return self.solved(budget, Unrolled())
        residual = (
            self._residual(detached) if measured else finite.new_full(finite.shape, torch.nan, dtype=torch.float32)
        )
        count = torch.full_like(finite, steps, dtype=torch.int32)
        status = torch.full_like(count, int(Status.BUDGET if steps else Status.EXPLICIT), dtype=torch.int8)
        status = status.masked_fill(~finite, int(Status.DIVERGED))
        record = Record(status, residual, torch.zeros_like(residual), count, count + 1 if measured else count)
        if torch.compiler.is_compiling():
            return state, record
        adjoint = AdjointReport(on_failure=self.options.on_failure, site=self.on_failure.site)
        if layout.single:
            return state, Solution(record, adjoint, solver.remedies, value=state)
        return state, BlockSolution(record, adjoint, solver.remedies, value=state, packed=layout.pack(state))

    @torch.no_grad()
    def _residual(self, state: Any) -> Tensor:
        """|f(z) - z| of every sample at a state without graph."""
        layout, autocast = self.map.layout, self.map.autocast
        precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if autocast is not None:
            # What is cast here has no graph, and must not be kept for evaluations that need one.
            precision = torch.autocast(layout.device.type, autocast, cache_enabled=False)
        with precision:
            mapped = self.map.step(state, self.map.frame.filled(self.tensors))
        change = at_least_single(layout.pack(mapped)) - at_least_single(layout.pack(state))
        flat = change.reshape(*layout.lead, math.prod(change.shape[len(layout.lead) :]))
        return norm(flat)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True, eq=False)
class BlockSolution(Solution):
    """The `Solution` of a state that is a tuple, list or dict of tensors, which is its `value`.

    Attributes:
        packed: the same as one vector per sample, (*lead, n).
    """

    value: Any
    packed: Tensor

    @property
    def relative_residual(self) -> Tensor:
        """(*lead), residual / |value|_2, over all tensors of the state."""
        size = norm(self.packed.detach())
        return torch.where(self.residual == 0, 0.0, self.residual / size)
