"""The state of tensors in autograd, their precision and readability, and small helpers around torch's autograd.

The predicates of torch's modes, when they hold, and what they decide on:

| predicate | holds | decides on |
|---|---|---|
| `transforms_active` | inside grad, vjp, jvp, vmap or forward mode | steps that these would record or refuse |
| `is_exporting`, `into_onnx` | while torch.export, or ONNX, records | graphs without breaks, of known operations |
| `unobserved` | no transform, mode, compiler or autocast sees operations | calls of kernels by address |
| `backward_running` | in a backward pass, in which checkpointing computes again | one report of a failure, not two |
| `is_batched` | a tensor is inside vmap | looks that are impossible there |
| `is_fake` | a tensor has a shape and no numbers | answers of shapes alone |
| `are_plain` | tensors are strided numbers in this machine's memory | calls of kernels by address |
| `has_tangent`, `may_have_tangent` | forward mode tracks a tensor, or may | derivatives that a kernel has not |
| `is_differentiated` | a derivative by a tensor can be asked for | graphs and what backward passes read |
| `is_plain` | none can, at any level | kernels without derivatives |
| `host_may_look` | a look at numbers costs no wait and has no consequence | shortcuts by numbers |
| `host_may_look_at_constant` | the same of what torch.func does not vary | the same by masks |
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _dispatch_keys,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, maybe_get_level
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

#: A linear map on one vector per problem, (*batch, n) -> (*batch, n).
LinearMap: TypeAlias = Callable[[Tensor], Tensor]
_P = ParamSpec("_P")
_R = TypeVar("_R")


# Modes of torch.


def transforms_active() -> bool:
    """Whether a torch.func transform (grad, vjp, jvp, vmap) or a forward-mode level is open."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Whether torch.export records a program.

    Inside torch.compile `torch.compiler.is_exporting` is true as well before torch 2.13.
    """
    return torch.compiler._is_exporting_flag


def into_onnx() -> bool:
    """Whether a model is being exported to ONNX, which knows no operations but its own."""
    return torch.onnx.is_in_onnx_export()


# The strict tracer, which ONNX tries where the other failed, would take the answer for a constant "no". This mark
# makes it call the function.
into_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unobserved() -> bool:
    """Whether torch runs eagerly, and no transform, mode or recording sees or changes the operations."""
    return not (
        torch.compiler.is_compiling()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or torch.is_autocast_enabled("cpu")
        or torch._C._get_deterministic_algorithms()
        or _eval_frame_callback() is not None
    )


#: The callback of torch.compile for each frame, also for frames called by a frame that it gave up.
_eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def backward_running() -> bool:
    """Whether autograd runs a backward pass in this thread, in which checkpointing computes a forward pass again."""
    return torch._C._current_graph_task_id() != -1


# The state of tensors.


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """The tensor and those inside of it, one for each wrapper of torch.func, the plain one last."""
    found = [tensor]
    while is_functorch_wrapped_tensor(found[-1]):
        found.append(get_unwrapped(found[-1]))
    return found


def is_batched(*tensors: Tensor) -> bool:
    """Whether one of `tensors` is inside torch.vmap at any level, where the host cannot read numbers.

    Elsewhere it can, though it may have to wait for another device; see `host_may_look`.
    """
    if is_exporting():
        return False
    return any(is_batchedtensor(inner) for tensor in tensors for inner in unwrapped(tensor))


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape but no numbers: on the device meta, or under torch's FakeTensorMode."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def are_plain(dtype: torch.dtype, *tensors: Any) -> bool:
    """Whether all are strided tensors of numbers in this machine's memory and nothing more, while `unobserved`.

    None is of a subclass, wrapped by a transform, without numbers, sparse, nested, or to be negated when it is read.
    """
    keys = _plain_keys()
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype != dtype:
            return False
        if _dispatch_keys(tensor).raw_repr() not in keys:
            return False
    return True


@functools.cache
def _plain_keys() -> tuple[int, ...]:
    with torch.inference_mode():
        frozen = torch.empty(0, device="cpu")
    with torch.inference_mode(False):
        return tuple(_dispatch_keys(t).raw_repr() for t in (torch.empty(0, device="cpu"), frozen))


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation tracks `tensor`."""
    if forward_ad._current_level < 0:
        return False
    while is_batchedtensor(tensor):
        # Torch cannot ask this of a tensor inside torch.vmap.
        tensor = get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def may_have_tangent(tensor: Tensor) -> bool:
    """Whether `tensor` may have a tangent at any level; true inside torch.func, which shows one, and torch.compile."""
    if forward_ad._current_level < 0:
        return False
    return torch.compiler.is_compiling() or is_functorch_wrapped_tensor(tensor) or has_tangent(tensor)


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative with respect to one of `tensors` can be asked for."""
    return any((torch.is_grad_enabled() and t.requires_grad) or has_tangent(t) for t in tensors)


def is_plain(*tensors: Tensor) -> bool:
    """Whether no derivative with respect to `tensors` can be asked for, so that kernels without one may be used."""
    return not (transforms_active() or is_differentiated(*tensors))


def host_may_look(*tensors: Tensor) -> bool:
    """Whether the host may read the numbers of `tensors` in passing, at no cost and without consequences.

    False where one of these holds:

    - Inside torch.func: in vmap a number stands for a whole batch, and what grad and jvp compute should hold for all
      inputs.
    - While torch.compile or torch.jit records a graph: it would break there, or keep an answer that is true of these
      numbers only.
    - Under a TorchDispatchMode (make_fx, FakeTensorMode): it records or replaces each operation in the same way.
    - A tensor has a shape but no numbers: on the device meta, or under FakeTensorMode.
    - A tensor is on another device than the CPU: the host would wait until the device has done all that was queued.
    """
    return not _are_functorch_transforms_active() and host_may_look_at_constant(*tensors)


def host_may_look_at_constant(*tensors: Tensor) -> bool:
    """`host_may_look` for tensors such as masks, which torch.func does not vary."""
    if torch.compiler.is_compiling() or _get_tracing_state() is not None or _len_torch_dispatch_stack():
        return False
    wrapped = is_functorch_wrapped_tensor
    return not any(wrapped(tensor) or not tensor.is_cpu or isinstance(tensor, FakeTensor) for tensor in tensors)


# Precision.

#: Half precision, in which a state would sit up to a percent away from its solution: states are float32.
HALF = (torch.float16, torch.bfloat16)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of a solver's state for inputs of `dtype`: float32 for half precision, else the same."""
    return torch.float32 if dtype in HALF else dtype


