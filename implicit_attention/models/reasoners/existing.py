"""Masks of cells, tokens and nodes that exist, in batches of problems of different sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _validate


def check_exists(exists: Any, shape: tuple[int, ...]) -> None:
    """Raise unless `exists` is boolean and has this shape."""
    if not isinstance(exists, Tensor) or exists.dtype != torch.bool:
        received = exists.dtype if isinstance(exists, Tensor) else type(exists).__name__
        raise TypeError(_validate.message("exists", "be None or a boolean tensor", received, "use exists.bool()"))
    _validate.require(tuple(exists.shape) == shape, "exists", f"have the shape {shape}", f"shape {tuple(exists.shape)}")
