"""The energy of equilibrium attention: a potential, a field that is the query, and an anchor between them."""

from __future__ import annotations

import copy
import warnings
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import check_graph, host_may_look, sum_to_shape
from ..failure import ConvergenceWarning, Word, outside
from ..kernels.problem import Attention
from ..potentials import Potential
from ..potentials._rays import Ray
from ..potentials._shapes import PerBatch, States, of_part, per_state
from ..potentials.log_sum_exp import as_log_sum_exp
from ..problem import Evaluation, Linearization, Problem, restricted
from .base import Energy

# Within this distance of the limit rounding decides on which side a scale lies, and the field on the bound.
FALLS = 1 + 1e-6


class Fielded(Problem):
    """A problem with a field of the shape of its states; each problem of a batch reads its own part of the field.

    Args:
        field: (*batch, N, D).
    """

    def __init__(self, field: Tensor) -> None:
        _validate.check_float_tensor("field", field, min_ndim=2)
        self.field = field

    def without(self, left_out: Tensor) -> Self:
        # A bias of -inf masks.
        known = self._filled(lambda t: torch.isfinite(t) | (t == -torch.inf)) if self.all_declared else self
        clone = copy.copy(known)
        clone.field = self.field.masked_fill(left_out[(..., *(None,) * self.event_ndim)], 0.0)
        return clone

    def _rows(self: Any, index: Tensor) -> Any:
        """The problems `index`, (*batch, K), of which each has a row of the field and of `self.potential`.

        For the `select` of subclasses, each of which says what f is.
        """
        known = self.event_ndim == 1 and self._has_only(*self._attributes)
        if not known or (part := self.potential.select(index)) is None:
            return None
        clone = restricted(self, index, field=1)
        clone.potential = part
        return clone

    def check_state(self, z: Tensor) -> None:
        super().check_state(z)
        shape = self.field.shape
        _validate.require(z.shape == shape, "initial", f"have the field's shape {tuple(shape)}", tuple(z.shape))


class Anchored(Fielded):
    """A problem z = anchor x + (1 - anchor) g(z) with the field x and the anchor.

    Args:
        field: x, (*batch, N, D).
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch.
    """

    #: The anchor, shaped to multiply states.
    _anchor: float | Tensor = per_state("anchor", high=1.0, open_low=False)

    def __init__(self, field: Tensor, anchor: float | Tensor) -> None:
        super().__init__(field)
        remedy = "parametrise it by a sigmoid"
        self.anchor: float | Tensor = _validate.check_per_batch("anchor", anchor, low=0.0, high=1.0, remedy=remedy)
        _validate.check_fits_batch("anchor", anchor, "field", field)

    @property
    def _forgets(self) -> bool:
        """Whether the field is not read at all, so that a NaN in it does not matter."""
        return not isinstance(self.anchor, Tensor) and self.anchor == 0

    def _anchored(self, mean: Tensor) -> Tensor:
        """anchor x + (1 - anchor) mean, exact at both ends."""
        if self._forgets:
            return mean
        anchor = self._anchor
        if isinstance(anchor, Tensor) or anchor < 0.5:
            return mean.lerp(self.field, anchor)
        # Python forms 1 - anchor in double precision: near 1 a float32 keeps few of its digits.
        return self.field.lerp(mean, 1 - anchor)