def at_least_single(value: Any) -> Any:
    """A tensor of half precision in float32; any other object as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def exact_precision(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast lowers no precision on the device of `tensor`."""
    kind = tensor.device.type
    # In an exported program a context would be a graph of its own.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def in_own_precision(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` in the precision of its tensors: torch.autocast, where it is on, lowers none inside.

    Neither does it where the gradient is taken inside the context of autocast, which torch's formulas would follow.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        lowered = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
        if not lowered:
            return function(*args, **kwargs)
        compiling = torch.compiler.is_compiling()
        first = 0 if compiling else torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        with torch.autocast(lowered[0], enabled=False):
            # There may be another.
            result = call(*args, **kwargs)
        if compiling:
            return result
        if torch.is_grad_enabled() and not transforms_active():
            _differentiate_exactly(result, first)
        return _with_exact_functions(result)  # type: ignore[no-any-return]

    return call


def _with_exact_functions(result: Any) -> Any:
    """`result`, whose functions, such as products with a Jacobian, compute in the precision of their tensors, too."""
    named = result._asdict() if isinstance(result, tuple) and hasattr(result, "_asdict") else {}
    later = {name: in_own_precision(f) for name, f in named.items() if isinstance(f, FunctionType)}
    return result._replace(**later) if later else result


#: Devices whose precision torch.autocast may lower.
_KINDS = ("cpu", "cuda", "xpu") + ("mps",) * torch.backends.mps.is_available()


def _differentiate_exactly(result: Any, first: int) -> None:
    """Have the graph of `result` from the node with the number `first` on ignore autocast when it is differentiated."""
    nodes, seen = [t.grad_fn for t in _tensors_in(result)], set()
    while nodes:
        node = nodes.pop()
        # Leaves have the largest number of all.
        if node is None or node in seen or not first <= node._sequence_nr() < 2**63:
            continue
        seen.add(node)
        node.register_prehook(_without_autocast)
        nodes.extend(before for before, _ in node.next_functions)


def _without_autocast(cotangents: Any) -> None:
    # Torch restores this after every node.
    for kind in _KINDS:
        if torch.is_autocast_enabled(kind):
            torch.set_autocast_enabled(kind, False)


