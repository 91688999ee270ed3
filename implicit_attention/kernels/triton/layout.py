"""The layout of a problem for the Triton kernels: addresses and strides of its tensors, and the tiles."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Attention

# Most leading axes of different strides in a kernel.
AXES = 3

NO_MASK, BOOLEAN, ADDED = 0, 1, 2
#: Bytes that a thread reads at once, where they begin at a multiple of them.
ALIGNMENT = 16
#: Strides below this have offsets of 32 bits within a tile, of at most 256 rows or columns.
FAR = 2**23


class Tiles(NamedTuple):
    """Queries and keys per tile, warps per program, how many key tiles are under way at once, registers per thread.

    registers: the most that a thread may have, where more programs on a multiprocessor are worth what that puts into
        local memory outside of the loops; None for no limit.
    part: dimensions that scores are products of at once, where registers have no room for all; None for all.
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
    ("evaluate", True): {64: Tiles(64, 64, 4, 3, 128), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 4, 2)},
    ("evaluate", False): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 2)},
    ("product", True): {64: Tiles(64, 64, 4, 3, 168), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 16, 4, 3)},
    ("product", False): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 2)},
    ("keys", True): {64: Tiles(64, 64, 4, 3, 168), 128: Tiles(32, 64, 4, 3), 256: Tiles(32, 64, 4, 2)},
    ("keys", False): {64: Tiles(32, 64, 4, 1), 128: Tiles(16, 64, 4, 1)},
}
# Others before compute capability 9.0, where products take their operands from registers.
EARLIER = {
    ("evaluate", True): {64: Tiles(64, 64, 4, 3, 168), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 4, 2)},
    ("evaluate", False): {64: Tiles(64, 16, 4, 2), 128: Tiles(64, 16, 4, 2, None, 32)},
    ("product", True): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3), 256: Tiles(64, 16, 4, 3)},
    ("product", False): {64: Tiles(64, 16, 4, 2), 128: Tiles(64, 16, 4, 2, None, 32)},
    ("keys", False): {64: Tiles(16, 64, 4, 1), 128: Tiles(16, 64, 4, 1, None, 32)},
}
SMALLEST_TILE = 16
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
    mask: int
    mask_rows: bool  # whether the mask differs from query to query
    key_order: str  # as `order_of` tells it
    mask_order: str
    dtype: str  # of the operands of products, as Triton calls it
    precision: str  # "widen" stands for bfloat16 products in the interpreter, which has none
    picked: bool  # whether a tile's queries are listed, instead of standing side by side
    centred: bool  # whether vectors are multiplied by the covariance of the keys, instead of states evaluated


@dataclasses.dataclass(frozen=True)
class KernelLayout:
    """Sizes and strides of the leading axes, merged where all tensors allow it, into exactly `AXES` of them.

    The strides of keys and mask end with those of their last two axes; tensors of the queries' shape are contiguous.
    `by_keys` are those of a contiguous gradient of the keys' shape: 0 along axes that the keys do not have.
    """

    sizes: tuple[int, ...]
    keys: tuple[int, ...]
    beta: tuple[int, ...]
    anchor: tuple[int, ...]
    mask: tuple[int, ...]
    by_keys: tuple[int, ...]

    @property
    def masks(self) -> tuple[int, ...]:
        """Sizes of the axes along which masks differ; 1 for the others."""
        return tuple(size if step else 1 for size, step in zip(self.sizes, self.mask[:AXES], strict=True))

    @classmethod
    def of(cls, problem: Attention) -> KernelLayout | None:
        """The layout; None if more axes are left than a kernel takes."""
        *lead, rows, dim = problem.query.shape
        count = problem.keys.shape[-2]
        pairs = None if problem.pairs is None else problem.pairs.expand(*lead, rows, count)
        by_keys = torch.empty(problem.keys.shape, device="meta").expand(*lead, count, dim)
        numbers = (t.expand(lead) if isinstance(t, Tensor) else None for t in (problem.beta, problem.anchor))
        tensors = (problem.keys.expand(*lead, count, dim), *numbers, pairs, by_keys)
        strides = [(0,) * (len(lead) + 2) if t is None else t.stride() for t in tensors]
        sizes, merged = _merged(lead, [s[: len(lead)] for s in strides])
        if len(sizes) > AXES:
            return None
        missing = AXES - len(sizes)
        keys, beta_, anchor_, mask_, by = ((*(0,) * missing, *m) for m in merged)
        return cls(
            sizes=(*(1,) * missing, *sizes),
            keys=(*keys, *strides[0][-2:]),
            beta=beta_,
            anchor=anchor_,
            mask=(*mask_, *strides[3][-2:]),
            by_keys=by,
        )


def contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of these sizes; 0 along axes of size 1, which others may be broadcast along."""
    return tuple(math.prod(sizes[axis + 1 :]) if size > 1 else 0 for axis, size in enumerate(sizes))


def _merged(sizes: Sequence[int], strides: list[tuple[int, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Neighbouring axes as one wherever every tensor steps through both evenly; axes of size 1 are dropped."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in zip(sizes, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if axes and all(outer == inner * size for outer, inner in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * size, steps)
        else:
            axes.append((size, steps))
    return [size for size, _ in axes], [tuple(steps[i] for _, steps in axes) for i in range(len(strides))]


def largest_dim(dtype: torch.dtype) -> int:
    """The largest head dimension: operands of 32 bits with more do not fit in a multiprocessor."""
    return max(TILES["evaluate", dtype.itemsize == 2])


def whole_tiles(kernel: str, problem: Attention) -> Tiles:
    """The tiles of a kernel for a problem that fills them."""
    keys = problem.keys
    kind = kernel, keys.dtype.itemsize == 2
    table = EARLIER.get(kind, TILES[kind]) if is_earlier(keys.device) else TILES[kind]
    return table[min(size for size in table if size >= problem.query.shape[-1])]


def is_earlier(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0)


def step_tiles(problem: Attention) -> Tiles:
    """The queries of a program that makes a step."""
    rows, dims = problem.query.shape[-2], max(SMALLEST_TILE, 1 << (problem.query.shape[-1] - 1).bit_length())
    return Tiles(min(STEP_NUMBERS // dims, fitting(rows, 64)), SMALLEST_TILE, 4, 1)


def tiles(kernel: str, problem: Attention) -> Tiles:
    """The tiles of a kernel, no larger than the problem."""
    rows, chosen = problem.query.shape[-2], whole_tiles(kernel, problem)
    fit = chosen._replace(rows=fitting(rows, chosen.rows), keys=fitting(problem.keys.shape[-2], chosen.keys))
    # Small tiles do not keep many warps busy.
    small = fit.rows < chosen.rows or fit.keys < chosen.keys
    return fit._replace(warps=min(fit.warps, 4)) if small else fit


def fitting(size: int, most: int) -> int:
    """The side of a tile for so many rows or columns."""
    return min(most, max(SMALLEST_TILE, 1 << (size - 1).bit_length()))


def lists(problem: Attention, chosen: Tiles) -> bool:
    """Whether the queries that are left are listed, of which a tile then is full."""
    return problem.query.shape[-2] > chosen.rows and (problem.pairs is None or alike(problem))


def alike(problem: Attention) -> bool:
    """Whether the queries of a set attend to the same keys."""
    return problem.first is None and (problem.pairs is None or problem.pairs.shape[-2] == 1)


def plan(problem: Attention, chosen: Tiles, picked: bool, kind: str) -> KernelPlan:
    mask, dim, dtype = problem.pairs, problem.query.shape[-1], problem.keys.dtype
    widen = interpreted() and dtype == torch.bfloat16
    dims = max(SMALLEST_TILE, 1 << (dim - 1).bit_length())
    return KernelPlan(
        rows=chosen.rows,
        keys=chosen.keys,
        dims=dims,
        dim=dim,
        part=min(dims, chosen.part or dims),
        causal=problem.first is not None,
        mask=NO_MASK if mask is None else BOOLEAN if mask.dtype == torch.bool else ADDED,
        mask_rows=mask is not None and mask.shape[-2] > 1,
        key_order=order_of(problem.keys),
        mask_order="none" if mask is None else order_of(mask),
        dtype={torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype],
        # Three products of 11 bits each have the accuracy of one of float32, on tensor cores.
        precision="widen" if widen else "tf32x3" if dtype == torch.float32 else "ieee",
        picked=picked,
        centred=kind == "product",
    )


def order_of(tensor: Tensor) -> str:
    """Return how the matrices of a tensor stand in memory, for those who read them in parts of 16 bytes.

    "rows", "columns": neighbours in these stand side by side, and each begins at a multiple of 16 bytes. "strided": the
    tensor does. "unaligned": not even that.
    """
    *lead, row, column = tensor.stride()
    unit = ALIGNMENT // tensor.itemsize
    if tensor.data_ptr() % ALIGNMENT:
        return "unaligned"
    if any(step % unit for size, step in zip(tensor.shape, lead, strict=False) if size > 1):
        return "strided"
    if column == 1 < tensor.shape[-1] and row % unit == 0 and row < FAR:
        return "rows"
    return "columns" if row == 1 < tensor.shape[-2] and column % unit == 0 and column < FAR else "strided"


def in_memory(problem: Attention) -> Attention:
    """The problem with its signs in memory, where kernels read: torch may keep the sign of a view aside.

    Betas and anchors are float32 tensors, so that kernels need not be compiled for each of their dtypes.
    """
    (query, keys, beta, anchor), pairs = problem[:4], problem.pairs
    beta, anchor = (
        n.resolve_neg().float() if isinstance(n, Tensor) else query.new_full((), n, dtype=torch.float32)
        for n in (beta, anchor)
    )
    pairs = None if pairs is None else pairs.resolve_neg()
    return Attention.of(query.resolve_neg(), keys.resolve_neg(), beta, anchor, pairs, problem.first)


def placed(problem: Attention, layout: KernelLayout) -> tuple[object, ...]:
    """Keys, betas and mask with their strides, as kernels take them."""
    tensors = (problem.keys, problem.beta, readable_mask(problem))
    strides = (layout.keys, layout.beta, layout.mask)
    return tuple(part for tensor, steps in zip(tensors, strides, strict=True) for part in (tensor, *steps))


def offset_of(problem: Attention) -> int:
    """The index of the first query among the keys, where that matters, as 32 bits hold it."""
    return 0 if problem.first is None else min(problem.first, problem.keys.shape[-2])


def counted(steps: int) -> int:
    """A number of steps as 32 bits hold it and the next one."""
    return min(steps, 2**31 - 2)


def in_order(tensor: Tensor) -> Tensor:
    """A tensor of the query's shape as a kernel reads it, which begins at a multiple of 16 bytes."""
    tensor = tensor.resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def readable_mask(problem: Attention) -> Tensor:
    """The mask as a kernel reads it; any tensor where there is none."""
    if problem.pairs is None:
        return problem.keys
    return problem.pairs.view(torch.uint8) if problem.pairs.dtype == torch.bool else problem.pairs


