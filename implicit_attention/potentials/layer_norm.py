"""The Lagrangian of a layer norm: the convex function whose gradient is the normalised token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import LinearMap, sum_to_shape
from ._shapes import PerBatch, PerRow, States, per_state
from .base import CovarianceMap, Potential


class LayerNormPotential(Potential):
    r"""The potential whose mean is a layer norm, per token x of D entries.

    ```math
    L(x) = D\,\gamma\, s + \langle \delta, x \rangle, \qquad
    s = \sqrt{\operatorname{mean}_i\, (x_i - \bar x)^2 + \varepsilon}
    ```

    mean(x) = gamma (x - mean x)/s + delta is layer norm with one gain for all entries; with a gain for each entry it is
    the gradient of no function. The covariance M = Hess L(x) has the eigenvalue gamma/s across x - mean x,
    gamma eps/s^3 along it and 0 along (1, ..., 1): L is convex for gamma > 0, and grows like |x|.

    Args:
        gamma: gain > 0, a float or a tensor that broadcasts to *batch.
        delta: shift of the normalised token, (D,); None is 0.
        eps: > 0, the variance that is added.

    Raises:
        TypeError, ValueError: gamma or eps <= 0; shapes, dtypes or devices that do not fit.

    Gradients: with respect to x, gamma and delta, to any order.

    Reference: Hoover et al. (2023), Energy Transformer. The Lagrangian of public implementations sums over tokens
    inside the root, where its gradient is no layer norm if there is more than one.

    Not for normalising in a model: use `EnergyLayerNorm`, which holds the parameters.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import LayerNormPotential
        >>> norm, x = LayerNormPotential(gamma=2.0), torch.tensor([[1.0, 2.0, 6.0]])
        >>> norm.mean(x).round(decimals=3)
        tensor([[-1.8520, -0.9260,  2.7770]])
        >>> torch.allclose(norm.mean(x), 2.0 * torch.nn.functional.layer_norm(x, (3,)))
        True
    """

    convex = True
    declares_all = True
    #: Gamma, shaped to multiply states.
    gain: float | Tensor = per_state("gamma")

    def __init__(self, gamma: PerBatch = 1.0, delta: Float[Tensor, "D"] | None = None, eps: float = 1e-5) -> None:
        remedy = "parametrise it by a softplus"
        self.gamma: float | Tensor = _validate.check_per_batch("gamma", gamma, low=0.0, open_low=True, remedy=remedy)
        if delta is not None:
            _validate.check_float_tensor("delta", delta, min_ndim=1)
            _validate.require(delta.ndim == 1, "delta", "have one axis, (D,)", f"shape {tuple(delta.shape)}")
        self.delta = delta
        self.eps: float = _validate.check_number("eps", eps, low=0.0, open_low=True)

    def check_state(self, argument: str, z: Tensor) -> None:
        _validate.check_float_tensor(argument, z, min_ndim=2)
        _validate.check_fits_batch("gamma", self.gamma, argument, z)
        if self.delta is not None:
            _validate.check_same_kind([(argument, z), ("delta", self.delta)])
            required = f"have one entry for each of the {self.delta.shape[0]} of `delta` on its last axis"
            _validate.require(z.shape[-1] == self.delta.shape[0], argument, required, f"shape {tuple(z.shape)}")

    def value(self, z: States) -> PerRow:
        """L(x), (*batch, N, D) -> (*batch, N)."""
        _, s = self._centred(z)
        value = (z.shape[-1] * self.gain * s).squeeze(-1)
        return value if self.delta is None else value + z @ self.delta

    def mean(self, z: States) -> States:
        """The normalised token, gamma (x - mean x)/s + delta."""
        centred, s = self._centred(z)
        mean = centred * (self.gain / s)
        return mean if self.delta is None else mean + self.delta

    def covariance_product(self, z: States, v: States) -> States:
        """M v = (gamma/s) (v' - c <c, v>/(D s^2)), with c and v' the centred x and v."""
        return self._products(z)[0](v)

    def root_product(self, z: States, v: States) -> States:
        """M^(1/2) v, with the symmetric root of the covariance M."""
        return self._products(z, root=True)[0](v)

    def linearize(self, z: Tensor) -> CovarianceMap:
        product, (centred, s) = self._products(z)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            gradients: list[Tensor | None] = []
            if isinstance(self.gamma, Tensor):
                gradients.append(sum_to_shape((u * centred / s).sum((-1, -2)), self.gamma.shape))
            if self.delta is not None:
                gradients.append(sum_to_shape(u, self.delta.shape))
            return tuple(gradients)

        return CovarianceMap(product, pullback)

    def conjugate(self, g: States) -> PerRow:
        """L*(g) = sup_x <g, x> - L(x) = -D gamma sqrt(eps) sqrt(1 - |g - delta|^2/(D gamma^2)), (*batch, N).

        Between -D gamma sqrt(eps) and 0 on the ball where the root is real, in the plane where g - delta has mean zero;
        infinite elsewhere.
        """
        shifted = g if self.delta is None else g - self.delta
        size, gain = shifted.abs().amax(-1, keepdim=True), self.gain
        rest = 1 - shifted.square().mean(-1, keepdim=True) / (gain * gain)
        slack = 8 * torch.finfo(g.dtype).eps
        inside = (shifted.mean(-1, keepdim=True).abs() <= slack * size) & (rest >= -slack)
        # No root of 0 is taken: its gradient is infinite, and 0 * inf is NaN.
        root = rest.masked_fill(rest <= 0, 1.0).sqrt().masked_fill(rest <= 0, 0.0)
        value = -(g.shape[-1] * self.eps**0.5) * gain * root
        return torch.where(inside | g.isnan().any(-1, keepdim=True), value, torch.inf).squeeze(-1)

    def conjugate_at(self, z: States) -> PerRow:
        """L*(mean(x)) = <mean(x), x> - L(x) = -D gamma eps/s, without the cancellation of the two, (*batch, N)."""
        _, s = self._centred(z)
        return (-(z.shape[-1] * self.eps) * self.gain / s).squeeze(-1)

    def divergence(self, a: States, b: States) -> PerRow:
        """D_L(a, b) = L(a) - L(b) - <mean(b), a - b> >= 0, (*batch, N), precise for a near b too."""
        # With d the direction of u = (x - mean x, sqrt(D eps)), whose length is sqrt(D) s: gamma D s_a |d_a - d_b|^2/2.
        (centred, s), (_, s_a) = self._centred(b), self._centred(a)
        change = (a - b) - (a - b).mean(-1, keepdim=True)
        longer = (change * (2 * centred + change)).mean(-1, keepdim=True) / ((s_a + s) * s)
        turned = (change - longer * centred).square().sum(-1, keepdim=True)
        turned = turned + (a.shape[-1] * self.eps) * longer.square()
        return (self.gain * turned / (2 * s_a)).squeeze(-1)

    # Parts.

    def _centred(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """x - mean x, and s (*batch, N, 1)."""
        centred = z - z.mean(-1, keepdim=True)
        return centred, (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def _products(self, z: Tensor, *, root: bool = False) -> tuple[LinearMap, tuple[Tensor, Tensor]]:
        """Return v -> M v, or M^(1/2) v, at z, and the results of `_centred`."""
        centred, s = self._centred(z)
        direction = centred / (z.shape[-1] ** 0.5 * s)
        # |direction|^2 = 1 - eps/s^2, so that the eigenvalue gamma eps/s^3 along it is gamma/s (1 - |direction|^2).
        across = self.gain / s
        if root:
            # 1 - (1 - sqrt(eps)/s) |direction|^2/|direction|^2, written without dividing by a direction of 0.
            across, along = across**0.5, s / (s + self.eps**0.5)
        else:
            along = torch.ones_like(s)

        def product(v: Tensor) -> Tensor:
            centred_v = v - v.mean(-1, keepdim=True)
            projected: Tensor = across * (centred_v - along * direction * (direction * centred_v).sum(-1, keepdim=True))
            return projected

        return product, (centred, s)
