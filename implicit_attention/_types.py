"""Type names used across the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from .failure_policy import FailurePolicy, Word

#: A linear map on one vector per problem, (*batch, n) -> (*batch, n).
LinearMap: TypeAlias = Callable[[Tensor], Tensor]
#: The treatment of problems without an answer.
OnFailure: TypeAlias = Word | FailurePolicy
Impl: TypeAlias = Literal["auto", "reference", "native", "tiled", "triton"]
IMPLEMENTATIONS: tuple[Impl, ...] = get_args(Impl)
