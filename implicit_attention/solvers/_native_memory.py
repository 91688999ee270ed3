"""Memories of methods whose steps the native library makes, and the same for operations of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import are_plain
from ..ops.native.library import Library, library
from ..ops.native.loop import Descent, Mixing, Secants
from .safeguard import Memory, Safeguarded


def library_of(state: Any, *measured: Tensor | None) -> Library | None:
    """Return the library that has made this memory, if it may read what was measured since."""
    if not isinstance(state, Mixing | Descent | Secants):
        return None
    return library() if are_plain(state.z.dtype, *(t for t in measured if t is not None)) else None


def written_out(state: Any, solver: Safeguarded) -> Any:
    """Return a memory for operations of torch, without the history of a native one."""
    if isinstance(state, Mixing | Secants):
        known = state.z, state.r, state.residual, None, None, None, None
        return Memory(*known, state.residual, state.accelerated, solver.init_history(state.z))
    if isinstance(state, Descent):
        length = torch.ones_like(state.residual)
        point = state.z, state.r, state.residual, state.energy, None, None, state.direction
        return Memory(*point, length, state.accelerated, solver.init_history(state.z))
    return state
