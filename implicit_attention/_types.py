"""Type names used across the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from torch import Tensor

#: A linear map on one vector per problem, (*batch, n) -> (*batch, n).
LinearMap: TypeAlias = Callable[[Tensor], Tensor]
OnFailure: TypeAlias = Literal["raise", "warn", "ignore"]
Impl: TypeAlias = Literal["auto", "reference", "native", "tiled", "triton"]
IMPLEMENTATIONS: tuple[Impl, ...] = get_args(Impl)
