"""Return types of the layers' calls, for type checkers and editors: a tensor, unless more is asked for.

`nn.Module` says of every call that it returns anything. A layer declares `__call__` as one of these protocols, for
type checkers alone: at run time it is that of `nn.Module`, with its hooks.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, overload

from torch import Tensor
from typing_extensions import Unpack

from ..adjoints import Adjoint
from ..options import SolveKeywords
from ..solvers import Solver
from .cache import KeyValueCache


class AttentionCall(Protocol):
    """The call of `ImplicitAttention`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        context: Tensor | None = ...,
        *,
        values: Tensor | None = ...,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        positions: Tensor | None = ...,
        causal: bool | None = ...,
        cache: KeyValueCache | None = ...,
        return_solution: Literal[False] = ...,
        return_trajectory: Literal[False] = ...,
        return_weights: Literal[False] = ...,
        **options: Unpack[SolveKeywords],
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        context: Tensor | None = ...,
        *,
        values: Tensor | None = ...,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        positions: Tensor | None = ...,
        causal: bool | None = ...,
        cache: KeyValueCache | None = ...,
        return_solution: bool = ...,
        return_trajectory: bool = ...,
        return_weights: bool = ...,
        **options: Unpack[SolveKeywords],
    ) -> Any: ...


class LookupCall(Protocol):
    """The call of `MemoryLookup`."""

    @overload
    def __call__(
        self,
        queries: Tensor,
        *,
        known: Tensor | None = ...,
        clamp: bool = ...,
        return_solution: Literal[False] = ...,
        **options: Unpack[SolveKeywords],
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        queries: Tensor,
        *,
        known: Tensor | None = ...,
        clamp: bool = ...,
        return_solution: bool = ...,
        **options: Unpack[SolveKeywords],
    ) -> Any: ...


class EquilibriumCall(Protocol):
    """The call of `Equilibrium`, whose state is like x."""

    @overload
    def __call__(
        self,
        x: Tensor,
        *args: Any,
        steps: int | range | None = ...,
        solver: Solver | None = ...,
        adjoint: Adjoint | None = ...,
        start: Any = ...,
        on_failure: Any = ...,
        return_solution: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Any,
        *args: Any,
        steps: int | range | None = ...,
        solver: Solver | None = ...,
        adjoint: Adjoint | None = ...,
        start: Any = ...,
        on_failure: Any = ...,
        return_solution: bool = ...,
    ) -> Any: ...


class TransformerCall(Protocol):
    """The call of `EquilibriumTransformer`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        *,
        return_solution: Literal[False] = ...,
        **options: Any,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        *,
        return_solution: bool = ...,
        **options: Any,
    ) -> Any: ...


class SpinCall(Protocol):
    """The call of `SpinAttention`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        initial: Tensor | None = ...,
        cache: KeyValueCache | None = ...,
        return_state: Literal[False] = ...,
        return_answer: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        initial: Tensor | None = ...,
        cache: KeyValueCache | None = ...,
        return_state: bool = ...,
        return_answer: bool = ...,
    ) -> Any: ...


class MeanFieldCall(Protocol):
    """The call of `MeanFieldAttention` and `SpinTransformerBlock`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        initial: Tensor | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        initial: Tensor | None = ...,
        return_state: bool = ...,
    ) -> Any: ...


class SpinTransformerCall(Protocol):
    """The call of `SpinTransformer`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        initial: list[Tensor] | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = ...,
        key_mask: Tensor | None = ...,
        initial: list[Tensor] | None = ...,
        return_state: bool = ...,
    ) -> Any: ...


class EnergyCall(Protocol):
    """The call of `EnergyTransformer`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None = ...,
        *,
        key_mask: Tensor | None = ...,
        order: Literal["together", "tokens"] = ...,
        cache: KeyValueCache | None = ...,
        return_energies: Literal[False] = ...,
        return_solution: Literal[False] = ...,
        **options: Unpack[SolveKeywords],
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None = ...,
        *,
        key_mask: Tensor | None = ...,
        order: Literal["together", "tokens"] = ...,
        cache: KeyValueCache | None = ...,
        return_energies: bool = ...,
        return_solution: bool = ...,
        **options: Unpack[SolveKeywords],
    ) -> Any: ...


class ImageCall(Protocol):
    """The call of `ImageEnergyTransformer`."""

    @overload
    def __call__(
        self,
        images: Tensor,
        masked: Tensor,
        *,
        return_energies: Literal[False] = ...,
        return_solution: Literal[False] = ...,
        **options: Unpack[SolveKeywords],
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        images: Tensor,
        masked: Tensor,
        *,
        return_energies: bool = ...,
        return_solution: bool = ...,
        **options: Unpack[SolveKeywords],
    ) -> Any: ...


class ClassifierCall(Protocol):
    """The call of `ImageClassifier`."""

    @overload
    def __call__(
        self, images: Tensor, *, return_solution: Literal[False] = ..., **options: Unpack[SolveKeywords]
    ) -> Tensor: ...

    @overload
    def __call__(self, images: Tensor, *, return_solution: bool = ..., **options: Unpack[SolveKeywords]) -> Any: ...


class NodeCall(Protocol):
    """The call of `NodeClassifier`."""

    @overload
    def __call__(
        self,
        features: Tensor,
        adjacency: Tensor,
        node_mask: Tensor | None = ...,
        *,
        positions: Tensor | None = ...,
        return_solution: Literal[False] = ...,
        **options: Unpack[SolveKeywords],
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        features: Tensor,
        adjacency: Tensor,
        node_mask: Tensor | None = ...,
        *,
        positions: Tensor | None = ...,
        return_solution: bool = ...,
        **options: Unpack[SolveKeywords],
    ) -> Any: ...
