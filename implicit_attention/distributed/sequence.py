"""`sequence_parallel`: attention over a sequence whose tokens are spread over processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed

from .. import _validate
from ..attention.masks import check_whole
from .lock_step import LockStep, LockStepError, described, shape_text

Exchange: TypeAlias = Literal["heads", "keys"]
_Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]
#: The numbers of queries and keys of each process.
_Lengths: TypeAlias = tuple[list[int], list[int]]

# Arguments of attention functions that may have one number for each head.
_PER_HEAD = ("scale", "anchor")


def sequence_parallel(
    fn: Callable[..., Any], group: distributed.ProcessGroup | None = None, exchange: Exchange = "heads"
) -> Callable[..., Any]:
    """Make an attention function take the tokens of this process and answer as one process does for all tokens.

    Every process of the group holds a part of the sequence, in the order of ranks; parts may be of different length.
    What is exchanged does not depend on how many evaluations the equilibria take.

    exchange="heads": each process gets all tokens of an equal part of the heads, calls `fn`, and hands the answers
    back: softmax attention and equilibria have the bits of one process. The heads of queries and keys must be
    divisible by the number of processes.

    exchange="keys": each process gets all keys and values, and calls `fn` for its own queries, with `query_offset` if
    is_causal=True. For few heads, and for keys that many heads share.

    Args:
        fn: fn(query, key, value, **options), such as `equilibrium_attention` or a partial of it. It must compute each
            query and each head by itself.
        group: of torch.distributed; None is the default group.
        exchange: "heads" or "keys".

    Returns:
        A function of query (*batch, H, N, D), key (*batch, Hkv, M, D), value (*batch, Hkv, M, E), where N and M are
        those of this process, and of the options of `fn`. Its answer is (*batch, H, N, E), or what `fn` returned with
        the answer first (a solution is that of the problems of this process). Options with a number for each
        head (`scale`, `anchor`, shape (..., H)) are passed whole, and so is `attn_mask`, over all tokens; with
        exchange="keys" its rows are those of the queries of this process.

    Raises:
        LockStepError: in all processes, if shapes, dtypes, exchanges or options differ, tensors among these in any bit,
            or if `fn` raised in one (that one raises its own error).
        TypeError, ValueError: tensors that do not fit, heads that the processes cannot share, a DTensor.

    Gradients: of any order that `fn` has, where the loss is the sum of those of the processes: each gets the gradient
    of what it holds. Parameters that all processes hold get a part of their gradient in each: add these
    (`torch.distributed.all_reduce`; DDP divides the sum by the number of processes).

    Not for stored keys with replicated queries, which are never moved: use `ShardedLogSumExp`. Not for a layer whose
    heads are to be spread with its weights: use `ImplicitAttention.parallel_plan`. Keys are never passed around in a
    ring, which would have to turn once for each evaluation.

    Examples:
        >>> import torch
        >>> from torch import distributed
        >>> from implicit_attention import equilibrium_attention
        >>> from implicit_attention.distributed import sequence_parallel
        >>> store = distributed.HashStore()
        >>> distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # torchrun starts more
        >>> attention = sequence_parallel(equilibrium_attention)
        >>> query, key, value = torch.randn(3, 2, 4, 10, 8)
        >>> whole = equilibrium_attention(query, key, value, is_causal=True)
        >>> torch.equal(attention(query, key, value, is_causal=True), whole)
        True
        >>> distributed.destroy_process_group()

    Reference: Jacobs et al. (2023), DeepSpeed Ulysses, for the exchange of heads.
    """
    _validate.check_callable("fn", fn, "pass equilibrium_attention")
    _validate.check_choice("exchange", exchange, ("heads", "keys"))
    # Numbers per head may be among the keywords of a partial.
    keywords: dict[str, Any] = {}
    inner: Any = fn
    while isinstance(inner, functools.partial) and not inner.args:
        inner, keywords = inner.func, {**inner.keywords, **keywords}

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        check_whole()
        lock, options = LockStep(group), {**keywords, **options}
        device = query.device if isinstance(query, Tensor) else torch.device("cpu")
        try:
            _check(query, key, value)
            shared = _shared(exchange, query, key, value, options)
        except Exception as error:  # the others, whose arguments may fit, learn of it
            lock.compare({"arguments": f"{type(error).__name__}: {error}"}, device)
            raise
        lock.compare(shared, device)
        lengths = _lengths(lock, exchange, query, key, options)
        run = _by_heads if exchange == "heads" else _by_keys
        return run(inner, lock, lengths, (query, key, value), options)

    return attention


def _check(query: Any, key: Any, value: Any) -> None:
    named = [("query", query), ("key", key), ("value", value)]
    _validate.check_tensors(named, min_ndim=3)
    for name, tensor in named[1:]:
        required = f"have the query's leading axes {tuple(query.shape[:-3])} before heads, tokens and dimension"
        _validate.require(tensor.shape[:-3] == query.shape[:-3], name, required, f"shape {tuple(tensor.shape)}")
    fits = value.shape[-3:-1] == key.shape[-3:-1]
    required = f"have the {key.shape[-3]} heads and {key.shape[-2]} rows of `key`"
    _validate.require(fits, "value", required, f"shape {tuple(value.shape)}")


def _shared(exchange: str, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> dict[str, str]:
    """Return the arguments that must be the same in all processes."""
    shared = {"arguments": "fit", "exchange": repr(exchange), "options": ", ".join(sorted(options))}
    for name, argument in [("query", query), ("key", key), ("value", value), *sorted(options.items())]:
        # The rows of these arguments differ between processes.
        own_rows = name not in options or (name == "attn_mask" and exchange == "keys")
        if own_rows and isinstance(argument, Tensor) and argument.ndim > 1:
            shared[name] = shape_text(argument, (*argument.shape[:-2], "...", argument.shape[-1]))
        else:
            shared[name] = described(argument)
    return shared


def _lengths(lock: LockStep, exchange: str, query: Tensor, key: Tensor, options: dict[str, Any]) -> _Lengths:
    own = torch.tensor([query.shape[-2], key.shape[-2]], device=query.device)
    gathered = [torch.empty_like(own) for _ in range(lock.size)]
    lock.call(lambda: distributed.all_gather(gathered, own, group=lock.group))
    of_queries, of_keys = (list(numbers) for numbers in zip(*(each.tolist() for each in gathered), strict=True))
    if exchange == "keys" and options.get("is_causal"):
        required, received = "be as many as the keys of each process with is_causal=True", f"{of_queries} of {of_keys}"
        _validate.require(of_queries == of_keys, "query", required, received)
    return of_queries, of_keys


def _by_heads(
    fn: Callable[..., Any], lock: LockStep, lengths: _Lengths, inputs: _Inputs, options: dict[str, Any]
) -> Any:
    size, (heads, of_keys, _) = lock.size, (tensor.shape[-3] for tensor in inputs)
    for name, count in (("query", heads), ("key", of_keys)):
        remedy = "use exchange='keys', which takes any number"
        _validate.require(count % size == 0, name, f"have heads that {size} processes can share", f"{count}", remedy)
    parts = list(zip(*(tensor.chunk(size, -3) for tensor in inputs), strict=True))
    counts = zip(lengths[0], lengths[1], lengths[1], strict=True)
    arrived = _exchanged(lock, parts, [[*map(_with_rows, parts[0], rows)] for rows in counts])
    whole = [torch.cat(sources, -2) for sources in zip(*arrived, strict=True)]
    own = {name: _own_heads(option, heads, lock) for name, option in options.items() if name in _PER_HEAD}
    if isinstance(mask := options.get("attn_mask"), Tensor) and mask.ndim > 2 and mask.shape[-3] == heads > 1:
        own["attn_mask"] = mask.chunk(size, -3)[lock.rank]
    answer = _called(fn, lock, *whole, **{**options, **own})
    output, *others = answer if isinstance(answer, tuple) else (answer,)
    returned = [[rows] for rows in output.split(lengths[0], -2)]
    back = _exchanged(lock, returned, [[_with_rows(output, inputs[0].shape[-2])]] * size)
    output = torch.cat([source[0] for source in back], -3)
    return (output, *others) if isinstance(answer, tuple) else output


def _by_keys(
    fn: Callable[..., Any], lock: LockStep, lengths: _Lengths, inputs: _Inputs, options: dict[str, Any]
) -> Any:
    query, *own = inputs
    expected = [[_with_rows(tensor, count) for tensor in own] for count in lengths[1]]
    arrived = _exchanged(lock, [own] * lock.size, expected)
    keys, values = (torch.cat(sources, -2) for sources in zip(*arrived, strict=True))
    place = {"query_offset": sum(lengths[1][: lock.rank])} if options.get("is_causal") else {}
    return _called(fn, lock, query, keys, values, **{**options, **place})


def _called(fn: Callable[..., Any], lock: LockStep, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Return the answer of `fn` in this process, if it has answered in all processes."""
    answer, error = None, None
    try:
        answer = fn(query, key, value, **options)
    except Exception as raised:  # the others wait, and learn of it
        error = raised
    failed = lock.maximum(torch.tensor(float(error is not None), device=query.device))
    if error is not None:
        raise error
    if bool(failed):
        raise LockStepError("`fn` raised in another process of the group; read the error there")
    return answer


