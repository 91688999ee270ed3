"""The log-sum-exp potential of modern Hopfield networks: its mean is softmax attention over the keys."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import is_plain, sum_to_shape
from ._keys import KeyPotential
from .base import CovarianceMap

# Probabilities below exp(-cutoff) are set to zero in `linearize`: they are invisible at that precision, and products
# of subnormal numbers cost ten times as much on a CPU.
_CUTOFF = {torch.float32: 40.0, torch.float64: 300.0}


class LogSumExp(KeyPotential):
    """Phi(z) = (1/beta) log sum_j exp(beta <k_j, z> + bias_j), whose mean is softmax attention with values = keys.

    mean(z) = sum_j p_j k_j with p = softmax(beta K z + bias);
    covariance_product(z, v) = beta [sum_j p_j k_j <k_j, v> - mean <mean, v>].

    Args:
        keys: stored patterns, (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        mask: boolean, broadcasts to (*batch, N, M); True = the query attends to the key.
        bias: added to the scaled scores, broadcasts to (*batch, N, M); -inf masks.

    A query that attends to no key has value 0 and mean 0, with zero gradients. Keys that no query attends to are not
    read, whatever they hold.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0 (on an accelerator a tensor beta is
            not waited for: its entries <= 0 become NaN and the problems that read them report NONFINITE).

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Ramsauer et al. (2020), eq. 3, without its constant terms; a bias goes inside the exponential.
    """

    convex = True
    closed_form = True
    bias: Tensor | None
    #: Rows that attend to no key, broadcastable to (*batch, N); None where there are none by construction.
    empty: Tensor | None

    def __init__(
        self,
        keys: Float[Tensor, "*batch M D"],
        beta: float | Float[Tensor, "*#batch"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        super().__init__(keys, beta)
        if mask is not None:
            _check_mask(mask, keys)
        if bias is not None:
            _validate.check_float_tensor("bias", bias, min_ndim=1)
            _validate.check_same_kind([("keys", keys), ("bias", bias)])
            _check_pairs("bias", bias, keys)
        self.bias, self.empty = bias, None
        if mask is None and bias is None:
            return
        if bias is None:
            bias = torch.zeros((), dtype=keys.dtype, device=keys.device)
        if mask is not None:
            bias = bias.where(mask, -torch.inf)
        self.bias = bias
        attended = torch.ne(bias, -torch.inf)
        self.empty = ~attended.any(-1)
        if attended.ndim > 1 or attended.shape[-1] == keys.shape[-2]:
            used = attended.any(-2) if attended.ndim > 1 else attended
            if used.shape[-1] == keys.shape[-2] and used.ndim <= keys.ndim - 1:
                self.keys = keys.where(used[..., None], 0.0)

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        if self.bias is not None:
            target = (*z.shape[:-1], self.keys.shape[-2])
            _validate.check_broadcast("mask or bias", self.bias.shape, target, "(*batch, N, M)")

    # The three numbers, differentiable to any order.

    def value(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self._masked(self._scores(z).logsumexp(-1) / self._row_scale)

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """Softmax attention of z over the keys, (*batch, N, D) -> (*batch, N, D)."""
        if is_plain(z, *self.tensors()):
            return self._flash_mean(z)
        return self._masked_rows(einsum(self._scores(z).softmax(-1), self.keys, "... n m, ... m d -> ... n d"))

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess Phi(z) v = beta [K^T (p * K v) - mean <mean, v>], per row."""
        return self._covariance(self._scores(z).softmax(-1), v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(z)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        mean = einsum((scores - logsumexp).exp(), self.keys, "... n m, ... m d -> ... n d")
        return self._masked(logsumexp.squeeze(-1) / self._row_scale), self._masked_rows(mean)

    def probabilities(self, z: Tensor) -> Tensor:
        """softmax(beta K z + bias), (*batch, N, M); zeros for a query that attends to no key."""
        return self._masked_rows(self._scores(z).softmax(-1))

    def linearize(self, z: Tensor) -> CovarianceMap:
        scores = self._scores(z)
        shifted = scores - scores.logsumexp(-1, keepdim=True)
        p = shifted.exp().masked_fill_(shifted < -_CUTOFF[z.dtype], 0.0)
        if self.empty is not None:
            p = p.masked_fill_(self.empty[..., None], 0.0)
        mean = p @ self.keys

        def centred(u: Tensor) -> Tensor:
            return p * (u @ self.keys.mT - (mean * u).sum(-1, keepdim=True))

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            w = centred(u)
            keys = p.mT @ u + w.mT @ (self._scale * z)
            gradients: list[Tensor | None] = [sum_to_shape(keys, self.keys.shape)]
            if isinstance(self.beta, Tensor):
                by_beta = ((w @ self.keys) * z).sum((-1, -2))
                gradients.append(sum_to_shape(by_beta, self.beta.shape))
            if self.bias is not None:
                gradients.append(sum_to_shape(w, self.bias.shape))
            if self.empty is not None:
                gradients.append(None)
            return tuple(gradients)

        return CovarianceMap(lambda v: self._covariance(p, v, mean), pullback)

    # Structure.

    def lipschitz(self) -> Tensor:
        """beta diam(K)^2/4, Popoviciu's bound on the variance along any direction, (*batch)."""
        return self.beta * self.diameter().square() / 4

    def select(self, index: Tensor) -> Self:
        if self.bias is None:
            return self
        clone = self.replace(*self.tensors())
        clone.bias = _select_rows(self.bias, index, trailing=1)
        clone.empty = None if self.empty is None else _select_rows(self.empty, index, trailing=0)
        return clone

    # Parts.

    def _scores(self, z: Tensor) -> Tensor:
        scores = einsum(self._scale * z, self.keys, "... n d, ... m d -> ... n m")
        if self.bias is not None:
            scores = scores + self.bias
        if self.empty is not None:
            # A row of -inf has a NaN gradient; any finite row will do, as its results are replaced.
            scores = scores.masked_fill(self.empty[..., None], 0.0)
        return scores

    def _masked(self, per_row: Tensor) -> Tensor:
        return per_row if self.empty is None else per_row.masked_fill(self.empty, 0.0)

    def _masked_rows(self, rows: Tensor) -> Tensor:
        return rows if self.empty is None else rows.masked_fill(self.empty[..., None], 0.0)

    def _covariance(self, p: Tensor, v: Tensor, mean: Tensor | None = None) -> Tensor:
        if mean is None:
            mean = einsum(p, self.keys, "... n m, ... m d -> ... n d")
        projected = einsum(v, self.keys, "... n d, ... m d -> ... n m")
        second = einsum(p * projected, self.keys, "... n m, ... m d -> ... n d")
        return self._masked_rows(self._scale * (second - mean * (mean * v).sum(-1, keepdim=True)))

    def _flash_mean(self, z: Tensor) -> Tensor:
        """`mean` through scaled_dot_product_attention, which never stores the (N, M) scores."""
        batch = z.shape[:-2]
        query, scale = (z, self.beta) if not isinstance(self.beta, Tensor) else (self._scale * z, 1.0)
        keys = self.keys.expand(*batch, *self.keys.shape[-2:])
        bias = self.bias
        # Its fast kernels want exactly two leading axes.
        if len(batch) != 2:
            two = (math.prod(batch), 1)
            query, keys = (t.reshape(*two, *t.shape[-2:]) for t in (query, keys))
        else:
            two = batch  # type: ignore[assignment]
        if bias is not None:
            pairs = (z.shape[-2], keys.shape[-2])
            bias = bias.expand(*batch, *pairs).reshape(*two, *pairs)
        mean = F.scaled_dot_product_attention(query, keys, keys, attn_mask=bias, scale=scale)
        return self._masked_rows(mean.reshape(z.shape))


def _check_pairs(argument: str, pairs: Tensor, keys: Tensor) -> None:
    _validate.require(
        pairs.ndim >= 1 and pairs.shape[-1] in (1, keys.shape[-2]),
        argument,
        f"broadcast to (*batch, N, M) with M = {keys.shape[-2]} keys",
        f"shape {tuple(pairs.shape)}",
    )


def _check_mask(mask: Tensor, keys: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(
            _validate.message(
                "mask",
                "be a boolean tensor (True = attend)",
                getattr(mask, "dtype", type(mask).__name__),
                "pass additive masks as `bias`",
            )
        )
    _validate.check_same_kind([("keys", keys), ("mask", mask)])
    _check_pairs("mask", mask, keys)


def _select_rows(pairs: Tensor, index: Tensor, *, trailing: int) -> Tensor:
    """Rows `index` (*batch, K) of a tensor that broadcasts to (*batch, N, ...) with `trailing` axes after N."""
    axis = -1 - trailing
    if pairs.ndim < 1 + trailing or pairs.shape[axis] == 1:
        return pairs
    tail = pairs.shape[pairs.ndim - trailing :]
    rows = pairs.expand(*index.shape[:-1], *pairs.shape[axis:])
    return rows.gather(axis, index.reshape(*index.shape, *(1,) * trailing).expand(*index.shape, *tail))
