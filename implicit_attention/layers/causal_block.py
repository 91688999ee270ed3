"""Causal blocks, solved token by token: each token ends on its own, and later ones read the keys of settled ones."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import Self

from .. import _validate
from .._autograd import host_may_look, is_batched, transforms_active
from .._norm import norm
from .._reporting import report_failures
from ..adjoints import Adjoint, Request, Unrolled
from ..attention.masks import triangle
from ..problem import Problem, TokenOrder, writes_to
from ..solution import Record, Solution
from ..solvers import Outcome, Picard, Solver
from ..solvers._rows import stay_where
from ..solvers.in_order import Tokens, of_problems
from ..status import Status
from .block_call import BlockCall, BlockMap, BlockProblem, BlockSolution
from .block_state import StateLayout
from .past import BlockCache, Memory, Past, check_block_cache, rows_at

#: Codes of failures, the worst last.
FAILURES = tuple(int(status) for status in Status if status.failed)


class Reads(NamedTuple):
    """Which tokens read which, beside causality: masks broadcast to (*batch, heads, N, N).

    Attributes:
        pairs: boolean, True = read; None for all before.
        bias: added to scores.
        exists: which tokens exist, (*batch, N) of a call, or (*batch, M + N) behind M tokens of a cache.
    """

    pairs: Tensor | None = None
    bias: Tensor | None = None
    exists: Tensor | None = None

    def all_pairs(self) -> Tensor | None:
        """Which tokens read which in any head, (*#batch, N, N); None for all before."""
        pairs = self.pairs
        if self.bias is not None:
            finite = self.bias.detach() > -torch.inf
            pairs = finite if pairs is None else pairs & finite
        if pairs is None or pairs.ndim < 2 or pairs.shape[-2] == 1:
            return None
        return pairs.any(-3) if pairs.ndim > 2 else pairs


def takes_past(module: nn.Module) -> bool:
    """Whether a block, or an attention, reads settled tokens by a keyword argument `past`."""
    try:
        taken = "past" in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward that is not written in Python
        return False
    return taken and bool(getattr(module, "takes_past", True))


class CausalProblem(BlockProblem):
    """The fixed points of a causal block on all tokens at once; the state of a token that does not exist is 0."""

    exists: Tensor | None = None

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return only_existing(super().fixed_point_map(z), self.exists)

    def later_map(self) -> Callable[[Tensor], Tensor] | None:
        return super().later_map() if self.exists is None else None

    @torch.no_grad()
    def check_causal(self, z: Tensor) -> None:
        """Raise where an earlier token reads the last one: its state changes, or its part of the input."""
        event = z.ndim - (self.event_ndim - 1)
        count = z.shape[event - 1]
        key = (self.mode, "causal")
        if key in self.checked or transforms_active() or count < 2 or z.numel() == 0:
            return
        last = (torch.arange(count, device=z.device) == count - 1).expand(z.shape[:event])
        others = TokensTogether(self.apart())
        mapped = others.fixed_point_map(z)
        changed = [per_token(t, self.lead_of(z), count) and t.is_floating_point() for t in self.inputs]
        again = object.__new__(type(self))
        again.__dict__ |= vars(self)
        again.inputs = tuple(
            torch.cat([t[..., :-1, :], t[..., -1:, :] + 1.0], -2) if own and t.ndim == event + 1 else t
            for t, own in zip(self.inputs, changed, strict=True)
        )
        for problem in (others, TokensTogether(again.apart())):
            if not stay_where(problem, last, ~last, z, mapped):
                required = "let token t read tokens <= t alone with causal=True"
                received = f"{self._map_name()}, in which the last token changes earlier ones"
                raise ValueError(_validate.message("block", required, received, "mask later tokens, or causal=False"))
        self.checked.add(key)

    def lead_of(self, z: Tensor) -> torch.Size:
        """The axes of a state that number samples."""
        return z.shape[: z.ndim - self.event_ndim]


class TokensTogether(Tokens):
    """The tokens of a causal problem, all of which stay in the work."""

    def __init__(self, problem: Problem) -> None:
        self.inner = problem
        self.event_ndim = problem.event_ndim - 1
        self.token_order = problem.token_order or TokenOrder()

    def _behind(self, tokens: Tensor) -> Tensor:
        return self.token_order.behind(tokens)


class Window:
    """Some tokens of a call, evaluated beside the keys and values of all tokens before them.

    Args:
        problem: of all tokens of the call.
        reads: which tokens read which.
        memory: for keys and values.
        before: the number of tokens before those of the call.
        begin, end: the tokens of the call.
        index: some of them, (*batch, K), counted from `begin`; None for all.
        shared: what the windows of one solve share: the last state that was evaluated, and its index.
    """

    def __init__(
        self,
        problem: CausalProblem,
        batch: torch.Size,
        count: int,
        reads: Reads | None,
        memory: Memory,
        before: int,
        begin: int,
        end: int,
        index: Tensor | None = None,
        shared: list[Any] | None = None,
    ) -> None:
        self.made_of = (problem, batch, count, reads, memory, before, begin, end)
        self.index, self.shared = index, [] if shared is None else shared
        self.function = cast(BlockMap, problem.function)
        device = self.function.layout.device
        own = torch.arange(begin, end, device=device) if index is None else begin + index
        arguments = [rows_at(t, own, len(batch) - t.ndim) if per_token(t, batch, count) else t for t in problem.inputs]
        filled = self.function.frame.filled(tuple(arguments))
        # The masks of `reads` are those of the past.
        self.arguments = filled if reads is None else filled[:1]
        self.tensors = [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        self.exists = None if problem.exists is None else rows_at(problem.exists, own, -1)
        positions, mask, is_causal = own + before, None, False
        plain = index is None and (reads is None or reads == Reads())
        if plain and before + begin == 0 and end > 1:
            is_causal = True
        elif not (plain and end - begin == 1):
            mask = additive_mask(reads or Reads(), own, positions, before + end, self.function.layout.dtype)
        self.past = Past(memory, positions, before + end, mask, is_causal=is_causal, together=index is None)
        self.block = functools.partial(self.function.block, past=self.past)

    def at(self, index: Tensor) -> Window:
        """The window of some of its tokens, (*batch, K)."""
        return Window(*self.made_of, index, self.shared)

    def __call__(self, z: Tensor) -> Tensor:
        """f of the states (*batch, K, *event) of these tokens."""
        function = self.function
        state = function.layout.unpack(z)
        self.past.begin()
        written = [writes_to(tensor) for tensor in self.tensors]
        with function.precision():
            result = function.draws.evaluate(self.block, state, *self.arguments)
        if written != [writes_to(tensor) for tensor in self.tensors]:
            function._refuse_writes([False])
        cast = function.autocast is not None
        mapped = function.layout.pack(function.layout.check_output(function.__name__, result, state, cast=cast))
        self.shared[:] = z, self.index
        return only_existing(mapped, self.exists)

    def is_at(self, value: Tensor) -> bool:
        """Whether the last evaluation of the solve was at these states of all its tokens, or of those left."""
        z, index = self.shared
        rows = value if index is None else rows_at(value, index, index.ndim - 1 - value.ndim)
        return bool(torch.equal(rows, z))


class TokensInWindow(TokensTogether):
    """The tokens of a window; those that have ended leave the work, and others read their keys."""

    row_block = 1

    def __init__(self, window: Window, order: TokenOrder, event_ndim: int) -> None:
        self.window, self.token_order, self.event_ndim = window, order, event_ndim

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.window(z)

    def check_undeclared(self, z: Tensor) -> None:
        """Nothing is differentiated here."""

    def leaves_others(self, test: Callable[[], bool]) -> bool:
        # Tokens that have left are read by their keys.
        return True

    def select(self, index: Tensor) -> Self:
        return type(self)(self.window.at(index), self.token_order.restricted(index), self.event_ndim)


class OneToken(Problem):
    """The next token of every sample."""

    separates = False

    def __init__(self, window: Window, event_ndim: int) -> None:
        self.window, self.event_ndim = window, event_ndim

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.window(z)


@dataclasses.dataclass(eq=False)
class TokenSolve:
    """A solve of all tokens of a call, in place of that of whole samples.

    Attributes:
        reads: which tokens read which, beside causality; None for a block that has masks of its own.
        past: whether the block reads the past.
        cache: the tokens before.
        chunk: the number of tokens that are solved at once, each chunk behind those before it.
        record: how it went for every token, (*batch, N), once it was solved.
        lost: tokens, (*batch, N), that are not finite, or read such ones; None for none.
    """

    reads: Reads | None
    past: bool
    cache: BlockCache | None = None
    chunk: int | None = None
    record: Record | None = None
    lost: Tensor | None = None

    @functools.cached_property
    def order(self) -> TokenOrder:
        """The order of the tokens."""
        pairs = None if self.reads is None else self.reads.all_pairs()
        return TokenOrder(
            None if pairs is None else pairs & triangle(pairs.shape[-2], pairs.shape[-1], 0, pairs.device)
        )

    def run(self, solver: Solver, problem: Problem, initial: Tensor, *, trace: bool, graph: bool) -> Outcome:
        """The outcome for whole samples; the record of each token is kept here."""
        graph = graph and (torch.is_grad_enabled() or transforms_active())
        if self.past and isinstance(problem, CausalProblem) and not (trace or graph or transforms_active()):
            before = None if self.cache is None else self.cache.length
            outcome = self._in_windows(solver, problem, initial)
            drawn = self.cache is None and problem.draws.repeated
            if not drawn:
                return self._kept(outcome)
            # For other numbers of tokens the block draws other numbers.
            assert before is None
        tokens = TokensTogether(problem)
        outcome = solver.run(tokens, initial, trace=trace, graph=graph)
        if is_batched(outcome.record.status) or transforms_active():
            record = of_problems(outcome.record, problem.event_ndim - tokens.event_ndim)
            return outcome._replace(record=record)
        with torch.no_grad():
            record = tokens.measured_again(outcome.record, outcome.value)
        return self._kept(outcome._replace(record=record, trace=tokens.course(outcome.trace)))

    def _kept(self, outcome: Outcome) -> Outcome:
        record = outcome.record
        if self.lost is not None:
            status = record.status.masked_fill(self.lost, int(Status.NONFINITE))
            record = record._replace(status=status, residual=record.residual.masked_fill(self.lost, torch.nan))
        self.record = record
        # Tokens that are lost take no part in the solve, and spoil no gradient.
        return outcome._replace(record=of_problems(outcome.record, 1))

    def _in_windows(self, solver: Solver, problem: CausalProblem, initial: Tensor) -> Outcome:
        event_ndim = problem.event_ndim - 1
        axis = initial.ndim - event_ndim - 1
        batch, count = initial.shape[:axis], initial.shape[axis]
        before, memory = (0, Memory(count)) if self.cache is None else (self.cache.length, self.cache.memory)
        memory.grow(before + count)
        chunk = count if self.chunk is None else self.chunk
        values, records = [], []
        for begin in range(0, count, max(chunk, 1)):
            end = min(begin + chunk, count)
            window = Window(problem, batch, count, self.reads, memory, before, begin, end)
            order = self.order.restricted(torch.arange(begin, end, device=initial.device))
            one = end - begin == 1 and count == 1
            tokens = OneToken(window, event_ndim) if one else TokensInWindow(window, order, event_ndim)
            outcome = solver.run(tokens, initial.narrow(axis, begin, end - begin))
            record, value = outcome.record, outcome.value
            if not window.is_at(value):
                # The best state of a token that failed, or states that later tokens did not see last.
                again = window(value.nan_to_num(0.0, 0.0, 0.0)) - value
                left = record.status != Status.CONVERGED
                residual = torch.where(left, norm(again.flatten(axis + 1)), record.residual)
                record = record._replace(residual=residual)
            values.append(value)
            records.append(record)
        value = torch.cat(values, dim=axis) if len(values) > 1 else values[0]
        parts = zip(*records, strict=True)
        record = Record(*(torch.cat(fields, dim=-1) for fields in parts)) if len(records) > 1 else records[0]
        return Outcome(value, self._behind_failures(record))

    def _behind_failures(self, record: Record) -> Record:
        """The record in which tokens behind one that failed, in an earlier chunk or call, failed as it did."""
        earlier = None if self.cache is None else self.cache.status
        held = torch.zeros_like(record.status[..., :1]) if earlier is None else earlier.amax(-1, keepdim=True)
        codes = record.status
        if not bool(record.failed.any() | (held > Status.UNSTABLE).any()):
            return record
        for code in FAILURES:
            behind = self.order.behind(record.status == code) | (held == code)
            codes = torch.where(behind & ~(codes > code), code, codes)
        codes = torch.where(record.failed, record.status, codes)
        return record._replace(status=codes.to(record.status.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class CausalCall(BlockCall):
    """One call of a causal layer.

    Attributes:
        tokens: how all tokens are solved.
        exists: which tokens of the call exist, (*batch, N), or None for all.
        lost: tokens, (*batch, N), that are not finite, or read such ones; None for none.
    """

    tokens: TokenSolve = dataclasses.field(kw_only=True)
    exists: Tensor | None = None
    lost: Tensor | None = None

    def _problem(self) -> CausalProblem:
        layout = self.map.layout
        problem = CausalProblem(self.map, *self.inputs, event_ndim=layout.event_ndim + 1, checked=self.checked)
        problem.exists, problem.token_order = self.exists, self.tokens.order
        return problem

    def _packed(self) -> Tensor:
        return only_existing(super()._packed(), self.exists)

    def _request(self, problem: BlockProblem, packed: Tensor, solver: Solver) -> Request:
        assert isinstance(problem, CausalProblem)
        lead = problem.lead_of(packed)
        count = packed.shape[len(lead)]
        if self.tokens.past and self.tokens.reads is None:
            # A block of its own may take tensors that cannot be had for some of the tokens.
            whole = [t for t in problem.inputs if not per_token(t, lead, count) and count in t.shape and count > 1]
            self.tokens.past = not whole
        if not self.tokens.past:
            self._check_no_past()
        if self.tokens.cache is None:
            problem.check_causal(packed)
        return dataclasses.replace(super()._request(problem, packed, solver), by_token=self.tokens)

    def _check_no_past(self) -> None:
        block = type(self.map.block).__name__
        for name, given in (("cache", self.tokens.cache), ("chunk", self.tokens.chunk)):
            required = f"be None for {block}, which does not read settled tokens by a keyword argument `past`"
            remedy = "see `implicit_attention.layers.Past`, and give it tensors with an entry for each token alone"
            _validate.require(given is None, name, required, "one", remedy)

    def solved(self, solver: Solver | None = None, adjoint: Adjoint | None = None) -> tuple[Any, Solution]:
        if self.tokens.cache is None:
            state, solution = super().solved(solver, adjoint)
        else:
            with torch.no_grad():
                state, solution = super().solved(solver, adjoint)
            packed = solution.value if self.map.layout.single else cast(BlockSolution, solution).packed
            lead = packed.shape[: packed.ndim - self.map.layout.event_ndim]
            exists = None if self.tokens.reads is None else self.tokens.reads.exists
            self.tokens.cache.commit(exists, solution.status, solution.num_evals, packed.reshape(*lead, -1))
        if self.lost is None:
            return state, solution
        state = self._with_lost(state)
        return state, dataclasses.replace(solution, value=state)

    def looped(self, steps: int, measured: bool) -> tuple[Any, Solution | Record]:
        wanted = self.options.effective_solver
        if self.tokens.cache is not None:
            damping = wanted.damping if isinstance(wanted, Picard) else 0.0
            return self.solved(Picard(rtol=0, atol=0, max_steps=steps, damping=damping), Unrolled())
        state, solution = super().looped(steps, measured)
        if self.lost is None:
            return state, solution
        state, record = self._with_lost(state), solution if isinstance(solution, Record) else solution.record
        status = record.status.masked_fill(self.lost, int(Status.NONFINITE))
        record = record._replace(status=status, residual=record.residual.masked_fill(self.lost, torch.nan))
        if isinstance(solution, Record):
            return state, record
        report_failures(self.on_failure, type(self.map.block).__name__, record, wanted.remedies)
        return state, dataclasses.replace(solution, record=record, value=state)

    def _with_lost(self, state: Any) -> Any:
        """The state with NaN where tokens are lost."""
        lost = self.lost
        assert lost is not None

        def filled(tensor: Tensor) -> Tensor:
            return torch.where(lost.reshape(*lost.shape, *(1,) * (tensor.ndim - lost.ndim)), torch.nan, tensor)

        return pytree.tree_map(filled, state)


def only_existing(z: Tensor, exists: Tensor | None) -> Tensor:
    """States (*batch, N, *event), 0 for tokens that do not exist."""
    if exists is None:
        return z
    return torch.where(exists.reshape(*exists.shape, *(1,) * (z.ndim - exists.ndim)), z, 0.0)


def per_token(tensor: Tensor, batch: torch.Size, count: int) -> bool:
    """Whether a tensor has an entry for each token, (*batch, N, ...)."""
    return tensor.ndim > len(batch) and tensor.shape[: len(batch) + 1] == (*batch, count)


def additive_mask(reads: Reads, own: Tensor, positions: Tensor, total: int, dtype: torch.dtype) -> Tensor:
    """The mask of tokens at `positions`, the numbers `own` of a call, for all keys up to `total`: 0 or -inf.

    Every token reads itself, so that one that does not exist gives numbers that nobody reads, and no NaN.
    """
    keys = torch.arange(total, device=own.device)
    before, itself = keys <= positions[..., None], keys == positions[..., None]
    if own.ndim > 1:
        before, itself = before.unsqueeze(-3), itself.unsqueeze(-3)
    if reads.exists is not None:
        before = before & reads.exists[..., None, None, :total]
    if reads.pairs is not None:
        before = before & rows_of_pairs(reads.pairs, own)[..., :total]
    mask = torch.zeros(before.shape, dtype=dtype, device=own.device).masked_fill(~(before | itself), -torch.inf)
    return mask if reads.bias is None else mask + rows_of_pairs(reads.bias, own)[..., :total].to(dtype)


def rows_of_pairs(pairs: Tensor, own: Tensor) -> Tensor:
    """The rows `own` of masks that broadcast to (*batch, heads, N, N)."""
    if pairs.ndim < 2 or pairs.shape[-2] == 1:
        return pairs
    if own.ndim == 1:
        return pairs.index_select(-2, own)
    return rows_at(pairs if pairs.ndim > 2 else pairs[None], own, -2)


def begin_tokens(
    tokens: TokenSolve, x: Any, initial: Any, layout: StateLayout, owner: object, *, warm: bool
) -> tuple[Any, Any, dict[str, Any]]:
    """Input and start of a causal call, and what a `CausalCall` knows beyond a `BlockCall`.

    warm: whether a cache may say where its tokens start.
    """
    lead, event = layout.lead, layout.events[0]
    required = "number tokens on the axis after those of samples, with causal=True"
    _validate.require(len(event) > 1, "start", required, f"a state of one sample with shape {tuple(event)}")
    count = event[0]
    for shape in layout.events:
        fits = shape[:1] == event[:1] and len(shape) > 1
        _validate.require(
            fits, "start", f"have tensors with {count} tokens each", f"shape {tuple(shape)} of one sample"
        )
    reads, cache, exists = tokens.reads or Reads(), tokens.cache, None
    if cache is not None:
        check_block_cache(cache, owner, tuple(lead))
        key_mask = cache.all_exist(reads.exists, tuple(lead), count)
        reads = reads._replace(exists=key_mask)
        tokens.reads = reads if tokens.reads is not None or key_mask is not None else None
        if warm and cache.warm_start and cache.state is not None:
            initial = _from_last(cache.state, initial, layout)
    if reads.exists is not None:
        exists = reads.exists[..., -count:].expand(*lead, count)
    x, own = _without_nonfinite(x, lead, count)
    lost = None
    if own is not None:
        own = own if exists is None else own & exists
        lost = tokens.order.behind(own.expand(*lead, count))
        exists = ~lost if exists is None else exists & ~lost
        tokens.lost = lost
    return x, initial, {"tokens": tokens, "exists": exists, "lost": lost}


def _without_nonfinite(x: Any, lead: torch.Size, count: int) -> tuple[Any, Tensor | None]:
    """The input with 0 for tokens that are not finite, and these tokens (*batch, N); None where there are none."""
    leaves, spec = pytree.tree_flatten(x)
    lost = None
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and per_token(leaf, lead, count):
            own = ~leaf.detach().isfinite().flatten(len(lead) + 1).all(-1) if leaf.ndim > len(lead) + 1 else None
            lost = own if lost is None else lost if own is None else lost | own
    if lost is None or (host_may_look(lost) and not bool(lost.any())):
        return x, None

    def filled(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and per_token(leaf, lead, count)):
            return leaf
        return leaf.masked_fill(lost.reshape(*lost.shape, *(1,) * (leaf.ndim - lost.ndim)), 0.0)

    return pytree.tree_unflatten([filled(leaf) for leaf in leaves], spec), lost


def _from_last(state: Tensor, initial: Any, layout: StateLayout) -> Any:
    """The start of new tokens at the last state (*batch, 1, n) of a cache."""
    tokens = StateLayout.of(initial, len(layout.events[0]) - 1)
    packed = tokens.pack(initial)
    last = state.to(packed.dtype).reshape(*state.shape[:-1], *packed.shape[len(tokens.lead) :]).expand(packed.shape)
    return tokens.unpack(torch.where(last.isfinite(), last, packed))


class NoGradient(torch.autograd.Function):
    """States whose backward pass raises: those of a call with a cache."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        raise RuntimeError(
            "the states of a call with a cache have no gradient, as keys of earlier tokens are kept without their "
            "graph; train by one call on all tokens without a cache, or decode inside torch.no_grad()"
        )


def refusing_gradient(state: Any, x: Any, block: nn.Module) -> Any:
    """The state, with a backward pass that raises where somebody could expect a gradient."""
    if not torch.is_grad_enabled():
        return state
    tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    anchor = next((t for t in (*tensors, *block.parameters()) if t.requires_grad), None)
    if anchor is None:
        return state
    return pytree.tree_map(lambda z: NoGradient.apply(z, anchor), state)  # type: ignore[no-untyped-call]