def _own_heads(option: Any, heads: int, lock: LockStep) -> Any:
    """Return the part of an option, (..., H), for the heads of this process."""
    if not isinstance(option, Tensor) or option.ndim == 0 or option.shape[-1] != heads or heads == 1:
        return option
    return option.chunk(lock.size, -1)[lock.rank]


def _with_rows(tensor: Tensor, rows: int) -> torch.Size:
    """The shape of a tensor with another number of rows."""
    return torch.Size((*tensor.shape[:-2], rows, tensor.shape[-1]))


def _exchanged(
    lock: LockStep, outgoing: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[torch.Size]]
) -> list[list[Tensor]]:
    """Send outgoing[r] to rank r; return the tensors that come from each rank r, in the shapes expected[r]."""
    sent = [sum(t.numel() for t in parts) for parts in outgoing]
    come = [sum(shape.numel() for shape in shapes) for shapes in expected]
    flat = torch.cat([t.reshape(-1) for parts in outgoing for t in parts])
    received = _AllToAll.apply(flat, lock, sent, come)  # type: ignore[no-untyped-call]
    arrived = []
    for shapes, part in zip(expected, received.split(come), strict=True):
        pieces = part.split([shape.numel() for shape in shapes])
        arrived.append([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
    return arrived


class _AllToAll(torch.autograd.Function):
    """(numbers, lock, counts to each rank, counts from each) -> the numbers that come; its transpose goes back."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, lock: LockStep, sent: list[int], come: list[int]) -> Tensor:
        ctx.lock, ctx.sent, ctx.come = lock, sent, come
        out = flat.new_empty(sum(come))
        flat = flat.contiguous()
        lock.call(lambda: distributed.all_to_all_single(out, flat, come, sent, group=lock.group))
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        by_flat = _AllToAll.apply(cotangent, ctx.lock, ctx.come, ctx.sent)  # type: ignore[no-untyped-call]
        return by_flat, None, None, None
