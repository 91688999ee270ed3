"""The equilibrium of every query and its adjoint solve, by the native library; what it cannot do, and its check."""

from __future__ import annotations

import functools
from array import array
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..problem import AdjointAnswer, AdjointRule, Attention, FusedRule, Solved
from ..trust import Errors, adjoint_errors, several, small_problem, solve_errors
from . import library

#: Leading axes that the library takes.
AXES = 16
#: Numbers that an index of the library can count without overflow, even times their bytes.
LARGEST = 2**55
#: Precisions of states and keys that it takes.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: Steps that float32 counts.
MOST_STEPS = 2**24
#: Shape and steps of a tensor.
_Place: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"

_CODES = {torch.float32: "f", torch.float64: "d"}
_NO_MASK, _BOOLEAN, _ADDED = range(3)


def solve(record: Attention, initial: Tensor, rule: FusedRule) -> tuple[Solved, int]:
    """Every query solved from `initial`, and how many failed; all tensors are of one dtype and `in_memory`."""
    query = record.query
    device, kind = query.device, query.dtype
    state, mean = several(query.shape, device, kind, kind)
    kinds = kind, kind, kind, torch.int8, torch.int32
    logsumexp, residual, tolerance, status, steps = several(query.shape[:-1], device, *kinds)
    outputs = list(map(Tensor.data_ptr, (state, mean, logsumexp, residual, tolerance, status, steps)))
    numbers = (rule.rtol, rule.atol, min(rule.max_steps, MOST_STEPS), min(rule.plain_steps, MOST_STEPS + 1))
    failed = call("solve", record, (query, initial), numbers, outputs)
    return Solved(state, mean, logsumexp, status, residual, tolerance, steps, steps + 1), failed


def adjoint(
    record: Attention,
    state: Tensor,
    cotangent: Tensor,
    mean: Tensor,
    _: Tensor | None,
    rule: AdjointRule,
    *,
    by_bias: Tensor | None = None,
) -> AdjointAnswer:
    """Solve A u = cotangent at every state, where the mean of the keys is `mean`, all (*batch, N, D) and of one dtype.

    The tensors are `in_memory`.

    A query that stalled, at a saddle above all, has the status STALLED and adds nothing to the gradients.

    by_bias: zeros (*batch, M), contiguous, to which the gradient of a bias of every key is added.
    """
    device, kind = cotangent.device, cotangent.dtype
    (value,), (by_keys,) = several(cotangent.shape, device, kind), several(record.keys.shape, device, kind)
    kinds = kind, kind, kind, torch.int8, torch.int32, torch.bool
    by_beta, residual, tolerance, status, steps, negative = several(cotangent.shape[:-1], device, *kinds)
    written = (value, by_beta, by_keys, by_bias, residual, tolerance, status, steps, negative)
    outputs = [0 if t is None else t.data_ptr() for t in written]
    call("adjoint", record, (cotangent, state, mean), (rule.rtol, rule.max_steps), outputs)
    return AdjointAnswer(value, status, residual, tolerance, steps, negative, by_beta, by_keys)


def call(
    function: str,
    record: Attention,
    states: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    outputs: list[int],
) -> int:
    """Return what the library's function returns; it writes to the addresses `outputs` that are not 0.

    Axes of the batch along which all queries share their keys come last: such queries are solved side by side.

    states: (*batch, N, D), in memory; the first takes the place of the query.
    """
    loaded = library.found()[0]
    assert loaded is not None
    like, keys, pairs = states[0], record.keys, record.mask if record.bias is None else record.bias
    if keys.stride(-1) != 1 and keys.shape[-1] != 1:
        keys = keys.contiguous()
    # One after the other in memory, where the library reads those that are no tensors.
    numerals = array(_CODES[like.dtype], (0.0, 0.0))
    addresses = [like.data_ptr(), keys.data_ptr()]
    places: list[_Place | None] = [(like.shape, like.stride())]
    for i, given in enumerate((record.beta, record.anchor, pairs, *states[1:])):
        if isinstance(given, Tensor):
            addresses.append(given.data_ptr())
            places.append((given.shape, given.stride()))
            continue
        if given is not None:
            numerals[i] = given
        addresses.append(0 if given is None else numerals.buffer_info()[0] + i * numerals.itemsize)
        places.append(None)
    kind = _NO_MASK if pairs is None else _BOOLEAN if pairs.dtype == torch.bool else _ADDED
    # A solve shares keys that lie in the same place; an adjoint solve has a gradient for each of them.
    integers = _packed(kind, record.first, function == "solve", (keys.shape, keys.stride()), *places)
    doubles, pointers = array("d", numbers), array("Q", addresses + outputs)
    buffers = integers.buffer_info()[0], doubles.buffer_info()[0], pointers.buffer_info()[0]
    run = getattr(loaded, function)
    result: int = run(like.itemsize, *buffers, loaded.parallel_for, torch.get_num_threads())
    if result < 0:
        raise MemoryError("the native operation found no memory for its tiles")
    return result


