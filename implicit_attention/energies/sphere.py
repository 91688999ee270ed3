"""A potential and a field on a sphere: states of fixed length, such as those behind a layer norm."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import vjp
from ..potentials import Potential
from ..potentials._shapes import PerBatch, States, per_state
from ..problem import Evaluation, Linearization, pullback
from .anchored import AnchoredEnergy


class SphereEnergy(AnchoredEnergy):
    r"""The energy of attention behind a norm, among the states of length r; with a the anchor:

    ```math
    E(z) = -a\,\langle x, z\rangle - (1 - a)\,\Phi(z), \qquad |z| = r
    ```

    f(z) = r g/|g| with g = anchor x + (1 - anchor) mean(z). Fixed points of f are stationary on the sphere: g is
    r |g| times the normal there. With P = I - z z^T/r^2 the Hessian on the tangent space is
    (|g|/r) P - (1 - anchor) P Cov(z) P, and the adjoint is solved there. As |z| is fixed, potentials without a bound
    (`Polynomial`, `Exponential`) have solutions too: over `SquaredScores` f is power iteration.

    Where Phi is convex plain steps descend: f(z) is the minimum on the sphere of the linear upper bound of E at z, and
    E(f(z)) <= E(z) - (|g|/(2 r)) |f(z) - z|^2. Elsewhere solvers with an energy guard shorten them.

    A state off the sphere stands for r z/|z|: energy, gradient and map are those of that state, and `solve` returns
    states on the sphere, to rounding (solvers of SciPy and torchdeq: to their tolerance). z = 0 has no direction; the
    first step leads from there to f(0). Where g = 0, as for a query that may read no key at anchor 0, z is stationary
    and stays; its direction counts as a constant. If both are 0 the row is NONFINITE.

    Args:
        potential: Phi, such as `LogSumExp(keys, beta)`. With `event_ndim` 2 every token has length r.
        field: x, (*batch, N, D).
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch. At 0 the field is not read.
        radius: r > 0, in units of the state, a float or a tensor that broadcasts to *batch.
        mean_zero: whether states have mean zero, too: the entries of g lose their mean first. At radius sqrt(D), f is
            layer norm without gain and bias.

    Raises:
        TypeError, ValueError: as `AnchoredEnergy`; a radius <= 0; mean_zero with a single entry.

    Gradients: with respect to field, anchor, radius and the potential's tensors, to any order.

    Not for states whose length tells something: use `AnchoredEnergy`.

    Examples:
        >>> import torch
        >>> from implicit_attention import SquaredScores, solve
        >>> from implicit_attention.energies import SphereEnergy
        >>> keys, start = torch.tensor([[3.0, 3.0], [1.0, -1.0]]), torch.tensor([[1.0, 0.0]])
        >>> energy = SphereEnergy(SquaredScores(keys, beta=1.0), start, radius=2.0)
        >>> solve(energy, start).value.round(decimals=2)
        tensor([[1.4100, 1.4100]])
    """

    declares_all = True
    steps_rescaled = True
    row_block = AnchoredEnergy.row_block
    plain_steps_descend = AnchoredEnergy.plain_steps_descend
    select = AnchoredEnergy.select
    _attributes = (*AnchoredEnergy._attributes, "radius", "mean_zero")
    _square: ClassVar[float] = 0.0
    #: The radius, shaped to multiply states.
    _radius: float | Tensor = per_state("radius")

    def __init__(
        self,
        potential: Potential,
        field: States,
        anchor: PerBatch = 0.0,
        radius: PerBatch = 1.0,
        *,
        mean_zero: bool = False,
    ) -> None:
        super().__init__(potential, field, anchor)
        remedy = "parametrise it, for example as an exponential"
        self.radius: float | Tensor = _validate.check_per_batch("radius", radius, low=0.0, open_low=True, remedy=remedy)
        _validate.check_fits_batch("radius", radius, "field", field)
        _validate.check_flag("mean_zero", mean_zero)
        required = "be False for states of one entry, which have no direction of mean zero"
        _validate.require(not mean_zero or field.shape[-1] > 1, "mean_zero", required, mean_zero)
        self.mean_zero = mean_zero

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether df/dz is symmetric at solutions: not of tokens together, where each has a factor r/|g| itself."""
        return self.potential.event_ndim == 1

    def bottomless(self, z: Tensor | None = None) -> None:
        """No energy falls without end on a sphere."""

    def retract(self, z: States) -> States:
        """r z/|z|, and 0 for 0."""
        return self._radius * self._sized(z)[0]

    def energy(self, z: States) -> Float[Tensor, "*lead"]:
        """E(r z/|z|), one number per query, (*batch, N, D) -> (*batch, N), or per sample, (*batch)."""
        return super().energy(self.retract(z))

    def fixed_point_map(self, z: States) -> States:
        """f(z) = r g/|g|."""
        return super().fixed_point_map(self.retract(z))

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        return super().evaluate(self.retract(z) if energy else z, energy=energy)

    def _map(self, mean: Tensor, z: Tensor) -> Tensor:
        mapped = self.retract(super()._map(mean, z))
        # Its direction is a constant, so that I - df/dz is not singular.
        radius = self._radius
        stays = z.detach() * (radius / radius.detach()) if isinstance(radius, Tensor) else z.detach()
        stays = stays.where((stays != 0).any(-1, keepdim=True), torch.nan)
        return mapped.where((mapped != 0).any(-1, keepdim=True), stays)

    def gradient(self, z: Tensor) -> Tensor:
        """Grad of z -> E(r z/|z|): -(r/|z|) (I - z z^T/|z|^2) g, tangential."""
        point, back = vjp(self.retract, z)
        gradient: Tensor = back(-self._anchored(self.potential.mean(point)))[0]
        return gradient

    def linearize(self, z: Tensor) -> Linearization:
        """At a solution df/dz = (r (1 - anchor)/|g|) P Cov(z) P, for queries symmetric, as it is nowhere else.

        Beside a solution this differs from df/dz as the residual does from zero.
        """
        z = self.retract(z)
        normal, length = self._sized(z)[0], self._sized(self._anchored(self.potential.mean(z)))[1]
        # Where g = 0 the state stays as it is, whatever the tensors.
        part = (1 - self._anchor) * self._radius / length.masked_fill(length == 0, torch.inf)
        cov = self.potential.linearize(z)

        def tangential(v: Tensor) -> Tensor:
            return self._centred(v) - normal * (normal * v).sum(-1, keepdim=True)

        def curved(v: Tensor) -> Tensor:
            v = tangential(v)
            return tangential(self.potential.covariance_product(z, v) if cov is None else cov.product(v))

        return Linearization(lambda v: part * curved(v), lambda u: curved(part * u), lambda u: pullback(self, z, u))

    def _centred(self, z: Tensor) -> Tensor:
        return z - z.mean(-1, keepdim=True) if self.mean_zero else z

    def _sized(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return z/|z| (0 for 0) and |z| (*batch, N, 1), with `mean_zero` of the centred z, at every size of z."""
        centred = self._centred(z)
        largest = centred.detach().abs().amax(-1, keepdim=True)
        if self.mean_zero:
            # Entries that are all the same leave rounding errors, which are no direction.
            whole = z.detach().abs().amax(-1, keepdim=True)
            nothing = largest <= 4 * torch.finfo(z.dtype).eps * whole
            centred, largest = centred.masked_fill(nothing, 0.0), largest.masked_fill(nothing, 0.0)
        # The largest entry becomes 1, so that squares neither overflow nor vanish. Of 0 no root is taken.
        size = largest.masked_fill(largest == 0, 1.0)
        scaled = centred / size
        norm = (scaled.square().sum(-1, keepdim=True) + (largest == 0)).sqrt()
        return scaled / norm, largest * norm
