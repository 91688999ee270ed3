"""The interface of the law of one unit: of a hidden unit, a number, and of a spin, a vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import at_least_single, exact_precision, grad, vjp

Hidden: TypeAlias = Float[Tensor, "*batch N H"]
Vectors: TypeAlias = Float[Tensor, "*batch N D"]
Sites: TypeAlias = Float[Tensor, "*batch N"]
#: From changes of theta and V to changes of <s> and <|s|^2>/2.
TiltMap: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Units(_validate.Options):
    """The law rho(h) of one hidden unit h, a number, and its tilts rho(h) exp(t h).

        cumulant  K(t) = log of the mean of exp(t h), convex, 0 at t = 0
        mean      K'(t) = <h>
        variance  K''(t) = Var(h)

    All per unit, (*batch, N, H) -> (*batch, N, H), NaN where K is infinite. The n-th derivative of K at 0 is the n-th
    cumulant of h. A subclass defines `cumulant`; `mean` and `variance` follow by automatic differentiation until they
    are given in closed form.

    Not for spins: `AdaTAP` takes a `SiteLaw`, the mean-field methods take a `SphericalLaw`.

    Gradients: of all with respect to t, to any order.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import Units
        >>> class UniformUnits(Units):  # h uniform in [-1, 1], for t that are not 0
        ...     def cumulant(self, t):
        ...         return torch.log(torch.sinh(t) / t)
        >>> UniformUnits().mean(torch.tensor([1.0, 2.0]))
        tensor([0.3130, 0.5373])
    """

    #: Whether |K(t)| grows no faster than |t|.
    linear_growth: ClassVar[bool] = False

    @property
    def largest_variance(self) -> float:
        """An upper bound on K''(t) over all t; infinite if there is none."""
        return math.inf

    def cumulant(self, t: Hidden) -> Hidden:
        """K(t)."""
        raise NotImplementedError(f"{type(self).__name__} must define cumulant(t)")

    def mean(self, t: Hidden) -> Hidden:
        """K'(t)."""
        first: Tensor = grad(lambda t: self.cumulant(t).sum())(t)
        return first

    def variance(self, t: Hidden) -> Hidden:
        """K''(t)."""
        second: Tensor = grad(lambda t: self.mean(t).sum())(t)
        return second

    @torch.no_grad()
    def sample(self, t: Hidden, *, generator: torch.Generator | None = None) -> Hidden:
        """One number h for every t, drawn from the tilted law rho(h) exp(t h - K(t)), whose mean is K'(t).

        Args:
            t: the tilts, any shape.
            generator: where randomness comes from, on the device of t. The same state gives the same numbers; None is
                torch's own.

        Returns:
            The shape, dtype and device of t; NaN where K(t) is not finite. Half precision is drawn in float32.

        Raises:
            TypeError, ValueError: t that is no floating-point tensor; a generator that is none, or of another device.
            NotImplementedError: a law of yours without `_draw`.

        Gradients: none.

        Not for averages over h: `mean` and `variance` are exact.

        Examples:
            >>> import torch
            >>> from implicit_attention.potentials import SignUnits
            >>> SignUnits().sample(torch.tensor([-50.0, 50.0, torch.nan]))
            tensor([-1.,  1., nan])
        """
        _validate.check_float_tensor("t", t)
        check_generator(generator, "t", t)
        with exact_precision(t):
            wide = at_least_single(t)
            known = self._can_draw(wide)
            # Tilts without a law are replaced before: torch's samplers raise for NaN.
            return self._draw(wide.where(known, 0.0), generator).where(known, torch.nan).to(t.dtype)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        """`sample` for tilts at which K is finite, in at least single precision."""
        raise NotImplementedError(f"{type(self).__name__} must define _draw(t, generator) to be sampled")

    def _can_draw(self, t: Tensor) -> Tensor:
        """Return for which tilts the law exists."""
        return self.cumulant(t).isfinite()