def in_memory(tensor: Tensor) -> Tensor:
    """A tensor with its numbers in memory as they are: torch may keep a sign aside, or no memory for zeros."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor._is_zerotensor() else tensor.resolve_neg()


@functools.lru_cache(maxsize=1024)
def _packed(kind: int, first: int | None, expanded: bool, keys: _Place, *others: Any) -> array[int]:
    """Sizes and steps, in the order in which the library reads them: the same for all calls of one layout.

    others: the places of the first state, of beta, anchor and mask, None where there are none, and of further states.
    """
    like, beta, anchor, mask, *states = others
    *batch, queries, dim = like[0]
    axes = len(batch)
    sizes = (1,) * (axes + 2 - len(keys[0])) + keys[0]
    of_keys = _steps(keys, axes + 2)
    shared = [batch[i] != 1 and (sizes[i] == 1 or (expanded and of_keys[i] == 0)) for i in range(axes)]
    order = sorted(range(axes), key=shared.__getitem__)
    out, size = [0] * axes, queries
    for i in reversed(range(axes)):
        out[i], size = size, size * batch[i]
    pairs = (kind, first is not None, first or 0)
    numbers = array("q", [axes - sum(shared), sum(shared), queries, keys[0][-2], dim, *pairs])
    numbers.extend([batch[i] for i in order])
    numbers.extend([out[i] for i in order])
    # Keys without the step of their dimension, which is 1.
    further = [(place, 2, 2) for place in (mask, *states) if place is not None]
    for place, own, kept in [(like, 2, 2), (keys, 2, 1), (beta, 0, 0), (anchor, 0, 0), *further]:
        steps = [0] * axes if place is None else _steps(place, axes + own)
        numbers.extend([steps[i] for i in order] + steps[axes : axes + kept])
    return numbers


def _steps(place: _Place, axes: int) -> list[int]:
    """Return the strides of a tensor that may lack leading axes; 0 along axes of size 1, which broadcast."""
    strides = [0 if size == 1 else step for size, step in zip(*place, strict=True)]
    return [0] * (axes - len(strides)) + strides


def unsupported(record: Attention) -> str | None:
    """Why the native operations cannot do `record`, as "reason; remedy"; None if they can."""
    query, keys = record.query, record.keys
    if query.device.type != "cpu":
        return f"the native operations run on a CPU, not on {str(query.device)!r}; use impl='auto'"
    if query.dtype not in DTYPES:
        return f"the native operations do not compute in {query.dtype}; use float32 or float64, or impl='auto'"
    if query.ndim - 2 > AXES:
        return f"the native operations take at most {AXES} leading axes, got {query.ndim - 2}; flatten some"
    if max(query.numel(), keys.numel(), query.shape[:-1].numel()) > LARGEST:
        return "the native operations count no more than 2^55 numbers; use impl='auto'"
    return library.unavailable()


# The small problems by which the operations earn trust: more than one tile of queries and one block of keys, and parts.
ROWS, KEYS = 37, 259


class NativeVariant(NamedTuple):
    """The properties of a call that select the code path of a native operation."""

    isa: str
    dtype: torch.dtype
    head_dim: int
    mask: str
    causal: bool


def check_solve(record: Attention) -> Errors:
    return solve_errors(small_problem(record, ROWS, KEYS), lambda *given: solve(*given)[0])


def check_adjoint(record: Attention) -> Errors:
    return adjoint_errors(small_problem(record, ROWS, KEYS), lambda *given: solve(*given)[0], adjoint)


CHECKS = {"hopfield_solve": check_solve, "hopfield_adjoint": check_adjoint}