def _tensors_in(result: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts, and in the attributes of an answer."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            parts = getattr(leaf, "__dict__", {}).values()
            yield from _tensors_in([part for part in parts if isinstance(part, Tensor | tuple | list)])


# Loops and derivatives.


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, which torch.compile does not compile: one clean graph break.

    For loops in which the host decides when to stop, which would break the graph at every step. In torch.export, whose
    graphs have no breaks, the function is recorded, and has to say what it cannot do there.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # The compiler still traces each function that is called by a frame which it gave up.
        if not is_exporting() and (torch.compiler.is_compiling() or _eval_frame_callback() is not None):
            outside: Callable[_P, _R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def looks_every(wanted: int | None, *tensors: Tensor) -> int:
    """The most steps between two looks of the host whether a loop has finished; 0, for never, inside torch.vmap.

    Where none is `wanted` the host looks less often at another device than the CPU, for which it has to wait.
    """
    if is_batched(*tensors):
        return 0
    return wanted or (1 if tensors[0].device.type == "cpu" else 8)


class Looks:
    """Steps after which the host looks how many problems of a loop are unfinished, waiting for another device.

    The next look is where all will have finished, if the worst problem goes on as it did since the look before, and
    `every` steps later at most. Nobody looks at the first evaluation, after which it is made, unless `every` is 1.

    Args:
        every: as of `looks_every`.
        measured: which problems are unfinished, (*lead), their residuals and their tolerances.
    """

    def __init__(self, every: int, active: Tensor, residual: Tensor, tolerance: Tensor) -> None:
        self.every, self.due = every, math.inf if every == 0 else int(every > 1)
        self._step, self._needed, self._ratios = 0, math.inf, _ratios(active, residual, tolerance)

    def left(self, step: int, *measured: Tensor) -> int:
        """The largest number of unfinished problems in a batch entry after so many steps: one look."""
        active = measured[0]
        if not active.numel():
            return 0
        if self.every == 1:
            return int(active.sum(-1).amax())
        left = self._look(step, *measured)
        self.due = step + max(math.ceil(min(self._needed, self.every)), 1)
        return left

    def needed(self, step: int, *measured: Tensor) -> float:
        """The number of steps that the worst problem still needs, if it goes on as between the last two looks."""
        if step != self._step:
            self._look(step, *measured)
        return self._needed

    def _look(self, step: int, active: Tensor, residual: Tensor, tolerance: Tensor) -> int:
        ratios = _ratios(active, residual, tolerance)
        told = active.sum(-1).amax(), self._ratios.amax(), ratios.amax()
        # A count of more than 2^24 would be rounded in float32, which is the widest on some devices.
        left, before, now = torch.stack([t.float() if t.device.type == "mps" else t.double() for t in told]).tolist()
        falls = 1 < now < before < math.inf
        self._needed = math.log(now) / math.log(before / now) * (step - self._step) if falls else math.inf
        self._step, self._ratios = step, ratios
        return int(left)


def _ratios(active: Tensor, residual: Tensor, tolerance: Tensor) -> Tensor:
    """Residuals in units of their tolerances, 0 of problems that have ended."""
    return (residual / tolerance).detach().masked_fill(~active, 0.0)


def check_graph(name: str, result: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Raise if `result` = function(*inputs) changes with inputs that are differentiated, but has no graph.

    Its derivative would silently be zero. Where the host cannot look, under torch.vmap and torch.compile, nothing is
    checked.
    """
    if torch.compiler.is_compiling():
        return
    level = max((maybe_get_level(t) for t in inputs if t.requires_grad), default=None)
    if level is None or not torch.is_grad_enabled():
        return
    known = any(maybe_get_level(inner) == level and inner.requires_grad for inner in unwrapped(result))
    if known or is_batched(result, *inputs):
        return
    moved = [1.25 * t.detach() + 0.1 if t.requires_grad and maybe_get_level(t) == level else t for t in inputs]
    if not same(function(*moved).detach(), result.detach()):
        raise ValueError(
            f"`{name}` must record the derivatives of the tensors that it reads, got numbers that change with them and "
            "have no graph; compute it by torch operations, without detach(), no_grad or numpy"
        )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN in the same places."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def readable(tensor: Tensor, *, wait: bool = False) -> Tensor | None:
    """The plain tensor inside all wrappers of torch.func, for the host to read; its axes may be in another order.

    None for a tensor on another device than the CPU, for which the host would have to wait, unless it is to `wait`.
    """
    return unwrapped(tensor)[-1].detach() if wait or tensor.device.type == "cpu" else None


def vjp(function: Callable[..., Any], *primals: Tensor, has_aux: bool = False) -> Any:
    """torch.func.vjp: (outputs, pullback), or (outputs, pullback, aux); under hooks on saved tensors, too."""
    with without_hooks():
        return torch.func.vjp(function, *primals, has_aux=has_aux)


def grad(function: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """torch.func.grad, under hooks on saved tensors, too."""
    return without_hooks()(torch.func.grad(function, argnums=argnums, has_aux=has_aux))


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """A context without hooks on saved tensors, such as those of torch.utils.checkpoint and save_on_cpu.

    torch.func refuses to run beneath them. What is saved in the context is kept as it is, with the same gradients.
    """
    hooks = []
    if not torch.compiler.is_compiling():
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def jvp_by_vjp(function: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    """J t of `function` with reverse mode only: the vjp is linear in its cotangent, and J t is the vjp of that.

    torch.func.jvp cannot be called inside the jvp rule of a torch.autograd.Function.
    """
    out, pullback = vjp(function, *primals)
    _, pushforward = vjp(pullback, torch.zeros_like(out))
    tangent: Tensor = pushforward(tuple(tangents))[0]
    return tangent


def tangent_rule(rule: Callable[..., Any]) -> Any:
    """The jvp of an autograd function, given as rule(ctx, saved, *tangents), for every nesting of forward levels.

    Torch lets no outer level see what a jvp computes, and gives it the saved tensors with tangents of its own level.
    """

    def jvp(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return rule(ctx, [_primal(t) for t in ctx.saved_tensors], *tangents)

    return staticmethod(jvp)


def _primal(tensor: Tensor) -> Tensor:
    """`tensor` without its tangent of this level."""
    if is_batchedtensor(tensor):
        # Torch cannot ask this of a tensor inside torch.vmap.
        place = torch._C._functorch.maybe_get_bdim(tensor), maybe_get_level(tensor)
        return torch._C._functorch._add_batch_dim(_primal(get_unwrapped(tensor)), *place)
    primal: Tensor = forward_ad.unpack_dual(tensor).primal  # type: ignore[no-untyped-call]
    return primal


def along(per_problem: Tensor, target: Tensor) -> Tensor:
    """Append axes to a (*batch) tensor until it broadcasts along `target`."""
    return per_problem.reshape(per_problem.shape + (1,) * (target.ndim - per_problem.ndim))


def sum_to_shape(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Undo a broadcast: the gradient of an expanded tensor."""
    return tensor.sum_to_size(shape)


class _Refusing(torch.autograd.Function):
    """(result, kind of the error, its message, *inputs) -> the result, whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, kind: type[Exception], message: str, *inputs: Tensor) -> Tensor:
        ctx.kind, ctx.message = kind, message
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ctx.kind(ctx.message)


def refusing(result: Tensor, kind: type[Exception], message: str, *inputs: Tensor) -> Tensor:
    """The result, with a backward pass that raises, where it or one of the inputs requires grad."""
    refused: Tensor = _Refusing.apply(result, kind, message, *inputs)  # type: ignore[no-untyped-call]
    return refused


# Lengths: the square of 1e20 is no float32, nor is that of 1e-25.


def _range(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return math.sqrt(info.tiny / info.eps), 2.0 ** (math.frexp(info.max)[1] * 5 // 8)


#: The least length whose square has all its digits, and a power of two by which shorter vectors get there.
_RANGE = {dtype: _range(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def length(vector: Tensor) -> Tensor:
    """Euclidean length of vectors whose squares are representable, (*batch)."""
    size: Tensor = torch.linalg.vector_norm(vector, dim=-1)
    return size


def norm(vector: Tensor) -> Tensor:
    """Euclidean length, (*batch, n) -> (*batch); squares neither overflow nor underflow."""
    size = length(vector)
    least, power = _RANGE[size.dtype]
    if size.numel() and host_may_look(size):
        low, high = torch.aminmax(size.detach())
        if least <= float(low) and float(high) < math.inf:
            return size
    # Powers of two change no bit of the others.
    factor = torch.ones_like(size).masked_fill(size < least, power).masked_fill(~(size < torch.inf), 1 / power)
    return length(vector * factor.unsqueeze(-1)) / factor


def resolves(size: Tensor) -> Tensor:
    """Whether squares of numbers of this size, (*batch), have all their digits."""
    return size >= _RANGE[size.dtype][0]