def check_generator(generator: torch.Generator | None, argument: str, like: Tensor) -> None:
    """Raise unless `generator` is None or a torch.Generator on the device of `like`, which is called `argument`."""
    if generator is None:
        return
    remedy = f'pass torch.Generator("{like.device}").manual_seed(0)'
    if not isinstance(generator, torch.Generator):
        raise TypeError(_validate.message("generator", "be a torch.Generator or None", repr(generator), remedy))
    same = generator.device.type == like.device.type and generator.device.index in (None, like.device.index)
    required = f"be on the device of `{argument}` ({like.device})"
    _validate.require(same, "generator", required, generator.device, remedy)


def check_units(units: Any) -> None:
    """Raise unless `units` is the law of one hidden unit, with a dimension where it needs one."""
    _validate.check_instance("units", units, Units, "be Units", "for example BernoulliUnits(0.5)")
    required = "have a largest variance >= 0, infinite if there is none"
    _validate.require(units.largest_variance >= 0, "units", required, units)


@dataclass(frozen=True)
class SiteLaw:
    """A normalised law rho(s) of a spin s in R^D, and its tilts rho(s) exp(theta.s + V |s|^2/2) / A.

        tilted_log_partition  log A(theta, V), convex, 0 at theta = 0 and V = 0
        tilted_moments        m = <s> = d log A/d theta and c = Tr Cov(s)/D, where <|s|^2> = 2 d log A/dV = |m|^2 + D c
        tilted_covariance     the Hessian of log A as a map

    All per site: theta (*batch, N, D), V (*batch, N), in units of 1/s and 1/s^2. The radius R is the scale of s.
    A subclass defines `tilted_log_partition`. The rest follows by automatic differentiation; then c is a difference
    of squares, and loses digits where it is small, so that a closed form is worth having. Where V is so large that A is
    infinite, log A is NaN.

    Not for hidden units, which have no quadratic term: see `Units`.

    Gradients: of all with respect to theta and V, to any order.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import DiscreteUnits, SiteLaw
        >>> spin_one = DiscreteUnits((-1, 0, 1))
        >>> isinstance(spin_one, SiteLaw)
        True
        >>> m, c = spin_one.tilted_moments(torch.tensor([[0.5]]), torch.tensor([0.0]), radius=1.0)
        >>> m, c
        (tensor([[0.3202]]), tensor([0.5903]))
    """

    #: Whether |s| = R for certain, so that V |s|^2/2 is a constant.
    fixed_length: ClassVar[bool] = False

    def check(self, argument: str, dim: int, radius: float) -> None:
        """Raise, with the name of the argument, if the law does not exist at this dimension and radius."""

    def tilted_log_partition(self, theta: Vectors, v: Sites, radius: float) -> Sites:
        """log A, (*batch, N).

        Args:
            theta: (*batch, N, D), the factor of s in the exponent.
            v: V, (*batch, N), the factor of |s|^2/2.
            radius: R > 0.
        """
        raise NotImplementedError(f"{type(self).__name__} must define tilted_log_partition(theta, v, radius)")

    def tilted_moments(self, theta: Vectors, v: Sites, radius: float) -> tuple[Vectors, Sites]:
        """(m, c), (*batch, N, D) and (*batch, N), for arguments as in `tilted_log_partition`."""

        def total(theta: Tensor, v: Tensor) -> Tensor:
            return self.tilted_log_partition(theta, v, radius).sum()

        m, half_square = grad(total, argnums=(0, 1))(theta, v)
        return m, (2 * half_square - m.square().sum(-1)) / theta.shape[-1]

    def tilted_covariance(self, theta: Vectors, v: Sites, radius: float) -> TiltMap:
        """The Hessian of log A, symmetric: from changes of theta and V to those of <s> and <|s|^2>/2."""

        def first(theta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            m, c = self.tilted_moments(theta, v, radius)
            return m, (m.square().sum(-1) + theta.shape[-1] * c) / 2

        _, pullback = vjp(first, theta, v)
        return lambda by_theta, by_v: pullback((by_theta, by_v))


def require_dimension(law: SiteLaw, argument: str, dim: int, needed: int, remedy: str) -> None:
    required = f"have spins of dimension {needed} for {type(law).__name__}"
    _validate.require(dim == needed, argument, required, f"D = {dim}", remedy)
