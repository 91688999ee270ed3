"""A potential: a log-partition function Phi, its gradient (the mean) and its Hessian (the covariance); sums of them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import LinearMap, check_graph, grad, sum_to_shape, vjp
from ..problem import Declared, abstract, restricted
from ._rays import Ray, first_to_fall, spectral_norm, steeper


class CovarianceMap(NamedTuple):
    """The covariance of a potential at one state, for many products, without graph.

    product: v -> Cov v; vjp_tensors: u -> (d mean/dt)^T u for each t of `potential.tensors()`.

    Not for products that are to be differentiated: use `Potential.covariance_product`.

    Examples:
        >>> import torch
        >>> from implicit_attention import SquaredScores
        >>> cov = SquaredScores(torch.eye(2), beta=0.5).linearize(torch.ones(1, 2))
        >>> cov is None  # no cheaper than covariance_product
        True
    """

    product: LinearMap
    vjp_tensors: Callable[[Tensor], tuple[Tensor | None, ...]]


#: What is derived from value and mean.
_DERIVED = (
    *("value", "mean", "covariance_product", "evaluate", "linearize", "bounded_below", "falling_ray", "lipschitz"),
    *("select", "row_block", "convex", "probabilities", "readout", "readout_with_logsumexp"),
)


class Potential(Declared, general=True):
    """Phi(z) with mean(z) = grad Phi(z) and covariance_product(z, v) = Hess Phi(z) v.

    A subclass defines `value`; the rest follows by automatic differentiation until it is defined in closed form. Every
    tensor in an attribute is declared (see `Declared`).

    Potentials form new ones, whose derivatives, bounds and tensors follow from those of their parts:
    `a * phi` for a number a > 0 or one per batch entry, `phi + psi`, and `phi.of(W)`, which is Phi(W z).

    A subclass of a potential in closed form that overrides `value` keeps none of its closed forms, but differentiates,
    and has None for weights and `readout`; one that overrides `mean` has to define `value` as well, or raises TypeError
    as it is made. Neither counts as convex unless it says so.

    Not for a map that is no gradient: use `FixedPointMap`.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, Potential, solve
        >>> class Ridge(Potential):
        ...     convex = True
        ...     def value(self, z):
        ...         return (1 + z.square()).sqrt().sum(-1)
        >>> memories, x = LogSumExp(torch.eye(4), beta=2.0), torch.ones(3, 4)
        >>> phi = 0.5 * memories + Ridge().of(0.1 * torch.eye(4))
        >>> phi.mean(x).shape, phi.convex
        (torch.Size([3, 4]), True)
        >>> bool(solve(AnchoredEnergy(phi, field=x, anchor=0.5), x).converged.all())
        True
    """

    _follows: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("value", "mean"), _DERIVED),
        "covariance_product": ("linearize", "lipschitz"),
        "evaluate": ("linearize",),
        "probabilities": ("readout", "readout_with_logsumexp"),
    }
    # numpy then leaves products with its numbers to `__rmul__`.
    __array_ufunc__ = None

    #: How many trailing axes of a state Phi reads together. 1: every row (*batch, N, D) is a problem of its own.
    #: 2: all N tokens of a sample are one problem.
    event_ndim: int = 1
    #: Whether Phi is convex. Fixed-point steps of the anchored energy then descend.
    convex: bool = False
    #: See `Problem.row_block`.
    row_block: int = 32
    #: The potentials that this one consists of.
    parts: tuple[Potential, ...] = ()

    @abstract
    def value(self, z: Tensor) -> Tensor:
        """Phi(z), one number per problem: (*batch, N, D) -> (*batch, N), or (*batch) with `event_ndim` 2."""
        raise NotImplementedError(f"{type(self).__name__} must define value(z) -> one number per problem")

    def _about_origin(self) -> tuple[Self, Tensor] | None:
        """Phi of states less an origin, (*#batch, #N, D), about which |z|^2/2 - Phi is the same, and that; or None."""
        return None

    def mean(self, z: Tensor) -> Tensor:
        """Grad Phi(z), (*batch, N, D) -> (*batch, N, D)."""

        def total(z: Tensor) -> Tensor:
            value = self.value(z)
            self.check_value(value, z)
            check_graph(f"{type(self).__name__}.value", value, self.value, z)
            return value.sum()

        gradient: Tensor = grad(total)(z)
        return gradient

    def covariance_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess Phi(z) v, per problem; the Hessian is symmetric, so that it is both the JVP and the VJP of `mean`."""
        _, pullback = vjp(self.mean, z)
        product: Tensor = pullback(v)[0]
        return product

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(value, mean) of one evaluation."""
        return self.value(z), self.mean(z)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        """The covariance at one state for many products, or None where that is no cheaper than differentiation."""
        return None

    def bounded_below(self, scale: float) -> bool | None:
        """Whether |z|^2/2 - scale Phi(z) is bounded below for every batch entry; None where that is not known.

        At scale = inf: whether that holds at every scale, as it does where Phi grows no faster than |z|.
        """
        bound = self.lipschitz()
        return True if bound is not None and bool((scale * bound < 1).all()) else None

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray | None:
        """Return a ray along which |z|^2/2 - s Phi(z) falls without end, and from which s; None if none is known."""
        return None

    def lipschitz(self) -> Tensor | None:
        """An upper bound on |Hess Phi(z)| over all z, per batch entry, or None if none is known."""
        return None

    def select(self, index: Tensor) -> Self | None:
        """Return the potential for the problems `index` (*batch, K) of its states, or None if that is not known."""
        return None

    def check_state(self, argument: str, z: Tensor) -> None:
        """Raise if states of z's shape do not fit the potential."""

    def check_value(self, value: Any, z: Tensor) -> None:
        """Raise unless `value` is one number for each problem of the states z."""
        expected = z.shape[: z.ndim - self.event_ndim]
        if not isinstance(value, Tensor) or value.shape != expected:
            name, one = f"{type(self).__name__}.value", "row" if self.event_ndim == 1 else "sample"
            received = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            error = ValueError if isinstance(value, Tensor) else TypeError
            raise error(_validate.message(name, f"return one number per {one}, shape {tuple(expected)}", received))

    # Multiples, sums and maps of potentials.

    def __mul__(self, weight: float | Tensor) -> Scaled:
        return Scaled(self, weight)

    __rmul__ = __mul__

    def __add__(self, other: Potential) -> Sum:
        if not isinstance(other, Potential):
            return NotImplemented
        return Sum(*(part for term in (self, other) for part in (term.parts if type(term) is Sum else (term,))))

    def of(self, matrix: Tensor) -> Mapped:
        """z -> Phi(W z) for a linear map W of the state, (K, D) or (*#batch, K, D), where Phi reads K entries.

        Its mean is W^T mean(W z) and its covariance W^T Cov(W z) W; W has gradients of every order.
        """
        return Mapped(self, matrix)


class Composite(Potential, general=True):
    """Base of potentials that consist of `parts`."""

    #: Attributes with one entry for each row of a state. A class with such attributes holds no others but `parts`.
    _by_row: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *parts: Potential) -> None:
        self.parts = parts

    @property
    def event_ndim(self) -> int:  # type: ignore[override]
        return self.parts[0].event_ndim

    @property
    def convex(self) -> bool:  # type: ignore[override]
        return all(part.convex for part in self.parts)

    @property
    def row_block(self) -> int:  # type: ignore[override]
        return math.lcm(*(part.row_block for part in self.parts))

    def select(self, index: Tensor) -> Self | None:
        parts = [part.select(index) for part in self.parts]
        if self.event_ndim != 1 or None in parts or (self._by_row and not self._has_only("parts", *self._by_row)):
            return None
        clone = restricted(self, index, **dict.fromkeys(self._by_row, 1))
        clone.parts = tuple(part for part in parts if part is not None)
        return clone

    def check_state(self, argument: str, z: Tensor) -> None:
        for part in self.parts:
            part.check_state(argument, z)


