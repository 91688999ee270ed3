"""Names of types and of implementations, used across the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from . import _validate
from .failure_policy import FailurePolicy, Word

#: A linear map on one vector per problem, (*batch, n) -> (*batch, n).
LinearMap: TypeAlias = Callable[[Tensor], Tensor]
#: The treatment of problems without an answer.
OnFailure: TypeAlias = Word | FailurePolicy
Impl: TypeAlias = Literal["auto", "reference", "native", "triton"]


def check_impl(impl: Any) -> None:
    """Raise unless `impl` names an implementation."""
    names = get_args(Impl)
    remedy = "tiles of products were slower than the loop that answers where no kernel does: use impl='auto'"
    required = f"be one of {', '.join(map(repr, names))}"
    _validate.require(impl in names, "impl", required, repr(impl), remedy if impl == "tiled" else "")
