"""Collectives of a group whose processes take the same steps on the same numbers, or all of them raise."""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from .. import _validate

# An odd number whose multiples spread over all bits (2^64 divided by the golden ratio), as a signed one.
_SPREAD = -7046029254386353131
# A fingerprint of a state is two whole numbers of at most so many bits; in float32 of 11 bits for two processes, of 7
# for a thousand. States that differ pass for equal once in 2^22 or 2^14 times then; a solve compares many of them, and
# its start in float64.
_BITS = 20
# Number of different values that an error lists.
MOST = 4
# Number of words whose bits are added up at once.
_AT_ONCE = 2**20


class LockStepError(RuntimeError):
    """The processes of a group differ in their arguments, or one of them has ended; raised in all of them.

    Not for a solve without an answer: that raises `ConvergenceError`, in all processes alike.

    Examples:
        >>> from implicit_attention.distributed import LockStepError
        >>> issubclass(LockStepError, RuntimeError)
        True
    """


class LockStep:
    """Sums over the processes of a group, with a check that all of them are at the same place.

    Args:
        group: of torch.distributed; None is the default group.
    """

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        ready = distributed.is_available() and distributed.is_initialized()
        remedy = "call torch.distributed.init_process_group first"
        _validate.require(ready, "group", "belong to processes that have met", "no process group", remedy)
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        _validate.require(self.rank >= 0, "group", "hold this process", "a group without it", "pass a group of its own")

    def __deepcopy__(self, memo: Any) -> LockStep:
        # A group belongs to its process, and its copies are the same group.
        return self

    def compare(self, values: dict[str, str], device: torch.device) -> None:
        """Raise in all processes unless `values`, by the names of arguments, are the same in each of them."""
        text = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
        total = torch.tensor(int.from_bytes(text, "little", signed=True), device=device)
        # The count of numbers is always the same, so that a difference cannot break the comparison itself. Devices
        # without float64 compare fewer bits.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if not self._alike(self._sum(self._digits(total, dtype))):
            self._report(values)

    def sum(self, operation: str, state: Tensor, *parts: Tensor) -> list[Tensor]:
        """The sums of `parts` over the processes, if all are at this operation with the same bits of `state`."""
        digits = self._digits(_total(state) + zlib.crc32(operation.encode()), parts[0].dtype)
        sums = self._sum(torch.cat([*(part.flatten() for part in parts), digits]))
        *totals, digits = torch.split(sums, [*(part.numel() for part in parts), len(digits)])
        if not self._alike(digits):
            self._report({"operation": operation, "state": described(state)})
        return [total.view_as(part) for total, part in zip(totals, parts, strict=True)]

    def maximum(self, numbers: Tensor) -> Tensor:
        """The largest of each number, which must not be NaN, over the processes."""
        return self._all_reduce(numbers.clone(memory_format=torch.contiguous_format), distributed.ReduceOp.MAX)

    def _digits(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Two whole numbers h of a 64-bit one, and their squares: few bits, so that sums of them are exact."""
        exact = 24 if dtype == torch.float32 else 53
        bits = min(_BITS, (exact - math.ceil(math.log2(self.size))) // 2)
        shifts = torch.tensor([64 - bits, 64 - 2 * bits], device=total.device)
        whole = ((total * _SPREAD) >> shifts) & (2**bits - 1)
        return torch.cat([whole, whole * whole]).to(dtype)

    def _alike(self, sums: Tensor) -> bool:
        """Whether the h of all processes are equal: P sum h^2 = (sum h)^2, and greater where they differ (Cauchy).

        As all processes have the same sums, they come to the same answer.
        """
        first, second, squares, more = (int(x) for x in sums.tolist())
        return self.size * squares == first**2 and self.size * more == second**2

    def _sum(self, numbers: Tensor) -> Tensor:
        if self.size != 2:
            return self._all_reduce(numbers, distributed.ReduceOp.SUM)
        # Two processes swap their numbers: as many bytes as a sum sends, in one exchange instead of two.
        both = [torch.empty_like(numbers), torch.empty_like(numbers)]
        self.call(lambda: distributed.all_gather(both, numbers, group=self.group))
        return both[0] + both[1]

    def _all_reduce(self, numbers: Tensor, operation: Any) -> Tensor:
        self.call(lambda: distributed.all_reduce(numbers, operation, group=self.group))
        return numbers

    def _report(self, values: dict[str, str]) -> None:
        """Raise with the first argument that differs, and its values by rank."""
        gathered: list[Any] = [None] * self.size
        self.call(lambda: distributed.all_gather_object(gathered, values, group=self.group))
        for name in values:
            by_rank = [each.get(name) for each in gathered]
            if len(set(by_rank)) > 1:
                break
        ranks = {value: [rank for rank, other in enumerate(by_rank) if other == value] for value in by_rank}
        received = ", ".join(f"{_named(some)}: {value}" for value, some in list(ranks.items())[:MOST])
        remedy = "broadcast it from one process (torch.distributed.broadcast), or give all the same options"
        raise LockStepError(_validate.message(name, "be the same in all processes of the group", received, remedy))

    def call(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise LockStepError(
                f"process {self.rank} of {self.size} lost the others: one of them has ended, or has not come within "
                f"the group's timeout; read its own error, and start all of them anew ({str(error).splitlines()[0]})"
            ) from error


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


def described(value: Any) -> str:
    """Return the fingerprint of an argument: shape, dtype and bits of a tensor, the text of anything else.

    The text leaves out addresses of functions in memory, which differ between processes.
    """
    if not isinstance(value, Tensor):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    text = shape_text(value, value.shape)
    if value.numel() == 0:
        return text
    value = value.detach()
    if value.is_floating_point():
        size = float(torch.linalg.vector_norm(value.double() if value.device.type != "mps" else value.float()))
        text += f" of length {size:.9g}"
    return f"{text} (bits {int(_total(value)) & 0xFFFFFFFF:08x})"


def shape_text(tensor: Tensor, shape: Iterable[Any]) -> str:
    """A shape, in which sizes may be replaced, and the dtype of the tensor."""
    return f"shape {tuple(shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _total(tensor: Tensor) -> Tensor:
    """A number of 64 bits that changes with every bit of the tensor."""
    if tensor.numel() > _AT_ONCE:
        # In halves, so that a large mask, which may be expanded, is not written out.
        halves = tensor.chunk(2, next(axis for axis, size in enumerate(tensor.shape) if size > 1))
        return _total(halves[0]) + _SPREAD * _total(halves[1])
    kind = {1: torch.uint8, 2: torch.int16}.get(tensor.dtype.itemsize, torch.int32)
    words = tensor.detach().contiguous().flatten().view(kind)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    # Sums of integers wrap around, in any order to the same.
    return (words * (places * _SPREAD | 1)).sum()
