"""The log-sum-exp potential of modern Hopfield networks: its mean is softmax attention over the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import is_plain, sum_to_shape
from ._keys import KeyPotential, check_mask, check_pairs
from .base import CovarianceMap

# Probabilities below exp(-cutoff) are set to zero in `linearize`: they are invisible at that precision, and products
# of subnormal numbers cost ten times as much on a CPU.
_CUTOFF = {torch.float32: 40.0, torch.float64: 300.0}


# With fewer keys than a vector register holds numbers, torch's CPU kernel turns a query of NaN into an answer of zeros.
_FLASH_KEYS = 64
# The kernel behind scaled_dot_product_attention on a CPU, which also returns the log-sum-exp that the energy needs. A
# torch without it pays for the scores instead.
_flash_with_logsumexp = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def _sdpa(*arguments: Tensor, **options: Any) -> tuple[Tensor]:
    return (F.scaled_dot_product_attention(*arguments, **options),)  # type: ignore[arg-type]


class LogSumExp(KeyPotential):
    """Phi(z) = (1/beta) log sum_j exp(beta <k_j, z> + bias_j), whose mean is softmax attention with values = keys.

    mean(z) = sum_j p_j k_j with p = softmax(beta K z + bias);
    covariance_product(z, v) = beta [sum_j p_j k_j <k_j, v> - mean <mean, v>].

    Args:
        keys: stored patterns, (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        mask: boolean, broadcasts to (*batch, N, M); True = the query attends to the key.
        bias: added to the scaled scores, broadcasts to (*batch, N, M); -inf masks.

    A query that attends to no key has value 0 and mean 0, with zero gradients. What a masked key holds, a NaN too, does
    not reach the queries that do not attend to it.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0 (on an accelerator a tensor beta is
            not waited for: its entries <= 0 become NaN and the problems that read them report NONFINITE).

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Ramsauer et al. (2020), eq. 3, without its constant terms; a bias goes inside the exponential.
    """

    convex = True
    declares_all = True

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
            check_mask(mask, keys)
        if bias is not None:
            _validate.check_float_tensor("bias", bias, min_ndim=1)
            _validate.check_same_kind([("keys", keys), ("bias", bias)])
            check_pairs("bias", bias, keys)
        self.mask = mask
        self.bias = bias

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        for name, pairs in (("mask", self.mask), ("bias", self.bias)):
            if pairs is not None:
                _validate.check_broadcast(name, pairs.shape, (*z.shape[:-1], self.keys.shape[-2]), "(*batch, N, M)")

    # The three numbers, differentiable to any order.

    def value(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        read = self._read()
        return read.finish(self._scores(z, read).logsumexp(-1) / self._row_scale)

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """Softmax attention of z over the keys, (*batch, N, D) -> (*batch, N, D)."""
        read = self._read()
        if self._may_flash(z):
            return read.finish(self._flash(z, read, _sdpa)[0], rows=True)
        p = self._scores(z, read).softmax(-1)
        return read.finish(einsum(p, read.keys, "... n m, ... m d -> ... n d"), rows=True)

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess Phi(z) v = beta [K^T (p * K v) - mean <mean, v>], per row."""
        read = self._read()
        p = self._scores(z, read).softmax(-1)
        mean = einsum(p, read.keys, "... n m, ... m d -> ... n d")
        projected = einsum(v, read.keys, "... n d, ... m d -> ... n m")
        second = einsum(p * projected, read.keys, "... n m, ... m d -> ... n d")
        return read.finish(self._scale * (second - mean * (mean * v).sum(-1, keepdim=True)), rows=True)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        read = self._read()
        if z.device.type == "cpu" and _flash_with_logsumexp is not None and self._may_flash(z):
            mean, logsumexp = self._flash(z, read, _flash_with_logsumexp)
            return read.finish(logsumexp / self._row_scale), read.finish(mean, rows=True)
        scores = self._scores(z, read)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        mean = einsum((scores - logsumexp).exp(), read.keys, "... n m, ... m d -> ... n d")
        return read.finish(logsumexp.squeeze(-1) / self._row_scale), read.finish(mean, rows=True)

    def probabilities(self, z: Tensor) -> Tensor:
        """softmax(beta K z + bias), (*batch, N, M); zeros for a query that attends to no key."""
        read = self._read()
        return read.finish(self._scores(z, read).softmax(-1), rows=True)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._has_only("keys", "beta", "mask", "bias"):
            return None
        read = self._read()
        scores = self._scores(z, read)
        cutoff = _CUTOFF[z.dtype]
        shifted = (scores - scores.logsumexp(-1, keepdim=True)).clamp_(min=-cutoff)
        p = read.zero_empty(shifted.exp().masked_fill_(shifted <= -cutoff, 0.0), rows=True)
        mean = p @ read.keys

        def product(v: Tensor) -> Tensor:
            weighted = (v @ read.keys.mT).mul_(p) @ read.keys
            return self._scale * weighted.addcmul_(mean, (mean * v).sum(-1, keepdim=True), value=-1.0)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            centred = (u @ read.keys.mT).sub_((mean * u).sum(-1, keepdim=True)).mul_(p)
            gradients: list[Tensor | None] = [
                sum_to_shape(p.mT @ u + centred.mT @ (self._scale * z), self.keys.shape),
            ]
            if isinstance(self.beta, Tensor):
                by_beta = ((centred @ read.keys) * z).sum((-1, -2))
                gradients.append(sum_to_shape(by_beta, self.beta.shape))
            if self.mask is not None:
                gradients.append(None)
            if self.bias is not None:
                gradients.append(sum_to_shape(centred, self.bias.shape))
            return tuple(gradients)

        return CovarianceMap(product, pullback)

    # Structure.

    def lipschitz(self) -> Tensor:
        """beta diam(K)^2/4, Popoviciu's bound on the variance along any direction, (*batch)."""
        return self.beta * self.diameter().square() / 4

    def select(self, index: Tensor) -> Self | None:
        if not self._has_only("keys", "beta", "mask", "bias"):
            return None
        if self.mask is None and self.bias is None:
            return self
        clone = self.replace(*self.tensors())
        clone.mask = None if self.mask is None else _select_rows(self.mask, index)
        clone.bias = None if self.bias is None else _select_rows(self.bias, index)
        return clone

    # Parts.

    def _read(self) -> _Read:
        """What the mask leaves to be read."""
        keys, mask, bias = self.keys, self.mask, self.bias
        if mask is None and bias is None:
            return _Read(keys, None, None, None)
        if bias is not None and mask is not None:
            bias = bias.where(mask, -torch.inf)
        attended = torch.ne(bias, -torch.inf) if bias is not None else mask
        assert attended is not None
        # A key may hold NaN for those who do not attend to it. 0 * NaN is NaN, so it is read as zero, and the queries
        # that do attend to it are told apart by a product that costs one number per pair.
        finite = torch.isfinite(keys).all(-1, keepdim=True)
        count = keys.shape[-2]
        reads = attended.expand(*attended.shape[:-1], count).to(keys.dtype)
        reads = reads if reads.ndim > 1 else reads[None]
        poison = torch.where(reads @ (~finite).to(keys.dtype) > 0, torch.nan, 0.0).squeeze(-1)
        pairs = bias if bias is not None else mask
        return _Read(keys.where(finite, 0.0), pairs, ~attended.any(-1), poison.to(keys.dtype))

    def _scores(self, z: Tensor, read: _Read) -> Tensor:
        scores = einsum(self._scale * z, read.keys, "... n d, ... m d -> ... n m")
        if read.pairs is not None:
            boolean = read.pairs.dtype == torch.bool
            scores = scores.masked_fill(~read.pairs, -torch.inf) if boolean else scores + read.pairs
        # A row of -inf has a NaN gradient; any finite row will do, as its results are replaced.
        return read.zero_empty(scores, rows=True)

    def _may_flash(self, z: Tensor) -> bool:
        return z.numel() > 0 and self.keys.shape[-2] >= _FLASH_KEYS and is_plain(z, *self.tensors())

    def _flash(self, z: Tensor, read: _Read, kernel: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The kernel's outputs for queries z, in z's leading axes; it never stores the (N, M) scores."""
        batch = z.shape[:-2]
        query, scale = (z, self.beta) if not isinstance(self.beta, Tensor) else (self._scale * z, 1.0)
        keys = read.keys.expand(*batch, *read.keys.shape[-2:])
        # Its fast kernels want exactly two leading axes.
        two = batch if len(batch) == 2 else torch.Size((math.prod(batch), 1))
        query, keys = (t.reshape(*two, *t.shape[-2:]).contiguous() for t in (query, keys))
        pairs = read.pairs
        if pairs is not None:
            shape = (z.shape[-2], keys.shape[-2])
            if pairs.dtype == torch.bool:
                pairs = torch.zeros((), dtype=z.dtype, device=z.device).where(pairs, -torch.inf)
            pairs = pairs.expand(*batch, *shape).reshape(*two, *shape)
        outputs = kernel(query, keys, keys, attn_mask=pairs, scale=scale)
        return tuple(out.reshape(*batch, *out.shape[2:]) for out in outputs)


class _Read(NamedTuple):
    """What is read: keys, mask or bias of the pairs, which rows (*batch, N) attend to nothing, and which to a NaN."""

    keys: Tensor
    pairs: Tensor | None
    empty: Tensor | None
    poison: Tensor | None

    def zero_empty(self, values: Tensor, *, rows: bool = False) -> Tensor:
        """0 for the queries that attend to no key; `rows` if a query has more than one number."""
        if self.empty is None:
            return values
        return values.masked_fill(self.empty[..., None] if rows else self.empty, 0.0)

    def finish(self, values: Tensor, *, rows: bool = False) -> Tensor:
        """`zero_empty`, and NaN for the queries that attend to a key which is not finite."""
        values = self.zero_empty(values, rows=rows)
        if self.poison is None:
            return values
        return values + (self.poison[..., None] if rows else self.poison)


def _select_rows(pairs: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (*batch, K) of a tensor that broadcasts to (*batch, N, M)."""
    if pairs.ndim < 2 or pairs.shape[-2] == 1:
        return pairs
    rows = pairs.expand(*index.shape[:-1], *pairs.shape[-2:])
    return rows.gather(-2, index[..., None].expand(*index.shape, pairs.shape[-1]))
