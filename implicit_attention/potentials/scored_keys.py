"""Log-sum-exp over keys: attention weights, and the read-out of other values than the keys by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from .._torch import exact_precision, host_may_look, is_differentiated, is_plain, transforms_active
from ._attention import (
    FLASH_KEYS,
    attend,
    by_attention,
    differentiable,
    has_kernel,
    loses_nan,
    sdpa,
    with_logsumexp,
)
from ._read import surely_finite
from ._shapes import Bias, Keys, Mask, PerBatch, PerRow, ReadOut, States, Values, Weights
from .masked_keys import MaskedKeys, Read


class ScoredKeys(MaskedKeys):
    """Base of Phi(z) = (1/beta) log sum_j exp(c(s_j) + bias_j) with the scores s_j = beta <k_j, z>.

    The softmax p of c(s) + bias are the attention weights. The function c is `_shaped` (the identity by default). A
    family defines `mean`, `covariance_product` and its other closed forms; the methods of this class hold for every
    family. The arguments are those of `MaskedKeys`.
    """

    _attributes = (*MaskedKeys._attributes, "_dense")
    select = MaskedKeys.select
    row_block = MaskedKeys.row_block

    def __init_subclass__(cls, **options: Any) -> None:
        if ScoredKeys in cls.__bases__:
            # These methods hold for every family, whatever it overrides, but not for subclasses of a family.
            for name in ("value", "probabilities", "readout", "readout_with_logsumexp", "select", "row_block"):
                if name not in vars(cls):
                    setattr(cls, name, vars(ScoredKeys)[name])
        super().__init_subclass__(**options)

    def __init__(self, keys: Keys, beta: PerBatch, *, mask: Mask = None, bias: Bias = None) -> None:
        super().__init__(keys, beta, mask=mask, bias=bias)
        # Whether products are written out, without torch's fused kernels.
        self._dense = False

    def written_out(self) -> Self:
        """Return the potential with every product written out, as a reference."""
        clone = self.replace(*self.tensors())
        clone._dense = True
        return clone

    def value(self, z: States) -> PerRow:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        read = self._read(z, fused=True)
        return read.finish(self._scores(z, read).logsumexp(-1)) / self._row_scale

    def probabilities(self, z: States) -> Weights:
        """The attention weights softmax(c(s) + bias), (*batch, N, M); zeros for a query that attends to no key."""
        read = self._read(z)
        return read.finish(self._scores(z, read).softmax(-1), rows=True)

    def readout(self, z: States, values: Values, *, dropout_p: float = 0.0) -> ReadOut:
        """Attention of z over the keys, read out in other values than the keys themselves: probabilities(z) V.

        Args:
            z: queries or states, (*batch, N, D).
            values: one for each key, (*batch, M, E); leading axes broadcast to those of z, as the keys' do.
            dropout_p: the share of the attention weights that is set to zero at random, in [0, 1]. It is always
                applied: the caller decides whether the model is training.

        Returns:
            (*batch, N, E); zeros for a query that attends to no key, NaN for one that attends to a key that is masked
            for others and is not finite, or whose value is not. A query whose biases are all so low that its scores are
            lost beside them (finfo.min) reads the mean of the values.

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
        few = dropout_p == 0 and not tracked and self._fits_few(z)
        fused = few or (not self._dense and (dropout_p > 0 or (self._fits_kernels(z) and not tracked)))
        if not fused and torch.finfo(z.dtype).bits < 32:
            return self._single().readout(z.float(), values.float(), dropout_p=dropout_p).to(z.dtype)
        with exact_precision(z):
            read, zeros = self._read(z, values, fused=fused).for_kernels()
            z = z if zeros is None else z.masked_fill(zeros, 0.0)
            if not fused:
                weights = F.dropout(self._scores(z, read).softmax(-1), dropout_p)
                return read.finish(read.fold.product(weights, read.values), rows=True)
            if few:
                return self._flash_few(z, read)
            kernel = partial(sdpa, dropout_p=dropout_p) if dropout_p > 0 else differentiable
            return read.finish(self._flash(z, read, kernel)[0], rows=True)

    def readout_with_logsumexp(self, z: States, values: Values) -> tuple[ReadOut, PerRow]:
        """`readout`, and log sum_j exp(c(s_j) + bias_j), -inf for a query that attends to no key.

        Outputs o_i over different sets of keys with log-sum-exps l_i merge to the output over all of them,
        sum_i softmax_i(l) o_i, whose log-sum-exp is that of the l_i. Gradients store the (N, M) weights.
        """
        self._check_readout(z, values, 0.0)
        if torch.finfo(z.dtype).bits < 32:
            out, logsumexp = self._single().readout_with_logsumexp(z.float(), values.float())
            return out.to(z.dtype), logsumexp.to(z.dtype)
        with exact_precision(z):
            read = self._read(z, values, fused=True)
            out, logsumexp = self._attended(z, read)
            return read.finish(out, rows=True), read.finish(logsumexp, empty=-torch.inf)

    # Parts.

    def _shaped(self, scores: Tensor) -> Tensor:
        """c(s), the scores as they enter the exponential."""
        return scores

    def _single(self) -> Self:
        """The same in float32."""
        return self.replace(*(t.float() if t.is_floating_point() else t for t in self.tensors()))

    def _scores(self, z: Tensor, read: Read) -> Tensor:
        return read.restricted(self._shaped(self._products(z, read)))

    def _average(self, z: Tensor, read: Read) -> Tensor:
        """Return softmax(scores) V, in the layout of `read`."""
        if self._may_flash(z, read.values):
            return self._flash(z, read, sdpa)[0]
        return read.fold.product(self._scores(z, read).softmax(-1), read.values)

    def _attended(self, z: Tensor, read: Read) -> tuple[Tensor, Tensor]:
        """Return softmax(scores) V and the log-sum-exp of the scores, from one evaluation."""
        if self._has_kernel(z) and self._may_flash(z, read.values):
            run = partial(self._flash, z, read, with_logsumexp)
            causal = read.first is not None
            outputs = by_attention(read.keys, run, mask=read.pairs is not None, causal=causal)
            if outputs is not None:
                return outputs[0], outputs[1]
        scores = self._scores(z, read)
        return read.fold.product(scores.softmax(-1), read.values), scores.logsumexp(-1)

    def _may_flash(self, z: Tensor, *values: Tensor) -> bool:
        return self._fits_kernels(z) and is_plain(z, *values, *self.tensors())

    def _has_kernel(self, z: Tensor) -> bool:
        """Whether a kernel of torch returns the log-sum-exp, too, of states like z."""
        return has_kernel(z.device.type, z.dtype)

    def _fits_kernels(self, z: Tensor) -> bool:
        return self._is_softmax() and z.numel() > 0 and self.keys.shape[-2] >= FLASH_KEYS

    def _is_softmax(self) -> bool:
        """Whether the weights are a softmax, which fused kernels compute, and may be left to them."""
        return not self._dense and type(self)._shaped is ScoredKeys._shaped

    def _fits_few(self, z: Tensor) -> bool:
        """Whether a kernel may read out few keys: it may lose a NaN, for which one has to look."""
        few = self._is_softmax() and z.numel() > 0 and self.keys.shape[-2] < FLASH_KEYS
        # On a card nothing is widened, and the device looks.
        return few and (host_may_look(z, self.keys) if torch.finfo(z.dtype).bits >= 32 else z.is_cuda)

    def _flash_few(self, z: Tensor, read: Read) -> Tensor:
        """Return the read-out of few keys, NaN for states that are not finite and for states that read such a key."""
        lost = None if surely_finite(z) else ~torch.isfinite(z).all(-1, keepdim=True)
        out = read.finish(
            self._flash(z if lost is None else z.masked_fill(lost, 0.0), read, differentiable)[0], rows=True
        )
        if read.pairs is None and read.first is None and loses_nan(self.keys) and not surely_finite(self.keys):
            whole = torch.isfinite(self.keys).all((-1, -2), keepdim=True)
            out = out.where(whole, torch.nan)
        return out if lost is None else out.masked_fill(lost, torch.nan)

    def _flash(self, z: Tensor, read: Read, kernel: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the kernel's outputs for queries z, in the layout of `read`; it never stores the (N, M) scores."""
        query, scale = (z, self.beta) if not isinstance(self.beta, Tensor) else (self._scale * z, 1.0)
        return attend(kernel, read.fold, read.fold.moved(query), read.keys, read.values, read.pairs, scale, read.first)


class ReadsOut(ABC):
    """A potential whose mean is attention: with weights, and a read-out of other values than the keys.

    `isinstance` and `issubclass` look for the two methods; nothing needs to inherit from this.

    Not for a base class: subclass `Potential`.

    Examples:
        >>> from implicit_attention import LogSumExp, SquaredScores
        >>> from implicit_attention.potentials import ReadsOut
        >>> issubclass(LogSumExp, ReadsOut), issubclass(SquaredScores, ReadsOut)
        (True, False)
    """

    @abstractmethod
    def probabilities(self, z: Tensor) -> Tensor:
        """The attention weights of z over the keys, (*batch, N, D) -> (*batch, N, M)."""

    @abstractmethod
    def readout(self, z: Tensor, values: Tensor, *, dropout_p: float = 0.0) -> Tensor:
        """probabilities(z) V for one value (*batch, M, E) per key, a part of the weights dropped."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        # A subclass that overrides what these were derived from may say that it has none.
        return all(getattr(other, name, None) is not None for name in ("probabilities", "readout"))
