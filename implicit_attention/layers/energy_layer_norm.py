"""`EnergyLayerNorm`: a layer norm that is the gradient of a convex function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from .. import _validate
from .._torch import at_least_single
from ..potentials.layer_norm import LayerNormPotential
from .calls import Place


class EnergyLayerNorm(nn.Module):
    """Layer norm with one gain gamma > 0 for all entries: the gradient of a convex function.

    g = gamma (x - mean x)/sqrt(mean (x - mean x)^2 + eps) + delta, per token. That is `nn.LayerNorm` with gamma in
    every entry of its weight. gamma is the softplus of a parameter and starts at 1.

    Args:
        dim: entries of a token, D.
        bias: whether there is a shift delta, (D,), which starts at 0.
        eps: > 0, the variance that is added.
        **place: device and dtype of the parameters.

    Raises:
        TypeError, ValueError: arguments that do not fit; tokens of another width or dtype.

    Gradients: with respect to x and the parameters, to any order. Half precision is normalised in float32.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import EnergyLayerNorm
        >>> norm, x = EnergyLayerNorm(4), torch.randn(2, 3, 4)
        >>> torch.allclose(norm(x), torch.nn.functional.layer_norm(x, (4,)), atol=1e-6)
        True

    Not for a gain per entry, with which layer norm is the gradient of no function: use `nn.LayerNorm`.
    """

    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    def __init__(self, dim: int, bias: bool = True, eps: float = 1e-5, **place: Unpack[Place]) -> None:
        super().__init__()
        self.dim: int = _validate.check_integer("dim", dim, low=1)
        self.eps: float = _validate.check_number("eps", eps, low=0.0, open_low=True)
        self.raw_gamma = nn.Parameter(torch.empty((), **place))
        self.delta = nn.Parameter(torch.zeros(dim, **place)) if bias else None
        self.set_gamma(1.0)

    @property
    def gamma(self) -> Tensor:
        """The gain, in float32 also in a half-precision model."""
        return F.softplus(at_least_single(self.raw_gamma))

    @torch.no_grad()
    def set_gamma(self, gamma: float) -> None:
        """Make gamma this number > 0."""
        gamma = _validate.check_number("gamma", gamma, low=0.0, open_low=True)
        # log(e^gamma - 1), of which torch's softplus is the inverse; above 20 both are the identity.
        self.raw_gamma.fill_(gamma if gamma > 20 else gamma + math.log(-math.expm1(-gamma)))

    def lagrangian(self) -> LayerNormPotential:
        """The function L of which this layer is the gradient, with the parameters as they are now."""
        return LayerNormPotential(self.gamma, at_least_single(self.delta), self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised tokens, (..., N, D), in the dtype of x."""
        check_tokens(x, self.dim, self.raw_gamma)
        return self.lagrangian().mean(at_least_single(x)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, bias={self.delta is not None}, eps={self.eps:g}"


def check_tokens(x: Any, width: int, like: Tensor) -> None:
    """Raise unless x are tokens (..., N, width) in the precision and on the device of a layer's parameter."""
    _validate.check_float_tensor("x", x, min_ndim=2)
    _validate.require(x.shape[-1] == width, "x", f"have width {width} on its last axis", f"shape {tuple(x.shape)}")
    fits = at_least_single(x).dtype == at_least_single(like).dtype
    _validate.require(fits, "x", f"have the dtype of the layer, {like.dtype}", x.dtype, "convert it with .to(dtype)")
    _validate.require(x.device == like.device, "x", f"be on {like.device}", x.device, "move it with .to(device)")
