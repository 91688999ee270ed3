"""The energy of equilibrium attention: a potential, a field that is the query, and an anchor between them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import check_graph, sum_to_shape
from ..potentials import Potential
from ..problem import Evaluation, Linearization
from .base import Energy


class AnchoredEnergy(Energy):
    """E(z) = |z|^2/2 - anchor <x, z> - (1 - anchor) Phi(z), per query x.

    f(z) = anchor x + (1 - anchor) mean(z); Hess E v = v - (1 - anchor) Cov(z) v. With anchor = 0 the energy is that of
    an associative memory and x is only where one starts; with anchor > 0 every query keeps an equilibrium of its own,
    to which gradients flow.

    Args:
        potential: Phi, a log-partition potential such as `LogSumExp(keys, beta)`.
        field: the queries x, (*batch, N, D).
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; an anchor outside [0, 1].

    Gradients: with respect to field, anchor and the potential's tensors, to any order.
    """

    event_ndim = 1

    def __init__(
        self,
        potential: Potential,
        field: Float[Tensor, "*batch N D"],
        anchor: float | Float[Tensor, "*#batch"] = 0.0,
    ) -> None:
        if not isinstance(potential, Potential):
            raise TypeError(
                _validate.message(
                    "potential", "be a Potential", type(potential).__name__, "for example LogSumExp(keys, beta)"
                )
            )
        _validate.check_float_tensor("field", field, min_ndim=2)
        potential.check_state("field", field)
        if isinstance(anchor, Tensor):
            _validate.check_float_tensor("anchor", anchor)
            _validate.check_same_kind([("field", field), ("anchor", anchor)])
            _validate.check_broadcast("anchor", anchor.shape, field.shape[:-2], "the leading axes of `field`")
            _validate.check_range("anchor", anchor, low=0.0, high=1.0, remedy="parametrise it by a sigmoid")
        else:
            anchor = _validate.check_number("anchor", anchor, low=0.0, high=1.0)
        self.potential = potential
        self.field = field
        self.anchor = anchor

    @property
    def plain_steps_descend(self) -> bool:  # type: ignore[override]
        """Plain steps descend for every convex potential and every anchor."""
        return self.potential.convex

    @property
    def row_block(self) -> int:  # type: ignore[override]
        return self.potential.row_block

    @property
    def _row_anchor(self) -> float | Tensor:
        if not isinstance(self.anchor, Tensor):
            return self.anchor
        return _validate.inside(self.anchor, low=0.0, high=1.0)[..., None]

    @property
    def _anchor(self) -> float | Tensor:
        anchor = self._row_anchor
        return anchor[..., None] if isinstance(anchor, Tensor) else anchor

    def energy(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """E(z), (*batch, N, D) -> (*batch, N)."""
        return self._energy(z, self.potential.value(z))

    def _energy(self, z: Tensor, value: Tensor) -> Tensor:
        self.potential.check_value(value, z)
        pull = z / 2 if self._forgets else z / 2 - self._anchor * self.field
        return (z * pull).sum(-1) - (1 - self._row_anchor) * value

    @property
    def _forgets(self) -> bool:
        """Whether the field is not read at all, so that what it holds does not matter."""
        return not isinstance(self.anchor, Tensor) and self.anchor == 0

    def fixed_point_map(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """f(z) = anchor x + (1 - anchor) mean(z)."""
        return self._map(self.potential.mean(z), z)

    def _map(self, mean: Tensor, z: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not mean.requires_grad:
            name = f"{type(self.potential).__name__}.mean"
            check_graph(name, mean, lambda z, *t: self.potential.replace(*t).mean(z), z, *self.potential.tensors())
        return mean if self._forgets else between(mean, self.field, self._anchor)

    def gradient(self, z: Tensor) -> Tensor:
        return z - self._map(self.potential.mean(z), z)

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return v - (1 - self._anchor) * self.potential.covariance_product(z, v)

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        if not energy:
            return Evaluation(self.fixed_point_map(z), None)
        value, mean = self.potential.evaluate(z)
        return Evaluation(self._map(mean, z), self._energy(z, value))

    def linearize(self, z: Tensor) -> Linearization:
        cov = self.potential.linearize(z)
        if cov is None or not self._has_only("potential", "field", "anchor"):
            return super().linearize(z)

        def product(v: Tensor) -> Tensor:
            return (1 - self._anchor) * cov.product(v)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            gradients = [*cov.vjp_tensors((1 - self._anchor) * u), self._anchor * u]
            if isinstance(self.anchor, Tensor):
                gradients.append(self._by_anchor(z, u))
            return tuple(gradients)

        return Linearization(product, product, pullback)

    def _by_anchor(self, z: Tensor, u: Tensor) -> Tensor:
        by_anchor = (u * (self.field - self.potential.mean(z))).sum((-1, -2))
        assert isinstance(self.anchor, Tensor)
        return sum_to_shape(by_anchor, self.anchor.shape)

    def lipschitz(self) -> Tensor | None:
        bound = self.potential.lipschitz()
        return None if bound is None else (1 - self.anchor) * bound

    def select(self, index: Tensor) -> Self | None:
        potential = self.potential.select(index)
        if potential is None or not self._has_only("potential", "field", "anchor"):
            return None
        clone = self.replace(*self.tensors())
        clone.potential = potential
        clone.field = self.field.gather(-2, index[..., None].expand(*index.shape, self.field.shape[-1]))
        return clone

    @property
    def knows_own(self) -> bool:  # type: ignore[override]
        """Potentials of this library make a NaN of every NaN that counts, so that the others do not read it."""
        return type(self) is AnchoredEnergy and self.potential.knows_own

    def without(self, left_out: Tensor) -> Self:
        tensors = self.tensors()
        if self.knows_own:
            # A bias of -inf masks.
            good = (torch.isfinite(t) | (t == -torch.inf) for t in tensors)
            tensors = tuple(t.where(g, 1.0) if t.is_floating_point() else t for t, g in zip(tensors, good, strict=True))
        clone = self.replace(*tensors)
        clone.field = self.field.masked_fill(left_out[..., None], 0.0)
        return clone

    def check_undeclared(self, z: Tensor) -> None:
        # Potentials of this library declare what they read by construction; a subclass or one's own may not.
        if not self.knows_own:
            super().check_undeclared(z)

    def check_state(self, z: Tensor) -> None:
        super().check_state(z)
        _validate.require(
            z.shape == self.field.shape, "initial", f"have the field's shape {tuple(self.field.shape)}", tuple(z.shape)
        )


def between(mean: Tensor, field: Tensor, anchor: float | Tensor) -> Tensor:
    """Anchor field + (1 - anchor) mean, exact at both ends."""
    if isinstance(anchor, Tensor) or anchor < 0.5:
        return mean.lerp(field, anchor)
    # 1 - anchor is formed here, in double precision: near 1 a float32 keeps few of its digits.
    return field.lerp(mean, 1 - anchor)
