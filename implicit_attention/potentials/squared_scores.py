"""The quadratic potential, whose mean is linear attention: the solvable case."""

from __future__ import annotations

import math

from einops import einsum
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from ._attention import SMALL_PRODUCT
from ._rays import Ray, finite, quadratic_ray, spectral_norm
from ._read import check_masks, check_per_key
from ._shapes import Keys, PerBatch, PerRow, States
from .masked_keys import KeyPotential, in_double


class SquaredScores(KeyPotential):
    r"""The potential whose mean is linear attention without normalisation.

    ```math
    \Phi(z) = \frac\beta2 \sum_j \langle k_j, z \rangle^2, \qquad \nabla\Phi(z) = \beta K^\top K z
    ```

    The anchored energy is then quadratic and its equilibrium (I - (1 - anchor) beta K^T K)^{-1} anchor x.

    Args:
        keys: (*batch, M, D).
        beta: > 0, a float or a tensor that broadcasts to *batch.
        mask: boolean over keys, broadcasts to (*batch, 1, M); True = the key counts.
        bias: not supported (there is no exponential that it could shift); must be None.

    The energy is bounded below only while (1 - anchor) beta lambda_max(K^T K) < 1; `AnchoredEnergy` refuses it beyond.

    Gradients: with respect to z, keys and beta, to any order.

    Not for softmax attention, or where weights are to be read out in values: use `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, SquaredScores, solve
        >>> energy = AnchoredEnergy(SquaredScores(torch.eye(2), beta=0.5), field=torch.ones(1, 2), anchor=0.5)
        >>> solve(energy, torch.ones(1, 2)).value.round(decimals=3)  # anchor x/(1 - (1 - anchor) beta)
        tensor([[0.6670, 0.6670]])
    """

    convex = True
    declares_all = True

    def __init__(self, keys: Keys, beta: PerBatch, *, mask: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__(keys, beta)
        remedy = "use LogSumExp for additive biases"
        _validate.require(bias is None, "bias", "be None for SquaredScores", "a tensor", remedy)
        check_masks(mask, None, keys)
        if mask is not None:
            shape = check_per_key("mask", mask, "use one SquaredScores per group of queries")
            _validate.check_broadcast("mask", shape, keys.shape[:-2], "the leading axes of `keys`")
        self.mask = mask

    @property
    def row_block(self) -> int:  # type: ignore[override]
        # Torch multiplies smaller products by itself, with other bits.
        count, dim = self.keys.shape[-2:]
        return -(-max(SMALL_PRODUCT // max(count * dim, 1), 1) // 32) * 32

    def value(self, z: States) -> PerRow:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self._row_scale * self._project(z).square().sum(-1) / 2

    def mean(self, z: States) -> States:
        """beta K^T K z, per row."""
        return self._scale * einsum(self._project(z), self._counted(), "... n m, ... m d -> ... n d")

    def covariance_product(self, z: States, v: States) -> States:
        """beta K^T K v, whatever z."""
        return self.mean(v)

    def select(self, index: Tensor) -> Self | None:
        return self if self._has_only("keys", "beta", "mask") else None

    def bounded_below(self, scale: float) -> bool:
        """Whether scale beta lambda_max(K^T K) < 1 for every batch entry."""
        return bool((scale * self.lipschitz() < 1).all())

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray:
        """The eigenvector of lambda_max(K^T K), from scale 1/(beta lambda_max) on."""
        return quadratic_ray(finite(in_double(self._counted())), self.beta, scale)

    def lipschitz(self) -> Tensor:
        """beta lambda_max(K^T K), (*batch)."""
        return self.beta * spectral_norm(self._counted()).square()

    def _counted(self) -> Tensor:
        """Return the keys, with zeros in place of those that do not count."""
        if self.mask is None:
            return self.keys
        return self.keys.where((self.mask if self.mask.ndim == 1 else self.mask.squeeze(-2))[..., None], 0.0)

    def _project(self, z: Tensor) -> Tensor:
        return einsum(z, self._counted(), "... n d, ... m d -> ... n m")
