"""The layout of a problem for the Triton kernels: where its tensors are, the tiles, and the queries that are left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch import HALF
from ..problem import Attention
from ..trust import on_device

#: Bytes that a thread reads at once, where they begin at a multiple of them.
ALIGNMENT = 16
#: Rows at less than this from one another have offsets of 32 bits within a tile, of at most 256.
FAR = 2**23


class Tiles(NamedTuple):
    """Queries and keys per tile, warps per program, how many key tiles are under way at once, registers per thread.

    registers: the most that a thread may have, where more programs on a multiprocessor are worth what that puts into
        local memory outside of the loops; None for no limit.
    part: dimensions that scores are products of at once, where registers have no room for all; None for all. Only with
        keys in float32, as the rounded queries of others are in registers alone.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    part: int | None = None


# By kernel, and by whether operands have 16 bits: the tiles for head dimensions up to each of the given sizes. A warp
# has 16 rows or more: of eight warps on 64 rows and few keys, Triton 3.6 reads past the end of shared memory.
TILES = {
    ("evaluate", True): {64: Tiles(64, 64, 4, 3, 168), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 4, 2)},
    ("evaluate", False): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 2)},
    ("product", True): {64: Tiles(64, 64, 4, 3, 168), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 16, 4, 3)},
    ("product", False): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 2)},
    ("keys", True): {64: Tiles(64, 64, 4, 3), 128: Tiles(32, 64, 4, 3), 256: Tiles(32, 64, 4, 2)},
    ("keys", False): {64: Tiles(32, 64, 4, 1), 128: Tiles(16, 64, 4, 1)},
}
# Others before compute capability 9.0, where products take their operands from registers.
EARLIER = {
    ("evaluate", True): TILES["evaluate", True] | {64: Tiles(64, 64, 4, 3)},
    ("evaluate", False): {64: Tiles(64, 16, 4, 2), 128: Tiles(64, 16, 4, 2, None, 32)},
    ("product", True): TILES["product", True] | {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 2)},
    ("product", False): {64: Tiles(64, 16, 4, 2), 128: Tiles(64, 16, 4, 2, None, 32)},
    ("keys", True): TILES["keys", True] | {64: Tiles(32, 64, 4, 3, 168)},
    ("keys", False): {64: Tiles(16, 64, 4, 1), 128: Tiles(16, 64, 4, 1, None, 32)},
}
SMALLEST_TILE = 16
#: Numbers of a row of a user's map that a program of a step works off.
PART = 1024
#: Numbers of a vector each that a step has in registers.
STEP_NUMBERS = 2048
#: The status of queries that are left.
UNFINISHED = -1


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """The compile-time constants of a kernel: with the dtypes of its tensors, all that its machine code depends on."""

    rows: int
    keys: int
    dims: int  # the head dimension `dim`, up to a power of two
    dim: int
    part: int  # of the dimensions, that scores are products of at once
    causal: bool
    mask: str
    mask_rows: bool  # whether the mask differs from query to query
    half: bool  # whether operands of products are float16
    picked: bool = False  # whether a tile's queries are listed, instead of standing side by side
    centred: bool = False  # whether vectors are multiplied by the covariance of the keys, instead of states evaluated
    fine: bool = False  # whether operands of those products have a rest; evaluations know of each query


def largest_dim(dtype: torch.dtype) -> int:
    """The largest head dimension: operands of 32 bits with more do not fit in a multiprocessor."""
    return max(TILES["evaluate", dtype in HALF])


def whole_tiles(kernel: str, problem: Attention) -> Tiles:
    """The tiles of a kernel for a problem that fills them."""
    table = (EARLIER if is_earlier(problem.keys.device) else TILES)[kernel, problem.keys.dtype in HALF]
    return table[min(size for size in table if size >= problem.query.shape[-1])]


def is_earlier(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0)


def step_tiles(problem: Attention) -> Tiles:
    """The queries of a program that makes a step."""
    rows = min(STEP_NUMBERS // padded_dim(problem), fitting(problem.query.shape[-2], 64))
    return Tiles(rows, SMALLEST_TILE, 4, 1)


def tiles(kernel: str, problem: Attention) -> Tiles:
    """The tiles of a kernel, no larger than the problem."""
    rows, chosen = problem.query.shape[-2], whole_tiles(kernel, problem)
    return chosen._replace(rows=fitting(rows, chosen.rows), keys=fitting(problem.keys.shape[-2], chosen.keys))


def fitting(size: int, most: int) -> int:
    """The side of a tile for so many rows or columns."""
    return min(most, max(SMALLEST_TILE, 1 << (size - 1).bit_length()))


def padded_dim(problem: Attention) -> int:
    """The head dimension up to a power of two."""
    return fitting(problem.query.shape[-1], largest_dim(problem.keys.dtype))


def lists(problem: Attention, chosen: Tiles) -> bool:
    """Whether the queries that are left are listed, of which a tile then is full."""
    return problem.query.shape[-2] > chosen.rows and (problem.pairs is None or alike(problem))


def alike(problem: Attention) -> bool:
    """Whether the queries of a set attend to the same keys."""
    return problem.first is None and (problem.pairs is None or problem.pairs.shape[-2] == 1)


class Matrices(NamedTuple):
    """Matrices in rows, of which each set of queries reads one: the number of that (sets,), and where each begins.

    unit, most: of keys in half precision, as operands: powers of two for each matrix, by which operands are multiplied
        to be the keys, and which no row of operands is longer than.
    """

    memory: Tensor
    starts: Tensor
    numbers: Tensor
    unit: Tensor | None = None
    most: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor, lead: Sequence[int]) -> Matrices:
        """The matrices of a tensor (*#lead, rows, columns)."""
        device = tensor.device
        starts = torch.zeros((), dtype=torch.int64, device=device)
        for size, step in zip(tensor.shape[:-2], tensor.stride(), strict=False):
            starts = starts[..., None] + step * torch.arange(size, device=device)
        numbers = torch.arange(starts.numel(), dtype=torch.int32, device=device).view(tensor.shape[:-2])
        memory = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        return cls(memory, starts.flatten(), numbers.expand(lead).flatten().contiguous())


