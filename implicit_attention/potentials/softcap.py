"""Log-sum-exp of capped scores: the potential of attention whose logits are squashed by a tanh."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from ._read import Read
from .log_sum_exp import LogSumExp, _select_rows


class SoftcapLogSumExp(LogSumExp):
    """Phi(z) = (1/beta) log sum_j exp(c(beta <k_j, z>) + bias_j) with scores capped by c(s) = cap tanh(s / cap).

    mean(z) = sum_j p_j c'(s_j) k_j with p = softmax(c(s) + bias), s = beta K z: a key whose score is near the cap pulls
    less than its weight. The read-out, softmax(c(s) + bias) V, is capped attention as it is; its own iteration with the
    keys as values would be no gradient of anything.
    covariance_product(z, v) = beta [sum_j p_j (c'^2 + c'')(s_j) k_j <k_j, v> - mean <mean, v>].

    Not convex: from a plain step the energy may rise, and equilibria may be saddles.

    Args:
        keys: stored patterns, (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        cap: > 0, the largest absolute score.
        mask: boolean, broadcasts to (*batch, N, M); True = the query attends to the key.
        bias: added to the capped scores, broadcasts to (*batch, N, M); -inf masks.

    Raises:
        TypeError, ValueError: as `LogSumExp`; cap <= 0.

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Gemma Team (2024), Gemma 2, section 2, for the capped scores.
    """

    convex = False
    declares_all = True
    fused = False
    # By the capped scores, as there.
    value = LogSumExp.value
    probabilities = LogSumExp.probabilities
    readout = LogSumExp.readout
    row_block = LogSumExp.row_block
    bounded_below = LogSumExp.bounded_below

    def __init__(
        self,
        keys: Float[Tensor, "*batch M D"],
        beta: float | Float[Tensor, "*#batch"],
        cap: float,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        super().__init__(keys, beta, mask=mask, bias=bias)
        cap = _validate.check_number("cap", cap, low=0.0, open_low=True)
        self.cap = cap

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """Sum_j p_j c'(s_j) k_j, (*batch, N, D) -> (*batch, N, D)."""
        return self._evaluated(z)[1]

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._evaluated(z)

    def _evaluated(self, z: Tensor) -> tuple[Tensor, Tensor]:
        read = self._read(z)
        squashed = self._squashed(z, read)
        scores = self._paired(self.cap * squashed, read)
        pull = scores.softmax(-1) * (1 - squashed.square())
        value = read.finish(scores.logsumexp(-1)) / self._row_scale
        return value, read.finish(read.fold.product(pull, read.keys), rows=True)

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess Phi(z) v, per row."""
        read = self._read(z)
        fold, keys, v = read.fold, read.keys, read.fold.moved(v)
        squashed = self._squashed(z, read)
        p = self._paired(self.cap * squashed, read).softmax(-1)
        slope = 1 - squashed.square()
        mean = fold.product(p * slope, keys)
        bend = slope * (slope - 2 / self.cap * squashed)
        second = fold.product(p * bend * fold.product(v, keys.mT), keys)
        return self._scale * read.finish(second - mean * (mean * v).sum(-1, keepdim=True), rows=True)

    def lipschitz(self) -> None:  # type: ignore[override]
        return None

    def select(self, index: Tensor) -> Self | None:
        if not self._has_only("keys", "beta", "mask", "bias", "cap"):
            return None
        clone = self.replace(*self.tensors())
        clone.mask = None if self.mask is None else _select_rows(self.mask, index)
        clone.bias = None if self.bias is None else _select_rows(self.bias, index)
        return clone

    def _squashed(self, z: Tensor, read: Read) -> Tensor:
        """tanh(s / cap)."""
        return (self._products(z, read) / self.cap).tanh()

    def _scores(self, z: Tensor, read: Read) -> Tensor:
        return self._paired(self.cap * self._squashed(z, read), read)
