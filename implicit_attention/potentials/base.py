"""A potential: a log-partition function Phi, its gradient (the mean) and its Hessian (the covariance)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import check_graph, vjp
from .._declared import Declared
from .._types import LinearMap


class CovarianceMap(NamedTuple):
    """The covariance of a potential at one state, without graph.

    product: v -> Cov v; vjp_tensors: u -> (d mean/dt)^T u for each t of `potential.tensors()`.
    """

    product: LinearMap
    vjp_tensors: Callable[[Tensor], tuple[Tensor | None, ...]]


_OF_BOTH = (
    "covariance_product",
    "evaluate",
    "linearize",
    "bounded_below",
    "lipschitz",
    "select",
    "row_block",
    "convex",
    "probabilities",
    "readout",
)


class Potential(Declared, general=True):
    """Phi(z) with mean(z) = grad Phi(z) and covariance_product(z, v) = Hess Phi(z) v.

    States have shape (*batch, N, D) and values (*batch, N): every row z is its own problem. A subclass defines
    `value`; the rest follows by automatic differentiation until it is given in closed form. Tensors held in
    attributes are declared by that (see `Declared`).

    A subclass of a potential in closed form that overrides `value` keeps none of its closed forms, but differentiates;
    one that overrides `mean` has to define `value` as well. Neither is taken for convex unless it says so.
    """

    _follows: ClassVar[dict[str, tuple[str, ...]]] = {
        "value": ("mean", *_OF_BOTH),
        "mean": ("value", *_OF_BOTH),
        "covariance_product": ("linearize", "lipschitz"),
        "evaluate": ("linearize",),
        "probabilities": ("readout",),
    }
    _underived: ClassVar[tuple[str, ...]] = ("value", "bounded_below")

    #: Whether Phi is convex. It then certifies that fixed-point steps of the anchored energy descend.
    convex: bool = False
    #: See `Problem.row_block`.
    row_block: int = 32
    #: Whether every tensor that the class reads is certain to be held in an attribute, so that `solve` need not check.
    declares_all: ClassVar[bool] = False

    def value(self, z: Tensor) -> Tensor:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        raise NotImplementedError(f"{type(self).__name__} must define value(z) -> (*batch, N)")

    def mean(self, z: Tensor) -> Tensor:
        """Grad Phi(z), (*batch, N, D) -> (*batch, N, D)."""

        def total(z: Tensor) -> Tensor:
            value = self.value(z)
            name = f"{type(self).__name__}.value"
            _validate.check_rows(name, value, z)
            check_graph(name, value, self.value, z)
            return value.sum()

        gradient: Tensor = torch.func.grad(total)(z)
        return gradient

    def covariance_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess Phi(z) v, per row; symmetric in its two uses, so that it is both the JVP and the VJP of `mean`."""
        _, pullback = vjp(self.mean, z)
        product: Tensor = pullback(v)[0]
        return product

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(value, mean) of one evaluation."""
        return self.value(z), self.mean(z)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        """The covariance at one state for many products, or None where it is no cheaper than differentiation."""
        return None

    def bounded_below(self, anchor: float) -> bool:
        """Whether |z|^2/2 - (1 - anchor) Phi(z) is bounded below; a potential that may not be says so here."""
        return True

    def lipschitz(self) -> Tensor | None:
        """An upper bound on |Hess Phi(z)| over all z, per batch entry, or None if none is known."""
        return None

    def select(self, index: Tensor) -> Self | None:
        """The same potential for the rows `index` (*batch, K) of its states, or None if it cannot tell."""
        return None

    def check_state(self, argument: str, z: Tensor) -> None:
        """Raise if states of z's shape do not fit the potential."""