class Left:
    """The queries that a solve has left, as kernels note without a word to the host.

    status: (*batch, N), which it makes UNFINISHED; those are left.
    listed: whether they are listed, so that tiles are full of them: where there are several tiles of queries, and none
        has a mask of its own.
    """

    def __init__(self, problem: Attention, status: Tensor, chosen: Tiles) -> None:
        rows, device = problem.query.shape[-2], status.device
        sets = status.numel() // rows
        self.status, self.listed = status.fill_(UNFINISHED), lists(problem, chosen)
        numbers = torch.arange(rows if self.listed else 0, dtype=torch.int32, device=device)
        # Those of this step, and those of the next one.
        self.notes = [
            (numbers.repeat(sets), torch.full((sets,), count, dtype=torch.int32, device=device)) for count in (rows, 0)
        ]
        self.host: Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def placed(self) -> tuple[Tensor, ...]:
        """Return the status, the list and how many it has of each set, and where the next ones are to be noted."""
        return self.status, *self.notes[0], *self.notes[1]

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
            self.copied.record()
        return True


def launch(
    kernel: Any,
    programs: int,
    chosen: Tiles,
    problem: Attention,
    *arguments: object,
    picked: bool = False,
    kind: str = "evaluate",
) -> None:
    """Run a kernel with the tiles `chosen` in so many programs, for all queries or for those that are `picked`."""
    # Kernels are launched on the current CUDA device, which need not be that of the tensors.
    device = problem.keys.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(programs,)](
            *arguments,
            plan(problem, chosen, picked, kind),
            num_warps=chosen.warps,
            num_stages=chosen.stages,
            maxnreg=chosen.registers,
            enable_fp_fusion=True,
        )


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU: the variable must be set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