class Scaled(Composite):
    """a Phi(z) for a number a > 0, or one per batch entry (*#batch)."""

    declares_all = True

    def __init__(self, potential: Potential, weight: float | Tensor) -> None:
        super().__init__(potential)
        remedy = "parametrise it, for example as an exponential"
        self.weight: float | Tensor = _validate.check_per_batch("weight", weight, low=0.0, open_low=True, remedy=remedy)

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        _validate.check_fits_batch("weight", self.weight, argument, z)

    def _times(self, result: Tensor, axes: int) -> Tensor:
        """Return a times `result`, in which `axes` axes belong to a batch entry."""
        if not isinstance(self.weight, Tensor):
            return self.weight * result
        weight = _validate.inside(self.weight, low=0.0, open_low=True)
        return weight[(..., *(None,) * axes)] * result

    def value(self, z: Tensor) -> Tensor:
        return self._times(self.parts[0].value(z), 2 - self.event_ndim)

    def mean(self, z: Tensor) -> Tensor:
        return self._times(self.parts[0].mean(z), 2)

    def covariance_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._times(self.parts[0].covariance_product(z, v), 2)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, mean = self.parts[0].evaluate(z)
        return self._times(value, 2 - self.event_ndim), self._times(mean, 2)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        cov = self.parts[0].linearize(z)
        if cov is None:
            return None

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            gradients = cov.vjp_tensors(self._times(u, 2))
            if not isinstance(self.weight, Tensor):
                return gradients
            return *gradients, sum_to_shape((u * self.parts[0].mean(z)).sum((-1, -2)), self.weight.shape)

        return CovarianceMap(lambda v: self._times(cov.product(v), 2), pullback)

    def bounded_below(self, scale: float) -> bool | None:
        answer = self.parts[0].bounded_below(scale * float(torch.as_tensor(self.weight).detach().amax()))
        # No bound at the largest weight says nothing about the other weights.
        return answer if answer or not isinstance(self.weight, Tensor) or self.weight.numel() == 1 else None

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray | None:
        return steeper(self.parts[0].falling_ray(scale * self.weight), self.weight)

    def lipschitz(self) -> Tensor | None:
        bound = self.parts[0].lipschitz()
        return None if bound is None else self._times(bound, 0)


