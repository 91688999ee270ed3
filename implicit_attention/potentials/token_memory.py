"""A potential of single rows, summed over the tokens of a sample."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ._rays import Ray
from ._shapes import States
from .base import Composite, CovarianceMap, Potential


class TokenMemory(Composite):
    """Phi(g) = sum_C phi(g_C): a potential over keys, such as a memory, of all tokens of a sample together.

    mean and covariance are those of phi, token by token. It makes phi (one problem per row) a term beside
    `TokenAttention` and `SelfAttention` (one problem per sample). Over `Polynomial(xi, 1.0)` -Phi is the memory energy
    of the Energy Transformer.

    Args:
        potential: phi, with `event_ndim` 1.

    Raises:
        TypeError, ValueError: a potential of all tokens already.

    Gradients: with respect to g and the tensors of phi, to any order.

    Not for a memory alone, whose tokens are problems of their own: use phi itself.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import Polynomial, SelfAttention, TokenMemory
        >>> phi = SelfAttention(0.5) + TokenMemory(Polynomial(torch.eye(4), beta=1.0))
        >>> phi.value(torch.ones(2, 3, 4)).shape
        torch.Size([2])
    """

    event_ndim = 2
    declares_all = True

    def __init__(self, potential: Potential) -> None:
        _validate.check_instance("potential", potential, Potential)
        required = "have one problem per row (event_ndim 1)"
        _validate.require(potential.event_ndim == 1, "potential", required, f"event_ndim {potential.event_ndim}")
        super().__init__(potential)

    def value(self, z: States) -> Float[Tensor, "*batch"]:
        """Phi(g), (*batch, N, D) -> (*batch)."""
        return self.parts[0].value(z).sum(-1)

    def mean(self, z: Tensor) -> Tensor:
        return self.parts[0].mean(z)

    def covariance_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self.parts[0].covariance_product(z, v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, mean = self.parts[0].evaluate(z)
        return value.sum(-1), mean

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        return self.parts[0].linearize(z)

    def bounded_below(self, scale: float) -> bool | None:
        return self.parts[0].bounded_below(scale)

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray | None:
        return self.parts[0].falling_ray(scale)

    def lipschitz(self) -> Tensor | None:
        return self.parts[0].lipschitz()
