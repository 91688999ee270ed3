"""The log-sum-exp potential of modern Hopfield networks: its mean is softmax attention over the keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from ._shapes import Bias, Keys, Mask, PerBatch, PerRow, States
from .base import Composite, CovarianceMap, Potential
from .masked_keys import in_blocks
from .scored_keys import ScoredKeys

# Probabilities below exp(-cutoff) are set to zero in `linearize`: they do not show at that precision, and products of
# subnormal numbers cost ten times as much on a CPU.
CUTOFF = {torch.float32: 40.0, torch.float64: 300.0}


class LogSumExp(ScoredKeys):
    r"""The potential whose mean is softmax attention with values = keys.

    ```math
    \begin{align*}
    \Phi(z) &= \frac1\beta \log \sum_j e^{\beta \langle k_j, z \rangle + \text{bias}_j} \\
    \nabla\Phi(z) &= \sum_j p_j\, k_j, \qquad p = \operatorname{softmax}(\beta K z + \text{bias}) \\
    \nabla^2\Phi(z)\, v &= \beta \left[ \sum_j p_j\, k_j \langle k_j, v \rangle
    - \nabla\Phi(z)\, \langle \nabla\Phi(z), v \rangle \right]
    \end{align*}
    ```

    These are `value`, `mean` and `covariance_product`.

    Args:
        keys: stored patterns, (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        mask: boolean, broadcasts to (*batch, N, M); True = the query attends to the key.
        bias: added to the scaled scores, broadcasts to (*batch, N, M); -inf masks.
        query_offset: >= 0, the index of the first query among the keys, where the queries are (a part of) the same
            sequence and query i attends to keys up to query_offset + i. No mask is written for that; beside a mask or
            bias it is refused. None: every query attends to every key.

    A query that attends to no key has value 0 and mean 0, with zero gradients. A masked key, also one of NaN, does not
    reach the queries that do not attend to it.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0 (on an accelerator a tensor beta is
            not waited for: its entries <= 0 become NaN and the problems that read them report NONFINITE).

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Ramsauer et al. (2020), eq. 3, without its constant terms; a bias goes inside the exponential.

    Not for queries that are to attend to nothing where no key fits: use `Softmax1`. Not for tokens that move together:
    use `SelfAttention`.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> phi = LogSumExp(keys=torch.eye(3), beta=8.0)
        >>> phi.mean(torch.tensor([[0.9, 0.1, 0.0]])).round(decimals=3)
        tensor([[0.9980, 0.0020, 0.0010]])
        >>> phi.readout(torch.eye(3), values=torch.arange(6.0).view(3, 2)).shape
        torch.Size([3, 2])
    """

    _attributes = (*ScoredKeys._attributes, "query_offset")
    convex = True
    declares_all = True

    def __init__(
        self,
        keys: Keys,
        beta: PerBatch,
        *,
        mask: Mask = None,
        bias: Bias = None,
        query_offset: int | None = None,
    ) -> None:
        super().__init__(keys, beta, mask=mask, bias=bias)
        if query_offset is not None:
            query_offset = _validate.check_offset("query_offset", query_offset)
            required, remedy = "be None beside a mask or a bias", "put the triangle into the mask"
            _validate.require(mask is None and bias is None, "query_offset", required, query_offset, remedy)
        self.query_offset = query_offset

    # The three numbers, differentiable to any order; `value` is that of `ScoredKeys`.

    @in_blocks
    def mean(self, z: States) -> States:
        """Softmax attention of z over the keys, (*batch, N, D) -> (*batch, N, D)."""
        read = self._read(z, fused=True)
        return read.finish(self._average(z, read), rows=True)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(z) v = beta sum_j p_j (k_j - mean) <k_j - mean, v>, per row."""
        read = self._read(z).centred()
        fold, keys, v = read.fold, read.keys, read.fold.moved(v)
        p = self._scores(z, read).softmax(-1)
        mean = fold.product(p, keys)
        # Both sides are centred: where one key has all the weight, little is left of numbers that cancel.
        weighted = p * (fold.product(v, keys.mT) - (mean * v).sum(-1, keepdim=True))
        spread = fold.product(weighted, keys) - mean * weighted.sum(-1, keepdim=True)
        return self._scale * read.finish(spread, rows=True)

    @in_blocks
    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        read = self._read(z, fused=True)
        mean, logsumexp = self._attended(z, read)
        return read.finish(logsumexp) / self._row_scale, read.finish(mean, rows=True)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._is_own():
            return None
        read = self._read(z).centred()
        fold, keys = read.fold, read.keys
        cutoff = CUTOFF[z.dtype]
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
            weighted = fold.product(u, keys.mT).sub_((mean * u).sum(-1, keepdim=True)).mul_(p)
            return self._by_tensors(z, read, u, p, weighted)

        return CovarianceMap(product, pullback)

    def bounded_below(self, scale: float) -> bool:
        """Always: Phi grows no faster than |z| times the length of the longest key."""
        return True

    def lipschitz(self) -> Tensor:
        """beta diam(K)^2/4, Popoviciu's bound on the variance along any direction, (*batch)."""
        return self.beta * self.diameter().square() / 4

    def _blocks(self, z: Tensor) -> tuple[int, Iterator[tuple[Self, Tensor]]] | None:
        # Torch's kernels store no scores.
        return None if self._has_kernel(z) else super()._blocks(z)

    def _is_own(self) -> bool:
        """Whether the closed forms of this class hold for the object: a subclass may compute something else."""
        return type(self) is LogSumExp and tuple(vars(self)) == self._attributes


class OverLogSumExp(Composite):
    """Base of potentials that `LogSumExp` computes, over keys and biases that are derived from those of the one part.

    They share the kernels and fused solves of `LogSumExp`.
    """

    parts: tuple[LogSumExp]

    def whole(self) -> LogSumExp:
        """The `LogSumExp` that computes this potential."""
        return self.parts[0]

    def loses_digits(self) -> bool:
        """Whether the precision of the keys is too low for `whole()`, so that evaluations use a higher one."""
        return False

    def _whole_at(self, z: Tensor) -> tuple[LogSumExp, Tensor]:
        """`whole()`, and the states z, in the precision in which they are evaluated."""
        return self.whole(), z

    def own_gradients(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors of this potential from those of `whole()`."""
        return gradients

    def written_out(self) -> Self:
        """Return the potential with every product written out, as a reference."""
        clone = self.replace(*self.tensors())
        clone.parts = (self.parts[0].written_out(),)
        return clone

    def value(self, z: States) -> PerRow:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        whole, read = self._whole_at(z)
        return whole.value(read).to(z.dtype)

    def mean(self, z: States) -> States:
        """sum_j p_j k_j, (*batch, N, D) -> (*batch, N, D)."""
        whole, read = self._whole_at(z)
        return whole.mean(read).to(z.dtype)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(z) v, per row."""
        whole, read = self._whole_at(z)
        return whole.covariance_product(read, v.to(read.dtype)).to(z.dtype)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        whole, read = self._whole_at(z)
        value, mean = whole.evaluate(read)
        return value.to(z.dtype), mean.to(z.dtype)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        cov = self.whole().linearize(z) if self._has_only("parts") and not self.loses_digits() else None
        return None if cov is None else CovarianceMap(cov.product, lambda u: self.own_gradients(cov.vjp_tensors(u)))

    def bounded_below(self, scale: float) -> bool:
        return self.parts[0].bounded_below(scale)

    def lipschitz(self) -> Tensor:
        return self.parts[0].lipschitz()


def as_log_sum_exp(potential: Potential) -> LogSumExp | None:
    """The `LogSumExp` that computes all that the potential does; None if there is none."""
    if isinstance(potential, OverLogSumExp) and OverLogSumExp in type(potential).__bases__:
        if not potential._has_only("parts") or not potential.parts[0]._is_own() or potential.loses_digits():
            return None
        potential = potential.whole()
    return potential if isinstance(potential, LogSumExp) and potential._is_own() else None
