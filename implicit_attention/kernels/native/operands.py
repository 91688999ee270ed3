"""A problem as the native library reads it: integers, numbers and addresses of views; and what it cannot do."""

from __future__ import annotations

import functools
from array import array
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..problem import Hopfield
from .library import unavailable

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


class Operands:
    """Addresses and steps of tensors (*#batch, ...), for one call.

    Axes of the batch along which all queries share their keys come last: such queries are solved side by side.
    """

    def __init__(
        self,
        like: Tensor,
        keys: Tensor,
        beta: float | Tensor,
        anchor: float | Tensor,
        mask: Tensor | None,
        first: int | None,
        *others: Tensor,
        expanded: bool = False,
    ) -> None:
        """`like` and `others` are (*batch, N, D); `expanded` keys, which lie in the same place, count as shared.

        All tensors are `in_memory`.

        beta, anchor: numbers, or tensors in either layout of `Hopfield`.
        """
        if keys.stride(-1) != 1 and keys.shape[-1] != 1:
            keys = keys.contiguous()
        own: array[float] = array(_CODES[like.dtype])
        start: list[int] = []
        where: list[_Place | None] = []
        for number in (beta, anchor):
            if isinstance(number, Tensor):
                number = number.squeeze((-2, -1)) if number.ndim == like.ndim else number
                start.append(number.data_ptr())
                where.append((number.shape, number.stride()))
            else:
                own.append(number)
                start.append(0)
                where.append(None)
        kind, place = _NO_MASK, None
        if mask is not None:
            kind, place = _BOOLEAN if mask.dtype == torch.bool else _ADDED, (mask.shape, mask.stride())
        self._integers = _packed(
            kind,
            first,
            expanded,
            (like.shape, like.stride()),
            (keys.shape, keys.stride()),
            *where,
            place,
            *[(other.shape, other.stride()) for other in others],
        )
        at = own.buffer_info()[0]
        for i in range(2):
            if where[i] is None:
                start[i] = at
                at += own.itemsize
        masked = 0 if mask is None else mask.data_ptr()
        self._addresses = [like.data_ptr(), keys.data_ptr(), *start, masked, *map(Tensor.data_ptr, others)]
        self._kept = like, keys, beta, anchor, mask, others, own

    def call(self, function: Any, bytes_: int, numbers: list[float], outputs: list[int], parallel_for: int) -> int:
        """Return what the library's function returns; it writes to the addresses `outputs` that are not 0."""
        doubles = array("d", numbers)
        addresses = array("Q", self._addresses)
        addresses.extend(outputs)
        result: int = function(
            bytes_,
            self._integers.buffer_info()[0],
            doubles.buffer_info()[0],
            addresses.buffer_info()[0],
            parallel_for,
            torch.get_num_threads(),
        )
        if result < 0:
            raise MemoryError("the native operation found no memory for its tiles")
        return result


def in_memory(part: Any) -> Any:
    """A tensor with its numbers in memory as they are: torch may keep a sign aside, or no memory for zeros."""
    if not isinstance(part, Tensor):
        return part
    return torch.zeros(part.shape, dtype=part.dtype) if part._is_zerotensor() else part.resolve_neg()


@functools.lru_cache(maxsize=1024)
def _packed(
    kind: int,
    first: int | None,
    expanded: bool,
    like: _Place,
    keys: _Place,
    beta: _Place | None,
    anchor: _Place | None,
    mask: _Place | None,
    *others: _Place,
) -> array[int]:
    """Sizes and steps, in the order in which the library reads them: the same for all calls of one layout."""
    *batch, queries, dim = like[0]
    axes = len(batch)
    of_keys = _steps(keys, axes + 2)
    ahead = axes + 2 - len(keys[0])
    shared = [
        batch[i] != 1 and (i < ahead or keys[0][i - ahead] == 1 or (expanded and of_keys[i] == 0)) for i in range(axes)
    ]
    order = [i for i in range(axes) if not shared[i]] + [i for i in range(axes) if shared[i]]
    out, size = [0] * axes, queries
    for i in reversed(range(axes)):
        out[i], size = size, size * batch[i]
    pairs = (kind, first is not None, first or 0)
    numbers = array("q", [axes - sum(shared), sum(shared), queries, keys[0][-2], dim, *pairs])
    numbers.extend([batch[i] for i in order])
    numbers.extend([out[i] for i in order])
    # Keys without the step of their dimension, which is 1.
    for place, own, kept in ((like, 2, 2), (keys, 2, 1), (beta, 0, 0), (anchor, 0, 0)):
        steps = [0] * axes if place is None else _steps(place, axes + own)
        numbers.extend([steps[i] for i in order] + steps[axes : axes + kept])
    for place in (*(() if mask is None else (mask,)), *others):
        steps = _steps(place, axes + 2)
        numbers.extend([steps[i] for i in order] + steps[axes:])
    return numbers


def _steps(place: _Place, axes: int) -> list[int]:
    """Return the strides of a tensor that may lack leading axes; 0 along axes of size 1, which broadcast."""
    strides = [0 if size == 1 else step for size, step in zip(*place, strict=True)]
    return [0] * (axes - len(strides)) + strides


def unsupported(problem: Hopfield) -> str | None:
    """Why the native operations cannot do `problem`, as "reason; remedy"; None if they can."""
    field, keys = problem.field, problem.keys
    if field.device.type != "cpu":
        return f"the native operations run on a CPU, not on {str(field.device)!r}; use impl='auto'"
    if field.dtype not in DTYPES:
        return f"the native operations do not compute in {field.dtype}; use float32 or float64, or impl='auto'"
    if field.ndim - 2 > AXES:
        return f"the native operations take at most {AXES} leading axes, got {field.ndim - 2}; flatten some"
    if max(field.numel(), keys.numel(), field.shape[:-1].numel()) > LARGEST:
        return "the native operations count no more than 2^55 numbers; use impl='auto'"
    return unavailable()
