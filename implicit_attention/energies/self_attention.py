"""Self-attention whose patterns move together: its energy, and attention repeated on its own output, which has none."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import sum_to_shape
from ..potentials import LogSumExp
from ..potentials._read import check_masks
from ..problem import Evaluation, Linearization, Problem
from .anchored import AnchoredEnergy, between
from .base import Energy


class _SelfAttention(Problem):
    """What both problems share: their arguments, and P = softmax(beta X X^T + bias) over the allowed pairs."""

    event_ndim = 2

    def __init__(
        self, field: Tensor, beta: float | Tensor, anchor: float | Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> None:
        _validate.check_float_tensor("field", field, min_ndim=2)
        for name, value, high, remedy in (
            ("beta", beta, float("inf"), "parametrise it, for example as an exponential"),
            ("anchor", anchor, 1.0, "parametrise it by a sigmoid"),
        ):
            positive = name == "beta"
            if isinstance(value, Tensor):
                _validate.check_float_tensor(name, value)
                _validate.check_same_kind([("field", field), (name, value)])
                _validate.check_broadcast(name, value.shape, field.shape[:-2], "the leading axes of `field`")
                _validate.check_range(name, value, low=0.0, high=high, open_low=positive, remedy=remedy)
            else:
                _validate.check_number(name, value, low=0.0, high=high, open_low=positive)
        check_masks(mask, bias)
        if bias is not None:
            _validate.check_same_kind([("field", field), ("bias", bias)])
        for name, pairs in (("mask", mask), ("bias", bias)):
            if pairs is not None:
                _validate.check_broadcast(name, pairs.shape, (*field.shape[:-1], field.shape[-2]), "(*batch, N, N)")
        self.field = field
        self.beta = _validate.plain(beta)
        self.anchor = _validate.plain(anchor)
        self.mask = mask
        self.bias = bias

    def probabilities(self, x: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N N"]:
        """P(X): row i says how token i attends to all tokens; zeros where it may attend to none."""
        scores, empty = self._scores(x)
        p = scores.softmax(-1)
        return p if empty is None else p.masked_fill(empty, 0.0)

    # Parts.

    @property
    def _beta(self) -> float | Tensor:
        """Beta, one number per sample."""
        return _validate.inside(self.beta, low=0.0, open_low=True) if isinstance(self.beta, Tensor) else self.beta

    @property
    def _anchor(self) -> float | Tensor:
        """The anchor, one number per sample."""
        return _validate.inside(self.anchor, low=0.0, high=1.0) if isinstance(self.anchor, Tensor) else self.anchor

    @property
    def _forgets(self) -> bool:
        """Whether the field is not read at all, so that what it holds does not matter."""
        return not isinstance(self.anchor, Tensor) and self.anchor == 0

    def _scores(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """beta X X^T + bias, -inf where masked, and the rows (*batch, N, 1) that attend to nothing, which are 0."""
        scores = (_per_entry(self._beta) * x) @ x.mT
        allowed = self.mask
        if self.bias is not None:
            scores = scores + self.bias
            unmasked = torch.ne(self.bias, -torch.inf)
            allowed = unmasked if allowed is None else allowed & unmasked
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -torch.inf)
        if allowed is None:
            return scores, None
        # A row of -inf has a NaN gradient; any finite row will do, as its results are replaced.
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0), empty

    def _map(self, attended: Tensor) -> Tensor:
        """Anchor X0 + (1 - anchor) attended."""
        return attended if self._forgets else between(attended, self.field, _per_entry(self._anchor))

    def _pullback(self, x: Tensor, u: Tensor, attended: Tensor, by_scores: Tensor) -> tuple[Tensor | None, ...]:
        """(df/dt)^T u for every tensor, from what is attended to and from (df/dscores)^T u."""
        gradients: list[Tensor | None] = [_per_entry(self._anchor) * u]
        if isinstance(self.beta, Tensor):
            gradients.append(sum_to_shape((by_scores * (x @ x.mT)).sum((-1, -2)), self.beta.shape))
        if isinstance(self.anchor, Tensor):
            gradients.append(sum_to_shape((u * (self.field - attended)).sum((-1, -2)), self.anchor.shape))
        if self.mask is not None:
            gradients.append(None)
        if self.bias is not None:
            gradients.append(sum_to_shape(by_scores, self.bias.shape))
        return tuple(gradients)

    # Structure.

    def without(self, left_out: Tensor) -> Self:
        clone = self.replace(*self.tensors())
        clone.field = self.field.masked_fill(left_out[..., None, None], 0.0)
        if isinstance(self.beta, Tensor):
            clone.beta = self.beta.masked_fill(_unread(left_out, self.beta.shape), 1.0)
        if isinstance(self.anchor, Tensor):
            clone.anchor = self.anchor.masked_fill(_unread(left_out, self.anchor.shape), 0.0)
        if self.bias is not None:
            unread = _unread(left_out, self.bias.shape[:-2])
            clone.bias = self.bias.masked_fill(unread[..., None, None] if unread.ndim else unread, 0.0)
        return clone

    def check_state(self, z: Tensor) -> None:
        super().check_state(z)
        _validate.require(
            z.shape == self.field.shape, "initial", f"have the field's shape {tuple(self.field.shape)}", tuple(z.shape)
        )

    def check_undeclared(self, z: Tensor) -> None:
        # The two classes here read nothing but their attributes; a subclass may.
        if type(self) not in (SelfAttentionEnergy, RepeatedSelfAttention):
            super().check_undeclared(z)


class SelfAttentionEnergy(_SelfAttention, Energy):
    """E(X) = |X|^2/2 - anchor <X0, X> - (1 - anchor) weight Phi(X): attention whose keys move with its queries.

    Phi(X) = (1/beta) sum_i log sum_j exp(beta <x_i, x_j> + bias_ij) has the gradient P X + P^T X with
    P = softmax(beta X X^T + bias): a token is moved by the tokens that it attends to, and by those that attend to it.
    So f(X) = anchor X0 + (1 - anchor) weight (P X + P^T X), and with weight 1 and anchor 0 the gradient of E is
    X - P X - P^T X.

    Every pair enters Phi twice, as query and key. weight = 1/2 counts it once: tokens that agree are then a fixed point
    of f, which weight 1 would double. With c = (1 - anchor) weight and N tokens, E has a minimum if c < 1/(1 + sqrt N);
    without mask it has no lower bound if c > 1/(1 + sqrt N), though it may have local minima. Phi is not convex: steps
    of size below 2/(1 + c sqrt(N + 2)) descend from everywhere, so plain ones do where the minimum is certain;
    elsewhere solvers with an energy guard halve theirs.

    A causal mask leaks: P^T X moves a token by those after it. For causal attention keep the keys fixed
    (`AnchoredEnergy`), or use `RepeatedSelfAttention`.

    Args:
        field: the tokens X0 of every sample, (*batch, N, D); also their number and dimension.
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch. At 0 the field is not read.
        weight: > 0, of Phi.
        mask: boolean, broadcasts to (*batch, N, N); True = token i attends to token j.
        bias: added to the scaled scores, broadcasts to (*batch, N, N); -inf masks.

    A token that attends to none adds nothing to Phi. A sample is one problem (`event_ndim` 2): a NaN in it makes it
    NONFINITE, and touches no other.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0, an anchor outside [0, 1].

    Gradients: with respect to field, beta, anchor and bias, to any order.
    """

    def __init__(
        self,
        field: Float[Tensor, "*batch N D"],
        beta: float | Float[Tensor, "*#batch"],
        anchor: float | Float[Tensor, "*#batch"] = 0.0,
        *,
        weight: float = 1.0,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        super().__init__(field, beta, anchor, mask, bias)
        weight = _validate.check_number("weight", weight, low=0.0, open_low=True)
        self.weight = weight

    def energy(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch"]:
        """E(X), (*batch, N, D) -> (*batch)."""
        return self._energy(z, *self._scores(z))

    def fixed_point_map(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """f(X) = anchor X0 + (1 - anchor) weight (P X + P^T X)."""
        return self._map(self._attended(self.probabilities(z), z))

    def gradient(self, z: Tensor) -> Tensor:
        return z - self._map(self._attended(self.probabilities(z), z))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return v - self._curvature(self.probabilities(z), z, v)

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        scores, empty = self._scores(z)
        p = scores.softmax(-1)
        p = p if empty is None else p.masked_fill(empty, 0.0)
        return Evaluation(self._map(self._attended(p, z)), self._energy(z, scores, empty) if energy else None)

    def linearize(self, z: Tensor) -> Linearization:
        if not self._has_only("field", "beta", "anchor", "mask", "bias", "weight"):
            return super().linearize(z)
        p = self.probabilities(z)

        def product(v: Tensor) -> Tensor:
            return self._curvature(p, z, v)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            by_p = u @ z.mT
            by_scores = _per_entry(1 - self._anchor) * self.weight * _softmax_tangent(p, by_p + by_p.mT)
            return self._pullback(z, u, self._attended(p, z), by_scores)

        return Linearization(product, product, pullback)

    def _energy(self, z: Tensor, scores: Tensor, empty: Tensor | None) -> Tensor:
        per_token = scores.logsumexp(-1)
        per_token = per_token if empty is None else per_token.masked_fill(empty.squeeze(-1), 0.0)
        pull = z / 2 if self._forgets else z / 2 - _per_entry(self._anchor) * self.field
        return (z * pull).sum((-1, -2)) - (1 - self._anchor) * self.weight * per_token.sum(-1) / self._beta

    def _attended(self, p: Tensor, x: Tensor) -> Tensor:
        return self.weight * ((p + p.mT) @ x)

    def _curvature(self, p: Tensor, x: Tensor, v: Tensor) -> Tensor:
        """(1 - anchor) weight Hess Phi v = (1 - anchor) weight [(P' + P'^T) X + (P + P^T) V]."""
        scores = v @ x.mT
        tangent = _per_entry(self._beta) * _softmax_tangent(p, scores + scores.mT)
        moved = (tangent + tangent.mT) @ x + (p + p.mT) @ v
        return _per_entry(1 - self._anchor) * self.weight * moved


class RepeatedSelfAttention(_SelfAttention):
    """X = anchor X0 + (1 - anchor) P(X) X: attention on its own output, the context reset to it after every step.

    P = softmax(beta X X^T + bias). At a frozen context C a step is one of the energy `frozen_energy(C)`; resetting C
    to X moves that energy with it, and X - P(X) X is the gradient of no function of X: its Jacobian is not symmetric.
    What is missing is the key side P^T X, for which `SelfAttentionEnergy` stands.

    At anchor 0 without mask the solutions are the states of full consensus, each of them: which one is reached depends
    on where the iteration starts, I - df/dX is singular there, and `Implicit()` has no gradient (use `Unrolled()`).
    Take `Picard()` there: its steps stay in the convex hull of the tokens, while accelerated ones may lead to tokens so
    far apart that each attends to itself alone, which rounding makes a solution, too.

    A causal mask is respected: no token is moved by later ones.

    Args:
        field: the tokens X0 of every sample, (*batch, N, D); also their number and dimension.
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch. At 0 the field is not read.
        mask: boolean, broadcasts to (*batch, N, N); True = token i attends to token j.
        bias: added to the scaled scores, broadcasts to (*batch, N, N); -inf masks.

    For a token that attends to none P X is 0. A sample is one problem (`event_ndim` 2): a NaN in it makes it NONFINITE,
    and touches no other.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0, an anchor outside [0, 1].

    Gradients: with respect to field, beta, anchor and bias, to any order.
    """

    def __init__(
        self,
        field: Float[Tensor, "*batch N D"],
        beta: float | Float[Tensor, "*#batch"],
        anchor: float | Float[Tensor, "*#batch"] = 0.0,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        super().__init__(field, beta, anchor, mask, bias)

    def fixed_point_map(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """f(X) = anchor X0 + (1 - anchor) P(X) X."""
        return self._map(self.probabilities(z) @ z)

    def frozen_energy(self, context: Float[Tensor, "*batch N D"]) -> AnchoredEnergy:
        """The energy of every token while the context stays; at X = context its gradient is X - f(X)."""
        return AnchoredEnergy(LogSumExp(context, self.beta, mask=self.mask, bias=self.bias), self.field, self.anchor)

    def linearize(self, z: Tensor) -> Linearization:
        if not self._has_only("field", "beta", "anchor", "mask", "bias"):
            return super().linearize(z)
        p = self.probabilities(z)
        part, beta = _per_entry(1 - self._anchor), _per_entry(self._beta)

        def product(v: Tensor) -> Tensor:
            scores = v @ z.mT
            return part * (beta * _softmax_tangent(p, scores + scores.mT) @ z + p @ v)

        def transposed(u: Tensor) -> Tensor:
            by_scores = _softmax_tangent(p, u @ z.mT)
            return part * (beta * (by_scores + by_scores.mT) @ z + p.mT @ u)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            return self._pullback(z, u, p @ z, part * _softmax_tangent(p, u @ z.mT))

        return Linearization(product, transposed, pullback)


def _per_entry(number: float | Tensor) -> float | Tensor:
    """One number per sample, shaped to multiply states or scores."""
    return number[..., None, None] if isinstance(number, Tensor) else number


def _softmax_tangent(p: Tensor, change: Tensor) -> Tensor:
    """How the rows of a softmax change with their scores; the map is its own transpose."""
    return p * (change - (p * change).sum(-1, keepdim=True))


def _unread(left_out: Tensor, shape: torch.Size) -> Tensor:
    """Where all samples that read an entry of a tensor of this shape are left out."""
    return (~left_out).to(torch.int64).sum_to_size(shape) == 0
