"""Log-sum-exp of capped scores: the potential of attention whose logits are squashed by a tanh."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from .. import _validate
from ._shapes import Keys, PerBatch, States
from .log_sum_exp import LogSumExp
from .masked_keys import Masks, Read
from .scored_keys import ScoredKeys


class SoftcapLogSumExp(ScoredKeys):
    r"""Log-sum-exp of capped scores.

    ```math
    \Phi(z) = \frac1\beta \log \sum_j e^{c(\beta \langle k_j, z \rangle) + \text{bias}_j}, \qquad
    c(s) = \text{cap} \cdot \tanh(s/\text{cap})
    ```

    mean(z) = sum_j p_j c'(s_j) k_j with p = softmax(c(s) + bias), s = beta K z: a key whose score is near the cap pulls
    less than its weight. The read-out, softmax(c(s) + bias) V, is capped attention as it is; iterated with the keys as
    values it would follow the gradient of no potential.
    covariance_product(z, v) = beta [sum_j p_j (c'^2 + c'')(s_j) k_j <k_j, v> - mean <mean, v>].

    Not convex: from a plain step the energy may rise, and equilibria may be saddles.

    Args:
        keys: stored patterns, (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        cap: > 0, the largest absolute score.
        **masks: `mask`, boolean, broadcasts to (*batch, N, M); True = the query attends to the key; `bias`, added to
            the capped scores, broadcasts to (*batch, N, M); -inf masks.

    Raises:
        TypeError, ValueError: as `LogSumExp`; cap <= 0.

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Gemma Team (2024), Gemma 2, section 2, for the capped scores.

    Not for models whose logits are not capped: use `LogSumExp`, which is convex and has fused kernels.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import SoftcapLogSumExp
        >>> phi = SoftcapLogSumExp(keys=torch.eye(3), beta=8.0, cap=2.0)
        >>> phi.probabilities(torch.eye(3))[0].round(decimals=3)
        tensor([0.7870, 0.1070, 0.1070])
    """

    declares_all = True
    bounded_below = LogSumExp.bounded_below
    _attributes = (*ScoredKeys._attributes, "cap")

    def __init__(self, keys: Keys, beta: PerBatch, cap: float, **masks: Unpack[Masks]) -> None:
        super().__init__(keys, beta, **masks)
        # Torch's kernels do not cap scores.
        self._dense = True
        self.cap: float = _validate.check_number("cap", cap, low=0.0, open_low=True)

    def mean(self, z: States) -> States:
        """Sum_j p_j c'(s_j) k_j, (*batch, N, D) -> (*batch, N, D)."""
        return self._evaluated(z)[1]

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._evaluated(z)

    def _evaluated(self, z: Tensor) -> tuple[Tensor, Tensor]:
        read = self._read(z)
        squashed, scores = self._squashed(z, read)
        pull = scores.softmax(-1) * (1 - squashed.square())
        value = read.finish(scores.logsumexp(-1)) / self._row_scale
        return value, read.finish(read.fold.product(pull, read.keys), rows=True)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(z) v, per row."""
        read = self._read(z)
        fold, keys, v = read.fold, read.keys, read.fold.moved(v)
        squashed, scores = self._squashed(z, read)
        p = scores.softmax(-1)
        slope = 1 - squashed.square()
        mean = fold.product(p * slope, keys)
        bend = slope * (slope - 2 / self.cap * squashed)
        second = fold.product(p * bend * fold.product(v, keys.mT), keys)
        return self._scale * read.finish(second - mean * (mean * v).sum(-1, keepdim=True), rows=True)

    def _shaped(self, scores: Tensor) -> Tensor:
        return self.cap * (scores / self.cap).tanh()

    def _squashed(self, z: Tensor, read: Read) -> tuple[Tensor, Tensor]:
        """Return tanh(s / cap), and the capped scores with bias and mask."""
        squashed = (self._products(z, read) / self.cap).tanh()
        return squashed, read.restricted(self.cap * squashed)
