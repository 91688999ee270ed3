"""Entmax: the potential of attention whose weights are sparse, and whose retrieval is exact."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from .. import _validate
from .._torch import at_least_single, exact_precision, sum_to_shape
from ._entmax import by_order, entmax, maximum, slopes
from ._shapes import Keys, PerBatch, PerRow, ReadOut, States, Values, Weights
from .base import CovarianceMap
from .log_sum_exp import LogSumExp
from .masked_keys import Masks, Read, in_blocks, in_double
from .scored_keys import ScoredKeys


class Entmax(ScoredKeys):
    r"""The potential of attention whose weights are sparse, with scores s = beta K z + bias.

    ```math
    \begin{align*}
    \Phi(z) &= \frac1\beta \underset{p}{\max} \left[ \langle p, s \rangle + H(p) \right], \qquad
    H(p) = \frac{1 - \sum_j p_j^\alpha}{\alpha\,(\alpha - 1)} \\
    \nabla\Phi(z) &= \sum_j p_j\, k_j, \qquad p_j = \left[ (\alpha - 1)\, s_j - \tau \right]_+^{1/(\alpha - 1)} \\
    \nabla^2\Phi(z)\, v &= \beta \left[ \sum_j w_j\, k_j \langle k_j, v \rangle
    - \frac{\sum_j w_j k_j\, \sum_j w_j \langle k_j, v \rangle}{\sum_j w_j} \right]
    \end{align*}
    ```

    p is a vector of probabilities, H Tsallis' entropy, and w = p^(2 - alpha) on the support of p, so that the
    covariance is 0 once one key is left. Keys whose scores lie far enough below the largest have weight 0 exactly.
    alpha = 2 is sparsemax; alpha -> 1 is softmax, and Phi then `LogSumExp`.

    A key k_i that beats all others by (k_i - k_j) . k_i >= 1/((alpha - 1) beta) + 2 M eps, with M the length of the
    longest key, is the mean itself, without rounding, at all states at most eps away from it.

    Args:
        keys: stored patterns, (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        alpha: in (1, 2], a float or a tensor that broadcasts to *batch, which may be learned.
        **masks: `mask`, boolean, broadcasts to (*batch, N, M); True = the query attends to the key; `bias`, added to
            the scaled scores, broadcasts to (*batch, N, M); -inf masks.

    A query that attends to no key has value 0 and mean 0, with zero gradients. A masked key, also one of NaN, does not
    reach the queries that do not attend to it.

    Raises:
        TypeError, ValueError: as `LogSumExp`; alpha outside (1, 2] (on an accelerator a tensor alpha is not waited for:
            its entries outside become NaN and the problems that read them report NONFINITE).

    Gradients: with respect to z, keys, beta, alpha and bias, to any order where the support does not change; there the
    mean has a kink for alpha = 2, and its derivative one for alpha > 1.5. The threshold is found by Newton steps to
    rounding, and differentiated in closed form.

    Reference: Peters, Niculae, Martins (2019), Sparse sequence-to-sequence models; Correia, Niculae, Martins (2019),
    proposition 1, for the derivative by alpha; Hu et al. (2023), Santos et al. (2024) for the memory.

    Not for keys that should all be read a little, or learn from every query: a key outside of the support has no
    gradient. Not where time matters more than zeros: `LogSumExp` has fused kernels, and this stores (N, M) weights.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.potentials import Entmax
        >>> phi = Entmax(torch.eye(3), beta=8.0)
        >>> phi.mean(torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.4, 0.0]])).round(decimals=3)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.7710, 0.2290, 0.0000]])
        >>> from functools import partial
        >>> ImplicitAttention(8, heads=2, potential=partial(Entmax, alpha=2.0))(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    convex = True
    declares_all = True
    bounded_below = LogSumExp.bounded_below
    _attributes = (*ScoredKeys._attributes, "alpha")

    def __init__(self, keys: Keys, beta: PerBatch, *, alpha: PerBatch = 1.5, **masks: Unpack[Masks]) -> None:
        super().__init__(keys, beta, **masks)
        # Torch's kernels compute a softmax.
        self._dense = True
        self.alpha: float | Tensor
        if isinstance(alpha, Tensor):
            remedy = "parametrise it, for example as 1 + sigmoid(t)"
            self.alpha = _validate.check_per_batch("alpha", alpha, low=1.0, high=2.0, open_low=True, remedy=remedy)
            _validate.check_same_kind([("keys", keys), ("alpha", alpha)])
            _validate.check_together("alpha", alpha.shape, keys.shape[:-2], "the leading axes of `keys`")
        else:
            remedy = "alpha -> 1 is `LogSumExp`, 2 is sparsemax"
            self.alpha = float(_validate.check_number("alpha", alpha, low=1.0, high=2.0, open_low=True, remedy=remedy))

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        _validate.check_fits_batch("alpha", self.alpha, argument, z)

    @in_blocks
    def value(self, z: States) -> PerRow:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self._valued(*self._weighed(z))

    @in_blocks
    def mean(self, z: States) -> States:
        """Sum_j p_j k_j, (*batch, N, D) -> (*batch, N, D)."""
        read, _, p = self._weighed(z)
        return _averaged(read, p)

    @in_blocks
    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        read, scores, p = self._weighed(z)
        return self._valued(read, scores, p), _averaged(read, p)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(z) v = beta sum_j w_j (k_j - m) <k_j - m, v> with m the mean by weights w, per row."""
        read, _, p = self._weighed(z, centred=True)
        fold, keys, v = read.fold, read.keys, read.fold.moved(v)
        w = slopes(p, self._order(read)).to(v.dtype)
        whole = w.sum(-1, keepdim=True)
        mean = fold.product(w, keys) / whole
        weighted = w * (fold.product(v, keys.mT) - (mean * v).sum(-1, keepdim=True))
        spread = fold.product(weighted, keys) - mean * weighted.sum(-1, keepdim=True)
        return self._scale * read.finish(spread, rows=True)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._is_own():
            return None
        read, _, p = self._weighed(z, centred=True)
        fold, keys, a = read.fold, read.keys, self._order(read)
        w = slopes(p, a)
        mean = fold.product(w, keys) / w.sum(-1, keepdim=True)
        turn = by_order(p, a) if isinstance(self.alpha, Tensor) else None
        p, w = read.zero_empty(p, rows=True), read.zero_empty(w, rows=True)

        def centred(v: Tensor) -> Tensor:
            """The Jacobian of p times K v."""
            return fold.product(v, keys.mT).sub_((mean * v).sum(-1, keepdim=True)).mul_(w)

        def product(v: Tensor) -> Tensor:
            weighted = centred(fold.moved(v))
            spread = fold.product(weighted, keys)
            return self._scale * fold.restored(spread.addcmul_(mean, weighted.sum(-1, keepdim=True), value=-1.0))

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            u = fold.moved(u)
            gradients = self._by_tensors(z, read, u, p, centred(u))
            if not isinstance(self.alpha, Tensor) or turn is None:
                return gradients
            by_row = read.zero_empty((fold.product(u, keys.mT) * turn).sum(-1))
            return *gradients, sum_to_shape(fold.restored(by_row).sum(-1), self.alpha.shape)

        return CovarianceMap(product, pullback)

    def probabilities(self, z: States) -> Weights:
        """The weights alpha-entmax(s), (*batch, N, M); zeros for a query that attends to no key."""
        read, _, p = self._weighed(z)
        return read.finish(p.to(z.dtype), rows=True)

    def readout(self, z: States, values: Values, *, dropout_p: float = 0.0) -> ReadOut:
        """probabilities(z) V; arguments, masks and errors as in `LogSumExp.readout`, any order of derivatives."""
        self._check_readout(z, values, dropout_p)
        if torch.finfo(z.dtype).bits < 32:
            return self._single().readout(z.float(), values.float(), dropout_p=dropout_p).to(z.dtype)
        with exact_precision(z):
            read, _, p = self._weighed(z, values)
            return _averaged(read, F.dropout(p, dropout_p))

    def readout_with_logsumexp(self, z: States, values: Values) -> tuple[ReadOut, PerRow]:
        """Raise: outputs over parts of the keys do not merge by log-sum-exps here."""
        raise NotImplementedError(
            f"{type(self).__name__} reads out no log-sum-exp, by which nothing would merge; use `readout`"
        )

    def lipschitz(self) -> Tensor:
        """beta min(M^(alpha - 1) diam(K)^2/4, lambda_max of the centred K^T K) for M keys, (*batch).

        The covariance is beta sum(w) times that of the keys by weights w/sum(w), which Popoviciu bounds, and
        sum_j w_j = sum_j p_j^(2 - alpha) is largest for equal p; and it is at most beta sum_j w_j k_j k_j^T with any
        origin of the keys, and w <= 1.
        """
        keys = in_double(self.keys)
        keys = keys - keys.mean(-2, keepdim=True)
        spread = torch.linalg.matrix_norm(keys, ord=2).square() * (1 + 1e-9)
        alpha = self.alpha.detach() if isinstance(self.alpha, Tensor) else self.alpha
        count = float(keys.shape[-2]) ** (alpha - 1)
        return self.beta * torch.minimum(count * self.diameter().square() / 4, spread.to(self.keys))

    def _is_own(self) -> bool:
        """See `LogSumExp._is_own`."""
        return type(self) is Entmax and self._has_only(*self._attributes)

    def _order(self, read: Read) -> float | Tensor:
        """alpha - 1, shaped for the pairs of `read`."""
        if not isinstance(self.alpha, Tensor):
            return self.alpha - 1
        alpha = _validate.inside(self.alpha, low=1.0, high=2.0, open_low=True)
        return read.fold.moved(at_least_single(alpha)[..., None, None] - 1)

    def _weighed(
        self, z: Tensor, values: Tensor | None = None, *, centred: bool = False
    ) -> tuple[Read, Tensor, Tensor]:
        """Return the keys that are read, scores and weights, in float32 at least: bfloat16 resolves no threshold."""
        read = self._read(z, values)
        read = read.centred() if centred else read
        scores = at_least_single(self._scores(z, read))
        return read, scores, entmax(scores, self._order(read))

    def _valued(self, read: Read, scores: Tensor, p: Tensor) -> Tensor:
        return read.finish(maximum(scores, p, self._order(read)).to(self.keys.dtype)) / self._row_scale


def _averaged(read: Read, p: Tensor) -> Tensor:
    return read.finish(read.fold.product(p.to(read.values.dtype), read.values), rows=True)
