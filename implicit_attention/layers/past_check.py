"""Whether a block reads earlier tokens by its `past` alone, so that some tokens beside a memory answer as among all."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _validate
from .._torch import transforms_active
from .past import BlockCache, KeyValueMemory
from .token_window import CausalProblem, Reads, TokenWindow

#: Images that differ by less, in parts of their size, differ by rounding: kernels in the block may be of tf32, and
#: blocks of many layers make more of it.
LEAST = 1e-3
REMEDY = (
    "let every attention call `past.update` once and read what it returns by `past.mask` and `past.is_causal`, or "
    "leave `past` out of forward"
)


@torch.no_grad()
def check_past(problem: CausalProblem, z: Tensor, reads: Reads | None, cache: BlockCache | None) -> None:
    """Raise where half of some tokens has another image beside the memory of those before than among all tokens.

    One token, or a block that draws other random numbers for other tokens, shows nothing.

    z: states of all tokens of a call, (*batch, N, *event).
    """
    axis = z.ndim - problem.event_ndim
    count, before = z.shape[axis], 0 if cache is None else cache.length
    if count < 2 or z.numel() == 0 or transforms_active():
        return
    # Beside a cache the block has no masks but those of `past`.
    alone = before == 0 and (cache is None or reads is None)
    passed = _passed(problem)
    if passed == "alone" or (passed and not alone):
        return
    problem, draws, half = problem.apart(), problem.draws, count // 2
    memory = KeyValueMemory(0) if cache is None or before == 0 else copy.deepcopy(cache.memory)
    memory.grow(before + count)
    states = _different(z, axis)

    def image(begin: int, end: int) -> Tensor:
        window = TokenWindow(problem, z, reads, memory, before, begin, end)
        return window(states.narrow(axis, begin, end - begin))

    among = problem.fixed_point_map(states) if alone else image(0, count)
    if draws.repeated:
        return
    seen = True
    for begin, end in ((0, count), (0, half), (half, count)):
        part = functools.partial(image, begin, end)
        seen &= _agrees(problem, part, among.narrow(axis, begin, end - begin), axis)
    if seen:
        problem.checked.add((problem.mode, f"past {'alone' if alone else 'beside others'}"))


def check_update(problem: CausalProblem, cache: BlockCache) -> None:
    """Raise where a block keeps no keys in a cache, unless its tokens were seen to leave each other alone."""
    if cache.memory.attentions == 0 and not _passed(problem):
        required = "call `past.update` beside a cache, or be called with two tokens or more first, which show it"
        raise ValueError(_validate.message("block", required, f"{problem._name()}, which never calls it", REMEDY))


def _passed(problem: CausalProblem) -> str:
    """The tokens that passed in these modes: those "alone", or "beside others" of a cache; "" for none."""
    return next((at for at in ("alone", "beside others") if (problem.mode, f"past {at}") in problem.checked), "")


def _different(z: Tensor, axis: int) -> Tensor:
    """States that are finite and differ from token to token: those of a start are often 0 at all."""
    count = z.shape[axis:].numel()
    wave = torch.arange(count, device=z.device, dtype=z.dtype).cos().view(z.shape[axis:])
    return z.nan_to_num(0.0, 0.0, 0.0) + wave


def _agrees(problem: CausalProblem, image: Callable[[], Tensor], among: Tensor, axis: int) -> bool:
    """Whether all numbers could be compared; an error where some differ."""
    function, name = problem.function, problem._name()
    try:
        alone = image()
    except RuntimeError as error:
        # Masks of all tokens do not fit to keys of some.
        if type(error) is not RuntimeError:
            raise
        raise _refusal(f"{name}, which raised beside a memory: {error}") from error
    rows, expected = (t.flatten(axis + 1) for t in (alone, among))
    finite = rows.isfinite().all(-1) & expected.isfinite().all(-1)
    off, size = (torch.linalg.vector_norm(t, dim=-1) for t in (rows - expected, expected))
    if bool((finite & (off > max(torch.finfo(function.rounding).eps ** (1 / 3), LEAST) * size)).any()):
        raise _refusal(f"{name}, whose tokens have another image beside a memory of those before than among all tokens")
    return bool(finite.all())


def _refusal(received: str) -> ValueError:
    required = "read earlier tokens by its argument `past` alone"
    return ValueError(_validate.message("block", required, received, REMEDY))
