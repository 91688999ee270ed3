"""Types of the layers' options and calls, for type checkers and editors: a call returns a tensor by default.

The call of `nn.Module` has the return type `Any`. A layer declares its `__call__` by `plain`, for type checkers alone:
at run time it is that of `nn.Module`, with its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, overload

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from ..adjoints import Adjoint
from ..solvers import Solver

P = ParamSpec("P")


class PlainCall(Protocol[P]):
    """The call of a layer with the arguments P of its `forward`: it returns a tensor, unless one requests more."""

    @overload
    def __call__(self, *args: Any, return_solution: bool, **options: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_state: bool, **options: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_answer: bool, **options: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_weights: bool, **options: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_energies: bool, **options: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_trajectory: bool, **options: Any) -> Any: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Tensor: ...


def plain(forward: Callable[Concatenate[Any, P], Any]) -> PlainCall[P]:
    """The call of a layer with this `forward`; assigned to another name first, as `nn.Module`'s type would erase P."""
    raise NotImplementedError


class Place(TypedDict, total=False):
    """The place and precision of the parameters of a module."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class TokenMasks(TypedDict, total=False):
    """Which tokens read which, and which tokens exist."""

    mask: Tensor | None
    key_mask: Tensor | None


class TieKeywords(TypedDict, total=False):
    """Options of an `Equilibrium`, and of one call of it, beside its start."""

    steps: int | range | None
    solver: Solver | None
    adjoint: Adjoint | None
    on_failure: Any


class StepKeywords(TieKeywords, total=False):
    """Options of an `Equilibrium`, and of one call of it."""

    start: Any
    confirm: Any


class EquilibriumKeywords(StepKeywords, total=False):
    """Options of one call of an `Equilibrium`."""

    cache: Any
    chunk: int | None
    exit: Any


class StateCall(Protocol):
    """The call of `Equilibrium`, whose state is like x."""

    @overload
    def __call__(
        self, x: Tensor, *args: Any, return_solution: Literal[False] = ..., **options: Unpack[EquilibriumKeywords]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, x: Any, *args: Any, return_solution: bool = ..., **options: Unpack[EquilibriumKeywords]
    ) -> Any: ...
