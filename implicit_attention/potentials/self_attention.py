"""The potential of self-attention: all tokens of a sample are queries and keys of each other."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import sum_to_shape
from ._read import check_masks, check_masks_fit, joined, restricted_to
from ._shapes import Bias, Mask, PerBatch, States, per_state
from .base import CovarianceMap, Potential


class SelfAttention(Potential):
    r"""The potential of all tokens X of a sample together, each a query and a key.

    ```math
    \Phi(X) = \frac1\beta \sum_i \log \sum_j e^{\beta \langle x_i, x_j \rangle + \text{bias}_{ij}}
    ```

    mean(X) = P X + P^T X with P = softmax(beta X X^T + bias): a token is moved by the tokens that it attends to, and by
    those that attend to it. Every pair enters Phi twice, as query and key; `0.5 * SelfAttention(beta)` counts it once.

    Args:
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        mask: boolean, broadcasts to (*batch, N, N); True = token i attends to token j.
        bias: added to the scaled scores, broadcasts to (*batch, N, N); -inf masks.

    A token that attends to none adds nothing to Phi. A sample is one problem (`event_ndim` 2): its value is one number,
    and a NaN in it reaches all of its tokens, but no other sample. Not convex.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0.

    Gradients: with respect to X, beta and bias, to any order.

    Not for causal attention: P^T X moves a token by those after it; keep the keys fixed (`LogSumExp`), or use
    `RepeatedSelfAttention`.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, solve
        >>> from implicit_attention.potentials import SelfAttention
        >>> tokens = torch.linspace(-1, 1, 24).view(2, 4, 3)
        >>> phi = 0.25 * SelfAttention(beta=0.5)
        >>> phi.value(tokens).shape, phi.mean(tokens).shape
        (torch.Size([2]), torch.Size([2, 4, 3]))
        >>> solve(AnchoredEnergy(phi, field=tokens, anchor=0.5), tokens).converged
        tensor([True, True])
    """

    event_ndim = 2
    declares_all = True
    #: Beta, shaped to multiply states or scores.
    scale: float | Tensor = per_state("beta")

    def __init__(self, beta: PerBatch, *, mask: Mask = None, bias: Bias = None) -> None:
        remedy = "parametrise it, for example as an exponential"
        self.beta: float | Tensor = _validate.check_per_batch("beta", beta, low=0.0, open_low=True, remedy=remedy)
        check_masks(mask, bias)
        self.mask = mask
        self.bias = bias

    def check_state(self, argument: str, z: Tensor) -> None:
        _validate.check_float_tensor(argument, z, min_ndim=2)
        _validate.check_fits_batch("beta", self.beta, argument, z)
        check_masks_fit(self.mask, self.bias, argument, z, z.shape[-2], "(*batch, N, N)")

    def value(self, z: States) -> Float[Tensor, "*batch"]:
        """Phi(X), (*batch, N, D) -> (*batch)."""
        return self._value(*self._scores(z))

    def mean(self, z: States) -> States:
        """P X + P^T X."""
        return _both_sides(self.probabilities(z), z)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(X) V = (P' + P'^T) X + (P + P^T) V, where P' is how P changes along V."""
        return self._curvature(self.probabilities(z), z, v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        scores, empty = self._scores(z)
        return self._value(scores, empty), _both_sides(_weights(scores, empty), z)

    def probabilities(self, z: States) -> Float[Tensor, "*batch N N"]:
        """P(X): row i says how token i attends to all tokens; zeros where it may attend to none."""
        return _weights(*self._scores(z))

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._has_only("beta", "mask", "bias"):
            return None
        p = self.probabilities(z)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            by_p = u @ z.mT
            return self.by_tensors(z, softmax_tangent(p, by_p + by_p.mT))

        return CovarianceMap(lambda v: self._curvature(p, z, v), pullback)

    def bounded_below(self, scale: float) -> bool | None:
        """With N tokens: yes for scale < 1/(1 + sqrt N), and without mask not above. The masks alone tell N."""
        count = max((pairs.shape[-1] for pairs in (self.mask, self.bias) if pairs is not None), default=1)
        if count > 1 and scale * (1 + count**0.5) < 1:
            return True
        # Two tokens or one: no more than 1/2, the limit of one.
        return False if self.mask is None and self.bias is None and scale > 0.5 else None

    # Parts.

    def by_tensors(self, z: Tensor, by_scores: Tensor) -> tuple[Tensor | None, ...]:
        """Return (d mean/dt)^T u for each of `tensors()`, from (d mean/d scores)^T u."""
        gradients: list[Tensor | None] = []
        if isinstance(self.beta, Tensor):
            gradients.append(sum_to_shape((by_scores * (z @ z.mT)).sum((-1, -2)), self.beta.shape))
        if self.mask is not None:
            gradients.append(None)
        if self.bias is not None:
            gradients.append(sum_to_shape(by_scores, self.bias.shape))
        return tuple(gradients)

    def _scores(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """beta X X^T + bias, -inf where masked, and the rows (*batch, N) that attend to nothing, whose scores are 0."""
        pairs, attended = joined(self.mask, self.bias)
        empty = None if attended is None else ~attended.any(-1)
        return restricted_to((self.scale * z) @ z.mT, pairs, empty), empty

    def _value(self, scores: Tensor, empty: Tensor | None) -> Tensor:
        per_token = scores.logsumexp(-1)
        per_token = per_token if empty is None else per_token.masked_fill(empty, 0.0)
        scale = self.scale
        return per_token.sum(-1) / (scale[..., 0, 0] if isinstance(scale, Tensor) else scale)

    def _curvature(self, p: Tensor, z: Tensor, v: Tensor) -> Tensor:
        scores = v @ z.mT
        tangent = self.scale * softmax_tangent(p, scores + scores.mT)
        return _both_sides(tangent, z) + _both_sides(p, v)


def softmax_tangent(p: Tensor, change: Tensor) -> Tensor:
    """Return the change of the rows p of a softmax with their scores; the map is its own transpose."""
    return p * (change - (p * change).sum(-1, keepdim=True))


def _weights(scores: Tensor, empty: Tensor | None) -> Tensor:
    p = scores.softmax(-1)
    return p if empty is None else p.masked_fill(empty[..., None], 0.0)


def _both_sides(p: Tensor, z: Tensor) -> Tensor:
    """P Z + P^T Z."""
    return (p + p.mT) @ z
