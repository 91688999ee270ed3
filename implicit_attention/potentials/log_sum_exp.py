"""The log-sum-exp potential of modern Hopfield networks: its mean is softmax attention over the keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import exact_precision, is_differentiated, is_plain, sum_to_shape, transforms_active
from ..ops.attention import FLASH_KEYS, attend, differentiable, flash_with_logsumexp, has_kernel, sdpa
from ..ops.dispatch import by_attention
from ..ops.fold import Fold, row_block
from ..ops.problem import common
from ._keys import KeyPotential, check_mask, check_pairs
from ._read import Read, surely_finite, without_nan
from .base import CovarianceMap

# Probabilities below exp(-cutoff) are set to zero in `linearize`: they are invisible at that precision, and products
# of subnormal numbers cost ten times as much on a CPU.
_CUTOFF = {torch.float32: 40.0, torch.float64: 300.0}
# The attributes of a `LogSumExp`.
_HELD = ("keys", "beta", "mask", "bias", "_dense")


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
        # Whether every product is written out, without torch's fused kernels.
        self._dense = False

    def written_out(self) -> Self:
        """The same potential with every product written out, to compare with."""
        clone = self.replace(*self.tensors())
        clone._dense = True
        return clone

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        for name, pairs in (("mask", self.mask), ("bias", self.bias)):
            if pairs is not None:
                _validate.check_broadcast(name, pairs.shape, (*z.shape[:-1], self.keys.shape[-2]), "(*batch, N, M)")

    # The three numbers, differentiable to any order.

    def value(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        read = self._read(z)
        return read.finish(self._scores(z, read).logsumexp(-1)) / self._row_scale

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """Softmax attention of z over the keys, (*batch, N, D) -> (*batch, N, D)."""
        read = self._read(z)
        if self._may_flash(z):
            return read.finish(self._flash(z, read, sdpa)[0], rows=True)
        return read.finish(read.fold.product(self._scores(z, read).softmax(-1), read.keys), rows=True)

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess Phi(z) v = beta sum_j p_j (k_j - mean) <k_j - mean, v>, per row."""
        read = self._centred(self._read(z))
        fold, keys, v = read.fold, read.keys, read.fold.moved(v)
        p = self._scores(z, read).softmax(-1)
        mean = fold.product(p, keys)
        # Both sides are centred: where one key has all the weight, little is left of numbers that cancel.
        weighted = p * (fold.product(v, keys.mT) - (mean * v).sum(-1, keepdim=True))
        spread = fold.product(weighted, keys) - mean * weighted.sum(-1, keepdim=True)
        return self._scale * read.finish(spread, rows=True)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        read = self._read(z)
        found = None
        if z.device.type == "cpu" and has_kernel("cpu") and self._may_flash(z):
            run = partial(self._flash, z, read, flash_with_logsumexp)
            found = by_attention("auto", read.keys, run, mask=read.pairs is not None)
        if found is not None:
            mean, logsumexp = found
        else:
            scores = self._scores(z, read)
            mean, logsumexp = read.fold.product(scores.softmax(-1), read.keys), scores.logsumexp(-1)
        return read.finish(logsumexp) / self._row_scale, read.finish(mean, rows=True)

    def probabilities(self, z: Tensor) -> Tensor:
        """softmax(beta K z + bias), (*batch, N, M); zeros for a query that attends to no key."""
        read = self._read(z)
        return read.finish(self._scores(z, read).softmax(-1), rows=True)

    def readout(
        self, z: Float[Tensor, "*batch N D"], values: Float[Tensor, "*#batch M E"], *, dropout_p: float = 0.0
    ) -> Float[Tensor, "*batch N E"]:
        """Softmax attention of z over the keys, read out in other values than the keys themselves.

        readout(z, V) = softmax(beta K z + bias) V, so that mean(z) = readout(z, keys).

        Args:
            z: queries or states, (*batch, N, D).
            values: one for each key, (*batch, M, E); leading axes broadcast to those of z, as the keys' do.
            dropout_p: the part of the attention weights that is set to zero at random, in [0, 1]. It is always
                applied: whoever calls knows whether the model is training.

        Returns:
            (*batch, N, E); zeros for a query that attends to no key, NaN for one that attends to a key that is masked
            for others and is not finite, or whose value is not. A query whose biases are all so low that its scores are
            lost beside them (finfo.min) reads the mean of the values, whatever it is.

        Raises:
            TypeError, ValueError: shapes, dtypes or devices that do not fit; dropout_p outside [0, 1].

        Gradients: with respect to z, values, keys, beta and bias, to any order; with dropout_p > 0 to the orders that
        torch has. With 64 keys or more, neither the result nor its first gradients store the (N, M) weights, unless the
        bias itself requires grad.

        Reference: Vaswani et al. (2017), eq. 1, with 1/sqrt(D) as beta. Half precision goes as it is to torch's fused
        kernels, and is multiplied in float32 otherwise; autocast does not change the precision.
        """
        self._check_readout(z, values, dropout_p)
        # The kernels have no derivative with respect to the bias, and none that torch.func could take.
        tracked = transforms_active() or (self.bias is not None and is_differentiated(self.bias))
        fused = not self._dense and (dropout_p > 0 or (self._fits_kernels(z) and not tracked))
        if not fused and torch.finfo(z.dtype).bits < 32:
            wide = self.replace(*(t.float() if t.is_floating_point() else t for t in self.tensors()))
            return wide.readout(z.float(), values.float(), dropout_p=dropout_p).to(z.dtype)
        with exact_precision(z):
            read, zeros = self._read(z, values).settled()
            z = z if zeros is None else z.masked_fill(zeros, 0.0)
            if not fused:
                weights = F.dropout(self._scores(z, read).softmax(-1), dropout_p)
                return read.finish(read.fold.product(weights, read.values), rows=True)
            kernel = partial(sdpa, dropout_p=dropout_p) if dropout_p > 0 else differentiable
            return read.finish(self._flash(z, read, kernel)[0], rows=True)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._is_own():
            return None
        read = self._centred(self._read(z))
        fold, keys = read.fold, read.keys
        cutoff = _CUTOFF[z.dtype]
        shifted = self._scores(z, read).log_softmax(-1).clamp_(min=-cutoff)
        p = read.zero_empty(shifted.exp().masked_fill_(shifted <= -cutoff, 0.0), rows=True)
        mean = fold.product(p, keys)

        def product(v: Tensor) -> Tensor:
            v = fold.moved(v)
            weighted = fold.product(v, keys.mT).sub_((mean * v).sum(-1, keepdim=True)).mul_(p)
            spread = fold.product(weighted, keys)
            return self._scale * fold.restored(spread.addcmul_(mean, weighted.sum(-1, keepdim=True), value=-1.0))

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            u = fold.moved(u)
            centred = fold.product(u, keys.mT).sub_((mean * u).sum(-1, keepdim=True)).mul_(p)
            rows, scaled = fold.rows, fold.moved(self._scale * z)
            by_keys = rows(p).mT @ rows(u) + rows(centred).mT @ rows(scaled)
            gradients: list[Tensor | None] = [by_keys.reshape(self.keys.shape)]
            if isinstance(self.beta, Tensor):
                by_beta = (fold.restored(fold.product(centred, keys)) * z).sum((-1, -2))
                gradients.append(sum_to_shape(by_beta, self.beta.shape))
            if self.mask is not None:
                gradients.append(None)
            if self.bias is not None:
                gradients.append(sum_to_shape(fold.restored(centred), self.bias.shape))
            return tuple(gradients)

        return CovarianceMap(product, pullback)

    # Structure.

    @property
    def row_block(self) -> int:  # type: ignore[override]
        keys = self.keys
        return row_block(keys.shape[-1], keys.shape[-2], keys.dtype) if keys.device.type == "cpu" else super().row_block

    def bounded_below(self, scale: float) -> bool:
        """Always: Phi grows no faster than |z| times the longest key."""
        return True

    def lipschitz(self) -> Tensor:
        """beta diam(K)^2/4, Popoviciu's bound on the variance along any direction, (*batch)."""
        return self.beta * self.diameter().square() / 4

    def select(self, index: Tensor) -> Self | None:
        if not self._has_only(*_HELD):
            return None
        if self.mask is None and self.bias is None:
            return self
        clone = self.replace(*self.tensors())
        clone.mask = None if self.mask is None else _select_rows(self.mask, index)
        clone.bias = None if self.bias is None else _select_rows(self.bias, index)
        return clone

    # Parts.

    def _is_own(self) -> bool:
        """Whether what is written out for this class is what the object computes: a subclass may compute otherwise."""
        return type(self) is LogSumExp and self._has_only(*_HELD)

    def _check_readout(self, z: Tensor, values: Tensor, dropout_p: float) -> None:
        self.check_state("z", z)
        _validate.check_float_tensor("values", values, min_ndim=2)
        _validate.check_same_kind([("keys", self.keys), ("values", values)])
        if values.shape[-2] != self.keys.shape[-2]:
            required = f"have one row for each of the {self.keys.shape[-2]} keys, shape (*batch, M, E)"
            raise ValueError(_validate.message("values", required, f"shape {tuple(values.shape)}"))
        _validate.check_broadcast("values", values.shape[:-2], z.shape[:-2], "the leading axes of `z`")
        _validate.check_number("dropout_p", dropout_p, low=0.0, high=1.0, remedy="0 drops nothing")

    def _read(self, z: Tensor, values: Tensor | None = None) -> Read:
        """What the mask leaves to be read by states of z's shape."""
        held = [self.keys] if values is None else [self.keys, values]
        fold = Fold(z.shape[:-2], *(t.shape[:-2] for t in held))
        held = [fold.moved(t) for t in held]
        mask = None if self.mask is None else fold.moved(self.mask)
        bias = None if self.bias is None else fold.moved(self.bias)
        empty = poison = None
        if mask is not None or bias is not None:
            if bias is not None and mask is not None:
                bias = bias.where(mask, -torch.inf)
            attended = torch.ne(bias, -torch.inf) if bias is not None else mask
            assert attended is not None
            empty = ~attended.any(-1)
            if not surely_finite(*held):
                held, poison = without_nan(held, attended, z.dtype)
        held = [fold.rows(t) for t in held]
        return Read(fold, held[0], held[-1], mask if bias is None else bias, empty, poison)

    @staticmethod
    def _centred(read: Read) -> Read:
        """The same for weights and covariances, which do not change when all keys are shifted, but their rounding."""
        attended = None
        if read.pairs is not None:
            pairs = read.pairs if read.pairs.dtype == torch.bool else torch.ne(read.pairs, -torch.inf)
            rows = tuple(range(read.fold.kept, pairs.ndim - 1))
            attended = (pairs.any(rows) if rows else pairs).expand(*pairs.shape[: read.fold.kept], read.keys.shape[-2])
        return read._replace(keys=read.keys - common(read.keys, attended))

    def _products(self, z: Tensor, read: Read) -> Tensor:
        return read.fold.product(read.fold.moved(self._scale * z), read.keys.mT)

    def _scores(self, z: Tensor, read: Read) -> Tensor:
        return self._paired(self._products(z, read), read)

    @staticmethod
    def _paired(scores: Tensor, read: Read) -> Tensor:
        """Scores with the bias, and -inf where the mask says so."""
        if read.pairs is not None:
            boolean = read.pairs.dtype == torch.bool
            scores = scores.masked_fill(~read.pairs, -torch.inf) if boolean else scores + read.pairs
        # A row of -inf has a NaN gradient; any finite row will do, as its results are replaced.
        return read.zero_empty(scores, rows=True)

    def _may_flash(self, z: Tensor) -> bool:
        return self._fits_kernels(z) and is_plain(z, *self.tensors())

    def _fits_kernels(self, z: Tensor) -> bool:
        return not self._dense and z.numel() > 0 and self.keys.shape[-2] >= FLASH_KEYS

    def _flash(self, z: Tensor, read: Read, kernel: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The kernel's outputs for queries z, in the layout of `read`; it never stores the (N, M) scores."""
        query, scale = (z, self.beta) if not isinstance(self.beta, Tensor) else (self._scale * z, 1.0)
        return attend(kernel, read.fold, read.fold.moved(query), read.keys, read.values, read.pairs, scale)


def _select_rows(pairs: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (*batch, K) of a tensor that broadcasts to (*batch, N, M)."""
    if pairs.ndim < 2 or pairs.shape[-2] == 1:
        return pairs
    if all(stride == 0 or size == 1 for stride, size in zip(index.stride()[:-1], index.shape[:-1], strict=True)):
        # The same rows everywhere: pairs stay as small as they are.
        return pairs[..., index.reshape(-1, index.shape[-1])[0], :] if index.numel() else pairs[..., :0, :]
    rows = pairs.expand(*index.shape[:-1], *pairs.shape[-2:])
    return rows.gather(-2, index[..., None].expand(*index.shape, pairs.shape[-1]))
