"""A problem as the native library reads it: integers, numbers and addresses, which are made of views."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

#: Leading axes that the library takes.
AXES = 16
#: Numbers that an index of the library can count without overflow, even times their bytes.
LARGEST = 2**55
#: Steps that float32 counts.
MOST_STEPS = 2**24

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
        is_causal: bool,
        *,
        expanded: bool = False,
    ) -> None:
        """`like` is (*batch, N, D); `expanded` keys, which lie in the same place, count as shared."""
        *batch, queries, dim = like.shape
        keys = _in_memory(keys)
        if keys.stride(-1) != 1 and dim != 1:
            keys = keys.contiguous()
        self.kept: list[Any] = [keys]
        axes = len(batch)
        steps, sizes = keys.stride(), keys.shape
        ahead = axes + 2 - keys.ndim
        of_keys = [0] * ahead + [0 if size == 1 else step for size, step in zip(sizes[:-2], steps, strict=False)]
        shared = [
            batch[i] != 1 and (i < ahead or sizes[i - ahead] == 1 or (expanded and of_keys[i] == 0))
            for i in range(axes)
        ]
        self.order = [i for i in range(axes) if not shared[i]] + [i for i in range(axes) if shared[i]]
        folded = sum(shared)
        kind = _NO_MASK if mask is None else _BOOLEAN if mask.dtype == torch.bool else _ADDED
        order, size = self.order, 1
        out = [0] * axes
        for i in reversed(range(axes)):
            out[i], size = size, size * batch[i]
        for i in range(axes):
            out[i] *= queries
        self.integers = [axes - folded, folded, queries, sizes[-2], dim, kind, is_causal]
        self.integers += [batch[i] for i in order]
        self.integers += [out[i] for i in order]
        self.addresses: list[int] = []
        self.add(like, own=2)
        self.integers += [of_keys[i] for i in order]
        self.integers.append(steps[-2])
        self.addresses.append(keys.data_ptr())
        numbers: array[float] = array(_CODES[like.dtype])
        for number in (beta, anchor):
            if not isinstance(number, Tensor):
                numbers.append(number)
        start, _ = numbers.buffer_info()
        self.kept.append(numbers)
        for number in (beta, anchor):
            if isinstance(number, Tensor):
                self.add(number, own=0)
            else:
                self.integers += [0] * axes
                self.addresses.append(start)
                start += numbers.itemsize
        if mask is None:
            self.addresses.append(0)
        else:
            self.add(mask, own=2)

    def add(self, tensor: Tensor, own: int) -> None:
        """A tensor whose last `own` axes are not of the batch, and which may lack leading axes."""
        tensor = _in_memory(tensor)
        steps, sizes = tensor.stride(), tensor.shape
        ahead = len(self.order) + own - len(sizes)
        found = [0] * ahead + [0 if size == 1 else step for size, step in zip(sizes, steps, strict=True)]
        self.integers += [found[i] for i in self.order]
        self.integers += found[len(self.order) :]
        self.addresses.append(tensor.data_ptr())
        self.kept.append(tensor)

    def call(self, function: Any, bytes_: int, numbers: list[float], parallel_for: int) -> int:
        """What the function of the library returns."""
        integers, doubles, addresses = array("q", self.integers), array("d", numbers), array("Q", self.addresses)
        found: int = function(
            bytes_,
            integers.buffer_info()[0],
            doubles.buffer_info()[0],
            addresses.buffer_info()[0],
            parallel_for,
            torch.get_num_threads(),
        )
        if found < 0:
            raise MemoryError("the native operation found no memory for its tiles")
        return found


def _in_memory(tensor: Tensor) -> Tensor:
    """`tensor` with its numbers in memory as they are: torch may keep a sign aside, or no memory for zeros."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.resolve_neg() if tensor.is_neg() else tensor


#: Of `ia_solve` and `ia_adjoint`.
ARGUMENTS: Any = (ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int64)
