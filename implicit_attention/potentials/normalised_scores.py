"""The standard deviation of the scores: the pull of all keys by centred, scaled scores."""

from __future__ import annotations

import math

from torch import Tensor
from typing_extensions import Unpack

from .. import _validate
from ._shapes import Keys, PerBatch, PerRow, States
from .base import CovarianceMap
from .masked_keys import MaskedKeys, Masks, Read, in_blocks


class NormalisedScores(MaskedKeys):
    r"""The pull by centred, scaled scores a of M keys.

    ```math
    \Phi(z) = \frac M\beta \sqrt{\operatorname{var}(a) + \varepsilon}, \qquad
    a_j = \beta \langle k_j, z \rangle + \text{bias}_j
    ```

    M is the number of keys that z reads, and var(a) = sum_j (a_j - mean a)^2 / M over these. With
    sigma = sqrt(var(a) + eps) and w = (a - mean a)/sigma, the scores after a layer norm over the keys,
    mean(z) = sum_j w_j k_j; covariance_product(z, v) = (beta/sigma) sum_j k_j [u - mean u - w (w . u)/M]_j, u = K v.

    Keys of low score push away, and the mean may leave the hull of the keys: its length may grow like M. Phi is the
    length of (a - mean a, sqrt(M eps)), which is affine in z, times sqrt(M)/beta: so it is convex, and grows linearly.

    Args:
        keys: (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        **masks: `mask`, boolean, broadcasts to (*batch, N, M); True = the query reads the key. A query that reads no
            key, or but one, has mean 0; `bias`, added to the scores, broadcasts to (*batch, N, M); -inf masks.
        eps: >= 0, added to the variance. At 0 a query whose scores are all the same, where Phi has a kink, has mean 0.

    Raises:
        TypeError, ValueError: as `LogSumExp`; eps < 0.

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Ba et al. (2016) for the layer norm, here over keys; Hoover et al. (2023), Energy Transformer, for the
    function whose gradient it is.

    Not for a read-out of values: the weights w sum to zero, so that layers take readout="state". Not for retrieval of
    one key: use `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import NormalisedScores
        >>> phi = NormalisedScores(torch.eye(2), beta=1.0)
        >>> phi.mean(torch.tensor([[1.0, 0.0], [0.2, 0.4]])).round(decimals=2)
        tensor([[ 1., -1.],
                [-1.,  1.]])
    """

    convex = True
    declares_all = True
    _attributes = (*MaskedKeys._attributes, "eps")
    select = MaskedKeys.select
    row_block = MaskedKeys.row_block

    def __init__(self, keys: Keys, beta: PerBatch, *, eps: float = 1e-5, **masks: Unpack[Masks]) -> None:
        super().__init__(keys, beta, **masks)
        self.eps: float = _validate.check_number("eps", eps, low=0.0)

    @in_blocks
    def value(self, z: States) -> PerRow:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self._length(*self._normalised(z))

    @in_blocks
    def mean(self, z: States) -> States:
        """sum_j w_j k_j, (*batch, N, D) -> (*batch, N, D)."""
        return self._pull(*self._normalised(z))

    @in_blocks
    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        normalised = self._normalised(z)
        return self._length(*normalised), self._pull(*normalised)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(z) v, per row."""
        read, centred, count, square = self._normalised(z)
        fold, keys = read.fold, read.keys
        change = _change(read, centred, count, square, fold.product(fold.moved(v), keys.mT))
        return self._scale * read.finish(fold.product(change, keys), rows=True)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        read, centred, count, square = self._normalised(z)
        weights = centred / _deviation(square)
        return self._covariance_map(z, read, weights, lambda u: _change(read, centred, count, square, u))

    def bounded_below(self, scale: float) -> bool:
        """Always: Phi grows no faster than |z| times a number of the keys."""
        return True

    def lipschitz(self) -> Tensor | None:
        """beta lambda_max(K^T K)/sqrt(eps) of the centred keys, (*batch); None for eps 0."""
        if self.eps == 0:
            return None
        keys = self._keys_read()
        return self._bound(keys - keys.mean(-2, keepdim=True), 1 / math.sqrt(self.eps))

    # Parts.

    def _normalised(self, z: Tensor) -> tuple[Read, Tensor, int | Tensor, Tensor]:
        """Return the keys that are read, centred scores, number of keys and variance with eps, (..., N, 1)."""
        read = self._read(z)
        scores, size = self._scores_read(z, read), self.keys.shape[-2]
        count: int | Tensor = size
        if read.attended is not None:
            # At least 1, as a divisor: the scores of a query that reads no key are zeros.
            pairs = read.attended.expand(*read.attended.shape[:-1], size)
            count = pairs.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
        centred = read.zero_unread(scores - scores.sum(-1, keepdim=True) / count)
        return read, centred, count, centred.square().sum(-1, keepdim=True) / count + self.eps

    def _length(self, read: Read, centred: Tensor, count: int | Tensor, square: Tensor) -> Tensor:
        # The length is 0 where `_deviation` is 1 as a divisor.
        deviation = _deviation(square).masked_fill(square == 0, 0.0)
        return read.finish((count * deviation).squeeze(-1)) / self._row_scale

    def _pull(self, read: Read, centred: Tensor, count: int | Tensor, square: Tensor) -> Tensor:
        return read.finish(read.fold.product(centred, read.keys) / _deviation(square), rows=True)


def _deviation(square: Tensor) -> Tensor:
    """Return sigma, but 1 where it is 0: only zeros are divided by it there."""
    return square.masked_fill(square == 0, 1.0).sqrt()


def _change(read: Read, centred: Tensor, count: int | Tensor, square: Tensor, u: Tensor) -> Tensor:
    """Return (dw/da) u; the Jacobian is symmetric."""
    u = read.zero_unread(u)
    along = (centred * u).sum(-1, keepdim=True) / (count * square.masked_fill(square == 0, 1.0))
    return read.zero_unread(u - u.sum(-1, keepdim=True) / count - centred * along) / _deviation(square)