class InMemory(NamedTuple):
    """A problem as kernels read it: keys in the place of no mask; beta and anchor of each set, (*batch, 2) float32."""

    problem: Attention
    keys: Matrices
    mask: Matrices
    numbers: Tensor

    @classmethod
    def of(cls, problem: Attention) -> InMemory:
        *lead, _, _ = problem.query.shape
        half, mask = problem.keys.dtype in HALF, problem.pairs
        operands, unit, most = in_float16(problem) if half else (in_rows(problem.keys), None, None)
        keys = Matrices.of(operands, lead)._replace(unit=unit, most=most)
        if mask is not None:
            # Sets that share a mask are told of its tiles once.
            own = written_once(mask)
            mask = in_rows(own.expand(*own.shape[:-1], problem.keys.shape[-2]))
        numbers = torch.empty(*lead, 2, dtype=torch.float32, device=problem.query.device)
        for out, given in zip(numbers.unbind(-1), problem[2:4], strict=True):
            # The host would wait for a copy of its number.
            out.copy_(given) if isinstance(given, Tensor) else out.fill_(given)
        return cls(problem, keys, keys if mask is None else Matrices.of(mask, lead), numbers)

    @property
    def rows(self) -> tuple[object, ...]:
        """Keys and mask with the steps of their rows, as kernels take them, and beta with anchor."""
        return self.keys, self.keys.memory.stride(-2), self.mask, self.mask.memory.stride(-2), self.numbers

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of queries and of keys, and the index of the first query among these, as 32 bits hold it."""
        rows, count, first = self.problem.query.shape[-2], self.problem.keys.shape[-2], self.problem.first
        return rows, count, 0 if first is None else min(first, count)

    def launch(self, kernel: Any, programs: int, chosen: Tiles, *arguments: object, **options: bool) -> None:
        """Run a kernel with the tiles `chosen` in so many programs; the options are the last ones of `KernelPlan`."""
        mask, dims = self.problem.pairs, padded_dim(self.problem)
        plan = KernelPlan(
            rows=chosen.rows,
            keys=chosen.keys,
            dims=dims,
            dim=self.problem.query.shape[-1],
            part=min(dims, chosen.part or dims),
            causal=self.problem.first is not None,
            mask="none" if mask is None else "boolean" if mask.dtype == torch.bool else "added",
            mask_rows=mask is not None and mask.shape[-2] > 1,
            half=self.problem.keys.dtype in HALF,
            **options,
        )
        compiled = {"num_warps": chosen.warps, "num_stages": chosen.stages, "maxnreg": chosen.registers}
        with on_device(self.numbers.device):
            kernel[(programs,)](*arguments, plan, **compiled, enable_fp_fusion=True)


def written_once(tensor: Tensor) -> Tensor:
    """The matrices of a tensor without the copies that it shows of each."""
    return tensor[tuple(slice(1 if step == 0 else None) for step in tensor.stride()[:-2])]


def in_float16(problem: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Operands, unit and most of keys in half precision, as `Matrices` has them; those of float16 are the keys.

    The largest number of bfloat16 that a query attends to becomes 2^14 or more: those down to 2^-31 times that keep all
    their digits, and smaller ones are known to 2^-40 times that.
    """
    keys = problem.keys.resolve_neg()
    own = written_once(keys)
    size, used = torch.linalg.vector_norm(own, torch.inf, -1), attended(problem, own.shape[:-1])
    size = size if used is None else size.where(used, 0.0)
    peak = (size.amax(-1) if size.shape[-1] else size.sum(-1)).float()
    # Powers of two: the largest up to the peak, which is inf where that is not finite, and more than sqrt(D).
    below = (peak.view(torch.int32) & 0x7F800000).view(torch.float32)
    length = 2.0 ** math.ceil(math.log2(keys.shape[-1]) / 2 + 1)
    if keys.dtype == torch.bfloat16:
        unit, most = (below * 2.0**-14).clamp(min=2.0**-120), torch.full_like(peak, 2.0**14 * length)
        scaled = own * (1 / unit).to(own.dtype)[..., None, None]
        scaled = scaled if used is None else scaled.where(used[..., None], 0.0)
        own = rows_like(own, torch.float16).copy_(scaled)
    else:
        unit, most = torch.ones_like(peak), (below * length).clamp(min=2.0**-24)
    lead = keys.shape[:-2]
    unit, most = (number.expand(lead).flatten().contiguous() for number in (unit, most))
    return in_rows(own.expand(keys.shape)), unit, most


