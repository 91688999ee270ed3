"""The heads of token attention: weights of queries and keys per head, and how tokens go through them."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from .. import _validate


class TokenHeads:
    """Weights (H, Y, D) of queries and keys, inverse temperatures, and which tokens attend to which."""

    w_query: Tensor
    w_key: Tensor
    beta: float | Tensor
    mask: Tensor | None
    exclude_self: bool

    def keys_of(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch H N Y"]:
        """k_h = g W_key_h^T."""
        return self._heads(z, self.w_key)

    @property
    def _scale(self) -> float | Tensor:
        """Beta, shaped to multiply scores or the queries of all heads."""
        if not isinstance(self.beta, Tensor):
            return self.beta
        scale: Tensor = _validate.inside(self.beta, low=0.0, open_low=True)[..., None, None]
        return scale

    def _heads(self, z: Tensor, weight: Tensor) -> Tensor:
        """z W_h^T, (*batch, H, N, Y)."""
        flat = z @ weight.flatten(0, 1).mT
        return flat.reshape(*flat.shape[:-1], *weight.shape[:2]).transpose(-2, -3)

    def _joined(self, heads: Tensor, weight: Tensor) -> Tensor:
        """sum_h heads_h W_h."""
        return heads.transpose(-2, -3).flatten(-2) @ weight.flatten(0, 1)