class Sum(Composite):
    """The sum of potentials of the same states."""

    declares_all = True

    def __init__(self, *parts: Potential) -> None:
        super().__init__(*parts)
        kinds = {part.event_ndim for part in parts}
        required = "have the same event_ndim: one problem per row (1) or per sample (2)"
        _validate.require(len(kinds) == 1, "terms of a sum", required, " and ".join(map(str, sorted(kinds))))

    def value(self, z: Tensor) -> Tensor:
        return _total(part.value(z) for part in self.parts)

    def mean(self, z: Tensor) -> Tensor:
        return _total(part.mean(z) for part in self.parts)

    def covariance_product(self, z: Tensor, v: Tensor) -> Tensor:
        return _total(part.covariance_product(z, v) for part in self.parts)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        values, means = zip(*(part.evaluate(z) for part in self.parts), strict=True)
        return _total(values), _total(means)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        covs = [cov for part in self.parts if (cov := part.linearize(z)) is not None]
        if len(covs) < len(self.parts):
            return None
        return CovarianceMap(
            lambda v: _total(cov.product(v) for cov in covs),
            lambda u: tuple(gradient for cov in covs for gradient in cov.vjp_tensors(u)),
        )

    def bounded_below(self, scale: float) -> bool | None:
        # Parts that are bounded at every scale need an arbitrarily small share of |z|^2/2; the others share the rest.
        others = [part for part in self.parts if not part.bounded_below(math.inf)]
        share = scale * max(len(others), 1) * (1 + 1e-6)
        return True if all(part.bounded_below(share) for part in others) else super().bounded_below(scale)

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray | None:
        # Only beside convex parts, which lie above a linear function.
        return first_to_fall(part.falling_ray(scale) for part in self.parts) if self.convex else None

    def lipschitz(self) -> Tensor | None:
        bounds = [bound for part in self.parts if (bound := part.lipschitz()) is not None]
        return None if len(bounds) < len(self.parts) else _total(bounds)


class Mapped(Composite):
    """Phi(W z) for a linear map W of the state, (K, D) or (*#batch, K, D)."""

    declares_all = True

    def __init__(self, potential: Potential, matrix: Tensor) -> None:
        super().__init__(potential)
        _validate.check_float_tensor("matrix", matrix, min_ndim=2)
        self.matrix = matrix

    def check_state(self, argument: str, z: Tensor) -> None:
        rows, columns = self.matrix.shape[-2:]
        meaning = f"one entry for each of the {columns} columns of `matrix`"
        check_fits(argument, z, columns, meaning, "matrix", self.matrix)
        self.parts[0].check_state(f"{argument} @ matrix.mT", z.new_empty(()).expand(*z.shape[:-1], rows))

    def _image(self, z: Tensor) -> Tensor:
        """W z."""
        return z @ self.matrix.mT

    def value(self, z: Tensor) -> Tensor:
        return self.parts[0].value(self._image(z))

    def mean(self, z: Tensor) -> Tensor:
        return self.parts[0].mean(self._image(z)) @ self.matrix

    def covariance_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self.parts[0].covariance_product(self._image(z), self._image(v)) @ self.matrix

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, mean = self.parts[0].evaluate(self._image(z))
        return value, mean @ self.matrix

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        image = self._image(z)
        cov = self.parts[0].linearize(image)
        if cov is None:
            return None

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            moved = self._image(u)
            by_matrix = self.parts[0].mean(image).mT @ u + cov.product(moved).mT @ z
            return *cov.vjp_tensors(moved), sum_to_shape(by_matrix, self.matrix.shape)

        return CovarianceMap(lambda v: cov.product(self._image(v)) @ self.matrix, pullback)

    def bounded_below(self, scale: float) -> bool | None:
        # |z| >= |W z|/|W|.
        return self.parts[0].bounded_below(scale * float(spectral_norm(self.matrix).square().amax())) or None

    def lipschitz(self) -> Tensor | None:
        bound = self.parts[0].lipschitz()
        return None if bound is None else spectral_norm(self.matrix).square() * bound


def check_fits(argument: str, z: Tensor, width: int, meaning: str, name: str, tensor: Tensor) -> None:
    """Raise unless states have `width` entries, which `meaning` describes, and the tensor `name` fits their batch."""
    _validate.check_float_tensor(argument, z, min_ndim=2)
    _validate.require(z.shape[-1] == width, argument, f"have {meaning} on its last axis", f"shape {tuple(z.shape)}")
    _validate.check_same_kind([(name, tensor), (argument, z)])
    _validate.check_broadcast(name, tensor.shape[:-2], z.shape[:-2], f"the leading axes of `{argument}`")


def _total(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)