def attended(problem: Attention, keys: torch.Size) -> Tensor | None:
    """Whether some query attends to each of the keys, of that shape (*#batch, M); None where each attends to all."""
    (*lead, rows, _), pairs, first = problem.query.shape, problem.pairs, problem.first
    if pairs is None and first is None:
        return None
    some = torch.ones((), dtype=torch.bool, device=problem.keys.device)
    if pairs is not None:
        some = (pairs if pairs.dtype == torch.bool else pairs != -torch.inf).any(-2)
    if first is not None:
        some = some & (torch.arange(keys[-1], device=some.device) < first + rows)
    return some.expand(*lead, keys[-1]).float().sum_to_size(keys) > 0


def rows_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a tensor in rows which begin at multiples of 16 bytes."""
    unit = ALIGNMENT // dtype.itemsize
    memory = tensor.new_empty(*tensor.shape[:-1], -(-tensor.shape[-1] // unit) * unit, dtype=dtype)
    return memory[..., : tensor.shape[-1]]


def in_rows(tensor: Tensor) -> Tensor:
    """The same numbers in rows which begin at multiples of 16 bytes, so that threads read as much at once."""
    tensor = tensor.resolve_neg()
    *lead, row, column = tensor.stride()
    unit = ALIGNMENT // tensor.itemsize
    steps = [step for size, step in zip(tensor.shape, (*lead, row), strict=False) if size > 1]
    near = column == 1 or tensor.shape[-1] == 1, row < FAR or tensor.shape[-2] == 1
    if tensor.data_ptr() % ALIGNMENT == 0 and all(step % unit == 0 for step in steps) and all(near):
        return tensor
    own = written_once(tensor)
    return rows_like(own, own.dtype).copy_(own).expand(tensor.shape)


def counted(steps: int) -> int:
    """A number of steps as 32 bits hold it and the next one."""
    return min(steps, 2**31 - 2)


def in_order(tensor: Tensor) -> Tensor:
    """A tensor of the query's shape as a kernel reads it, which begins at a multiple of 16 bytes."""
    tensor = tensor.resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


class Noted(NamedTuple):
    """The status of queries; whether products are fine; a list of the queries left in two parts, from its start and
    from its end, with the numbers of both in each set; and that for the next step."""

    status: Tensor
    fine: Tensor
    order: Tensor
    counts: Tensor
    next_order: Tensor
    next_counts: Tensor


class Left:
    """The queries that a solve has left, as kernels note without a word to the host.

    status: (*batch, N), which it makes UNFINISHED; those are left.
    listed: whether they are listed, so that tiles are full of them: where there are several tiles of queries, and none
        has a mask of its own.
    fine: whether the first evaluations are, with keys in half precision; all those of others are.
    """

    def __init__(self, problem: Attention, status: Tensor, chosen: Tiles, fine: bool = False) -> None:
        rows, device = problem.query.shape[-2], status.device
        self.sets, self.rows = status.numel() // rows, rows
        self.status, self.listed = status.fill_(UNFINISHED), lists(problem, chosen)
        self.fine = torch.full_like(status, fine) if problem.keys.dtype in HALF else status
        numbers = torch.arange(rows if self.listed else 0, dtype=torch.int32, device=device)
        # Those of this step, and those of the next one.
        self.notes = [
            (numbers.repeat(self.sets), torch.zeros(self.sets, 2, dtype=torch.int32, device=device)) for _ in range(2)
        ]
        self.notes[0][1][:, 0] = rows
        self.host: Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    @property
    def noted(self) -> Noted:
        return Noted(self.status, self.fine, *self.notes[0], *self.notes[1])

    def programs(self, chosen: Tiles) -> int:
        """The number of programs of a kernel for all that may be left, in tiles of one part of the list each."""
        return self.sets * (-(-self.rows // chosen.rows) + self.listed)

    def next(self) -> bool:
        """Whether there may be some after a step; the host does not wait for the device to know."""
        self.notes.reverse()
        counts = self.notes[0][1]
        if counts.device.type == "cpu":
            return bool(counts.any())
        if torch.cuda.is_current_stream_capturing():
            return True
        if self.copied is not None and self.copied.query():  # type: ignore[no-untyped-call]
            assert self.host is not None
            if not self.host.any():
                return False
            self.copied = None
        if self.copied is None:
            self.host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record(torch.cuda.current_stream(counts.device))
        return True