class AnchoredEnergy(Anchored, Energy):
    r"""The energy of a state in a potential Phi, per query x, or per sample of tokens x; with a the anchor:

    ```math
    \begin{align*}
    E(z) &= \tfrac12 |z|^2 - a\,\langle x, z\rangle - (1 - a)\,\Phi(z) \\
    f(z) &= a\,x + (1 - a)\,\nabla\Phi(z), \qquad \nabla^2 E = I - (1 - a)\,\nabla^2\Phi
    \end{align*}
    ```

    where code says `mean` for the gradient of Phi. With anchor = 0 the energy is that of an associative memory and x is
    only where one starts; with anchor > 0 every query keeps an equilibrium of its own, to which gradients flow.

    Args:
        potential: Phi, a log-partition potential such as `LogSumExp(keys, beta)`, or a sum of several. Its `event_ndim`
            is that of the problem: 1 for queries, each on its own, 2 for the tokens of a sample together.
        field: the queries x, (*batch, N, D).
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch.
        unbounded: what to do about an energy that certainly falls without end along a ray, where the host can look at
            the tensors at no cost (on a CPU, outside of torch.func and torch.compile): "raise", "warn" or "ignore". A
            solve of such an energy may still find a local minimum or a saddle; if it runs away, its status is DIVERGED.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; an anchor outside [0, 1]; an energy without a
            lower bound.

    Gradients: with respect to field, anchor and the potential's tensors, to any order.

    Not for a map that is no gradient: use `FixedPointMap`.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> keys, query = torch.eye(3), torch.tensor([[1.0, 0.2, 0.0]])
        >>> energy = AnchoredEnergy(LogSumExp(keys, beta=4.0), field=query, anchor=0.5)
        >>> solution = solve(energy, query)
        >>> solution.converged, solution.value.round(decimals=2)
        (tensor([True]), tensor([[0.9700, 0.1200, 0.0100]]))
    """

    declares_all = True
    event_ndim: int = of_part("potential", "event_ndim")
    row_block: int = of_part("potential", "row_block")
    #: Plain steps descend for every convex potential and every anchor.
    plain_steps_descend: bool = of_part("potential", "convex")
    select = Fielded._rows
    #: The attributes of the class: its closed forms do not hold for a subclass with more.
    _attributes: ClassVar[tuple[str, ...]] = ("potential", "field", "anchor")
    #: Whether the energy is known to fall along no ray of the potential.
    _bounded: bool = False
    #: The factor of |z|^2.
    _square: ClassVar[float] = 0.5

    def __init__(
        self, potential: Potential, field: States, anchor: PerBatch = 0.0, *, unbounded: Word = "raise"
    ) -> None:
        remedy = "for example LogSumExp(keys, beta)"
        _validate.check_instance("potential", potential, Potential, remedy=remedy)
        potential.check_state("field", field)
        self.potential = potential
        super().__init__(field, anchor)
        # A subclass that overrides `bottomless` may have an energy with a bound.
        if type(self).bottomless is AnchoredEnergy.bottomless and check_bounded(potential, self.anchor, unbounded):
            self._bounded = True

    def _has_only(self, *names: str) -> bool:
        return tuple(name for name in vars(self) if name != "_bounded") == names

    def _about_origin(self) -> tuple[Self, Tensor] | None:
        """The same problem, whose energy may differ by a constant, of states less an origin, and that; None for 0."""
        known = type(self.potential)._about_origin is not Potential._about_origin
        if not known or (found := self.potential._about_origin()) is None:
            return None
        clone = copy.copy(self)
        clone.potential, clone.field = found[0], self.field - found[1]
        return clone, found[1]

    def as_attention(self) -> Attention | None:
        part = as_log_sum_exp(self.potential)
        if part is None or part._dense or type(self) is not AnchoredEnergy or tuple(vars(self)) != self._attributes:
            return None
        # Where the host does not look, and once they have changed, numbers outside of their range become NaN.
        beta = _validate.inside(part.beta, low=0.0, open_low=True)
        anchor = _validate.inside(self.anchor, low=0.0, high=1.0)
        return Attention(self.field, part.keys, beta, anchor, part.mask, part.bias, part.query_offset)

    @property
    def if_bottomless(self) -> str:  # type: ignore[override]
        """Return no remedy: the bounds of the library's potentials are known, and unbounded ones are refused."""
        return "" if self.all_declared else super().if_bottomless

    def energy(self, z: States) -> Float[Tensor, "*lead"]:
        """E(z), one number per query, (*batch, N, D) -> (*batch, N), or per sample, (*batch)."""
        return self._energy(z, self.potential.value(z))

    def _energy(self, z: Tensor, value: Tensor) -> Tensor:
        self.potential.check_value(value, z)
        pull = self._square * z if self._forgets else self._square * z - self._anchor * self.field
        anchor = self._anchor
        if isinstance(anchor, Tensor):
            # As many axes as the values have.
            anchor = anchor[..., 0] if self.event_ndim == 1 else anchor[..., 0, 0]
        return (z * pull).sum(tuple(range(-self.event_ndim, 0))) - (1 - anchor) * value

    def fixed_point_map(self, z: States) -> States:
        """f(z) = anchor x + (1 - anchor) mean(z)."""
        return self._map(self.potential.mean(z), z)

    def _map(self, mean: Tensor, z: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not mean.requires_grad:
            name = f"{type(self.potential).__name__}.mean"
            check_graph(name, mean, lambda z, *t: self.potential.replace(*t).mean(z), z, *self.potential.tensors())
        return self._anchored(mean)

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
        if cov is None or not self._has_only(*self._attributes):
            return super().linearize(z)

        def product(v: Tensor) -> Tensor:
            return (1 - self._anchor) * cov.product(v)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            gradients = *cov.vjp_tensors((1 - self._anchor) * u), self._anchor * u
            if not isinstance(self.anchor, Tensor):
                return gradients
            by_anchor = (u * (self.field - self.potential.mean(z))).sum((-1, -2))
            return *gradients, sum_to_shape(by_anchor, self.anchor.shape)

        return Linearization(product, product, pullback)

    def bottomless(self, z: Tensor | None = None) -> Tensor | None:
        ray = None if self._bounded or self.event_ndim != 1 else self.potential.falling_ray()
        if ray is None:
            return None
        falls = _beyond(ray, self.anchor) > FALLS
        if z is None:
            return falls
        along = ray.direction.to(z)[..., None, :].expand(z.shape)
        return falls[..., None] & ((along * self.hessian_product(z, along)).sum(-1) < 0)

    def lipschitz(self) -> Tensor | None:
        bound = self.potential.lipschitz()
        return None if bound is None else (1 - self.anchor) * bound


# Whether an energy certainly has no lower bound, where the host can look.


def check_bounded(potential: Potential, anchor: float | Tensor, unbounded: Word) -> bool:
    """Raise or warn if an entry's energy certainly falls without end; return whether it is certain that none does so.

    The check knows only rays that potentials report: without such a ray the energy may fall all the same.
    """
    _validate.check_choice("unbounded", unbounded, ("raise", "warn", "ignore"))
    tensors = [*potential.tensors(), *([anchor] if isinstance(anchor, Tensor) else [])]
    if potential.event_ndim != 1 or not host_may_look(*tensors):
        return False
    lowest = anchor
    if isinstance(anchor, Tensor):
        lowest = float(anchor.detach().amin()) if anchor.numel() else 1.0
    # No ray is looked for above the largest scale.
    if (ray := potential.falling_ray(1 - lowest)) is None:
        return False
    scale = _beyond(ray, anchor)
    if not bool((scale > FALLS).any()):
        return True
    if unbounded == "ignore":
        return False
    entry = tuple(int(i) for i in torch.unravel_index(scale.argmax(), scale.shape))
    limit = float(ray.limit.expand(scale.shape)[entry])
    direction = ray.direction.expand(*scale.shape, -1)[entry].tolist()
    shown = ", ".join(f"{x:.3g}" for x in direction[:4]) + (", ..." if len(direction) > 4 else "")
    number = float(anchor.detach().expand(scale.shape)[entry]) if isinstance(anchor, Tensor) else anchor
    where = f" in batch entry {entry}" if entry else ""
    required = "leave |z|^2/2 - (1 - anchor) Phi(z) a lower bound"
    received = f"{type(potential).__name__} with anchor {number:.6g}, which falls without end along [{shown}]{where}"
    if limit == 0:
        remedy = "no anchor below 1 helps: use a potential that grows no faster than |z|^2"
    else:
        least = "" if potential.bounded_below(limit / FALLS) else " (at least)"
        remedy = f"raise the anchor above {1 - limit:.6g}{least}, lower beta, normalise the keys"
    fixed = "or keep the states at a fixed length (SphereEnergy)"
    message = _validate.message("potential", required, received, f"{remedy}, {fixed}")
    if unbounded == "raise":
        raise ValueError(f"{message}. Pass unbounded='warn' or 'ignore' to look for a local minimum all the same.")
    warnings.warn(message, ConvergenceWarning, stacklevel=outside())
    return False


def _beyond(ray: Ray, anchor: float | Tensor) -> Tensor:
    """(1 - anchor)/limit, (*batch), without graph: above 1 the energy falls."""
    pull = 1 - torch.as_tensor(anchor, dtype=ray.limit.dtype, device=ray.limit.device).detach()
    # At anchor 1 the potential is not read, and 0/0 must not count.
    return torch.where(pull > 0, pull / ray.limit, 0.0).nan_to_num(0.0)
