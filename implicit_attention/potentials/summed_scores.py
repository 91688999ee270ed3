"""Sums of a convex function of every score: polynomials, the exponential, and every law of a hidden unit."""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

from torch import Tensor
from typing_extensions import Unpack

from .. import _validate
from .._torch import sum_to_shape
from ._rays import Ray, faster_ray, quadratic_ray
from ._shapes import Bias, Keys, Mask, PerBatch, PerRow, States
from .base import CovarianceMap
from .laws import units_ray
from .masked_keys import MaskedKeys, Masks, Read, in_blocks
from .unit import Units, check_units


class SummedScores(MaskedKeys):
    """Base of Phi(z) = (1/beta) sum_j g(s_j) over the keys that z reads, with s_j = beta <k_j, z> + bias_j.

    mean(z) = sum_j g'(s_j) k_j; covariance_product(z, v) = beta sum_j g''(s_j) k_j <k_j, v>.

    A family defines the convex function g as `_summand`, with `_slope` and `_curvature`. A masked key adds nothing,
    neither g(0) nor g(-inf). There are no weights that sum to one, so that nothing is read out.
    """

    convex = True
    select = MaskedKeys.select
    row_block = MaskedKeys.row_block

    #: An upper bound on g''; infinite if there is none.
    _largest_curvature: float = math.inf

    @in_blocks
    def value(self, z: States) -> PerRow:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self._sum(*self._scored(z))

    @in_blocks
    def mean(self, z: States) -> States:
        """sum_j g'(s_j) k_j, (*batch, N, D) -> (*batch, N, D)."""
        return self._pull(*self._scored(z))

    @in_blocks
    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        scored = self._scored(z)
        return self._sum(*scored), self._pull(*scored)

    def covariance_product(self, z: States, v: States) -> States:
        """beta sum_j g''(s_j) k_j <k_j, v>, per row."""
        read, scores, beta = self._scored(z)
        fold, keys = read.fold, read.keys
        weighted = read.zero_unread(self._curvature(scores, beta)) * fold.product(fold.moved(v), keys.mT)
        return self._scale * read.finish(fold.product(weighted, keys), rows=True)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        read, scores, beta = self._scored(z)
        curvature = read.zero_unread(self._curvature(scores, beta))
        slope = read.zero_unread(self._slope(scores, beta))
        return self._covariance_map(z, read, slope, lambda change: curvature * change)

    def bounded_below(self, scale: float) -> bool | None:
        """True if scale sup g'' beta lambda_max(K^T K) < 1, False where the energy falls for ever along a ray."""
        if scale == 0 or super().bounded_below(scale) or not bool(self._keys_read().any()):
            return True
        ray = self.falling_ray(scale)
        return False if ray is not None and bool((scale > ray.limit).any()) else None

    @property
    def _read_together(self) -> bool:
        """Whether the shapes say that every query reads the same keys."""
        return all(pairs is None or pairs.ndim == 1 or pairs.shape[-2] == 1 for pairs in (self.mask, self.bias))

    def lipschitz(self) -> Tensor | None:
        """sup g'' beta lambda_max(K^T K), (*batch); None where g'' is unbounded."""
        largest = self._largest_curvature
        return None if math.isinf(largest) else self._bound(self._keys_read(), largest)

    # The function g, for scores and a beta that broadcasts to them.

    def _summand(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        """g(s)."""
        raise NotImplementedError

    def _slope(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        """g'(s)."""
        raise NotImplementedError

    def _curvature(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        """g''(s)."""
        raise NotImplementedError

    # Parts.

    def _scored(self, z: Tensor) -> tuple[Read, Tensor, float | Tensor]:
        """Return the keys that are read, and scores and beta in their layout."""
        read, beta = self._read(z), self._scale
        return read, self._scores_read(z, read), read.fold.moved(beta) if isinstance(beta, Tensor) else beta

    def _sum(self, read: Read, scores: Tensor, beta: float | Tensor) -> Tensor:
        return read.finish(read.zero_unread(self._summand(scores, beta)).sum(-1)) / self._row_scale

    def _pull(self, read: Read, scores: Tensor, beta: float | Tensor) -> Tensor:
        slope = read.zero_unread(self._slope(scores, beta))
        return read.finish(read.fold.product(slope, read.keys), rows=True)


class Polynomial(SummedScores):
    r"""Dense associative memory of degree n.

    ```math
    \Phi(z) = \frac\beta n \sum_j \left[ \langle k_j, z \rangle + \text{bias}_j/\beta \right]_+^n
    ```

    In scores s_j = beta <k_j, z> + bias_j it is (1/beta) sum_j g(s_j) with g(s) = (s^2/n) (s/beta)^(n - 2) for s > 0.
    mean(z) = beta sum_j relu(...)_j^(n-1) k_j. Degree 2 with beta 1 is the memory of the Energy Transformer, whose
    energy is -Phi.

    At degree 2 the anchored energy is bounded below while (1 - anchor) beta lambda_max(K^T K) < 1, K the matrix of
    keys. At a higher degree it is not, unless all keys are 0: keep its states at a fixed length. `AnchoredEnergy`
    refuses what is certain to fall, unless its option `unbounded` says otherwise.

    Args:
        keys: (*batch, M, D).
        beta: > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        degree: n, an integer >= 2.
        **masks: `mask`, boolean, broadcasts to (*batch, N, M); True = the query reads the key. A masked key adds
            nothing; `bias`, added to the scores beta <k_j, z>, broadcasts to (*batch, N, M); -inf masks.

    Raises:
        TypeError, ValueError: as `LogSumExp`; a degree that is no integer >= 2.

    Gradients: with respect to z, keys, beta and bias, to any order. At a score of 0 the derivative of order `degree`
    jumps; 0 is taken there.

    Reference: Krotov and Hopfield (2016), rectified polynomials; Hoover et al. (2023), Energy Transformer, degree 2.

    Not for a read-out of values: there are no weights that sum to one, so that layers take readout="state". Not for
    softmax attention: use `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.potentials import Polynomial
        >>> phi = Polynomial(torch.eye(2), beta=1.0, degree=3)
        >>> phi.mean(torch.tensor([[2.0, -1.0]])), phi.bounded_below(0.5)
        (tensor([[4., 0.]]), False)
        >>> ImplicitAttention(8, heads=2, potential=Polynomial, readout="state")(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    declares_all = True
    _attributes = (*SummedScores._attributes, "degree")

    def __init__(self, keys: Keys, beta: PerBatch, *, degree: int = 2, **masks: Unpack[Masks]) -> None:
        super().__init__(keys, beta, **masks)
        self.degree: int = _validate.check_integer("degree", degree, low=2, remedy="degree 1 pulls all alike")

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        cov, beta, power = super().linearize(z), self.beta, 2 - self.degree
        if cov is None or power == 0 or not isinstance(beta, Tensor):
            return cov

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            by_keys, by_beta, *others = cov.vjp_tensors(u)
            assert by_beta is not None
            # At fixed scores the mean goes like beta^(2 - degree).
            own = sum_to_shape((u * self.mean(z)).sum((-1, -2)), beta.shape)
            return by_keys, by_beta + power * own / beta, *others

        return CovarianceMap(cov.product, pullback)

    @property
    def _largest_curvature(self) -> float:  # type: ignore[override]
        return 1.0 if self.degree == 2 else math.inf

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray:
        """Return a direction that many keys share, found by ascent, at degree 2; else the longest key."""
        keys = self._keys_read()
        if self.degree > 2:
            return faster_ray(keys)
        return quadratic_ray(keys, self.beta, scale, rectified=True, together=self._read_together)

    def _summand(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        return scores * self._slope(scores, beta) / self.degree

    def _slope(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        above = scores.relu()
        return above if self.degree == 2 else above * (above / beta).pow(self.degree - 2)

    def _curvature(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        if self.degree == 2:
            return (scores > 0).to(scores.dtype)
        return (self.degree - 1) * (scores.relu() / beta).pow(self.degree - 2)


class Exponential(SummedScores):
    r"""Log-sum-exp without the logarithm.

    ```math
    \Phi(z) = \frac1\beta \sum_j e^{\beta \langle k_j, z \rangle + \text{bias}_j}
    ```

    mean(z) = sum_j exp(s_j) k_j, attention whose weights are not normalised. Its keys do not compete: all with a score
    above 0 pull, by more than their own length.

    The anchored energy is never bounded below, unless all keys are 0: `AnchoredEnergy` refuses it. In float32 it
    overflows at scores above 88.

    Args:
        keys: (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        mask: boolean, broadcasts to (*batch, N, M); True = the query reads the key. A masked key adds nothing.
        bias: added to the scores beta <k_j, z>, broadcasts to (*batch, N, M); -inf masks.

    Raises:
        TypeError, ValueError: as `LogSumExp`.

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Demircigil et al. (2017), exponential interaction.

    Not for a read-out of values: there are no weights that sum to one, so that layers take readout="state". Not for
    states without a bound on their length: use `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import Exponential
        >>> phi = Exponential(torch.eye(2), beta=2.0)
        >>> phi.value(torch.zeros(1, 2)), phi.bounded_below(0.5)
        (tensor([1.]), False)
    """

    declares_all = True

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray:
        """The longest key, at every scale."""
        return faster_ray(self._keys_read())

    def _summand(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        return scores.exp()

    _slope = _curvature = _summand


class UnitScores(SummedScores):
    """The potential that `units_potential` makes: g is the cumulant K of a law."""

    declares_all = True
    _attributes = (*SummedScores._attributes, "units")

    def __init__(self, keys: Keys, beta: PerBatch, units: Units, **masks: Unpack[Masks]) -> None:
        super().__init__(keys, beta, **masks)
        self.units = units

    def bounded_below(self, scale: float) -> bool | None:
        return True if self.units.linear_growth else super().bounded_below(scale)

    @property
    def _largest_curvature(self) -> float:  # type: ignore[override]
        return self.units.largest_variance

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray | None:
        """Return the ray of the law: of Gaussian units from a scale on, of Poisson units at every scale."""
        return units_ray(self.units, self._keys_read, self.beta, scale, together=self._read_together)

    def _summand(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        return self.units.cumulant(scores)

    def _slope(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        return self.units.mean(scores)

    def _curvature(self, scores: Tensor, beta: float | Tensor) -> Tensor:
        return self.units.variance(scores)


class _Factory(Protocol):
    def __call__(self, keys: Keys, beta: PerBatch, *, mask: Mask = None, bias: Bias = None) -> UnitScores: ...


def units_potential(units: Units) -> _Factory:
    """A factory (keys, beta, *, mask, bias) of the potential of hidden units of any law, one for every key.

    Phi(z) = (1/beta) sum_j K(s_j) with s_j = beta <k_j, z> + bias_j and the law's cumulant K;
    mean(z) = sum_j K'(s_j) k_j; covariance_product(z, v) = beta sum_j K''(s_j) k_j <k_j, v>.
    At beta 1 it is `HiddenUnits(keys.mT, units)`, with masks and biases.

    Args:
        units: the law, for example `BernoulliUnits(0.5)`.

    Returns:
        A function that layers take as `potential`. Its arguments are keys (*batch, M, D), beta > 0 (a float or a tensor
        that broadcasts to *batch), and by name a boolean mask or a bias that broadcast to (*batch, N, M). A masked key,
        or one of bias -inf, adds nothing; a low finite bias does not mask, as K may have any value there.

    A row with a score outside the domain of K (`ExponentialUnits`, `LaplaceUnits`) has value and mean NaN; no other row
    is changed. The anchored energy is bounded below for laws of linear growth, and for others while
    (1 - anchor) beta max K'' lambda < 1 with lambda the largest eigenvalue of sum_j k_j k_j^T.

    Raises:
        TypeError, ValueError: units that are no `Units`, or `SphereUnits()` without a dimension; from the returned
            function, as `LogSumExp`.

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Krotov and Hopfield (2021), for memory neurons that are summed over.

    Not for a read-out of values: there are no weights that sum to one, so that layers take readout="state". Not for
    units that exclude each other, of which one is on at a time: that is `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.potentials import SignUnits, units_potential
        >>> phi = units_potential(SignUnits())(torch.eye(2), beta=2.0)
        >>> phi.mean(torch.tensor([[0.5, -3.0]]))
        tensor([[ 0.7616, -1.0000]])
        >>> layer = ImplicitAttention(8, heads=2, potential=units_potential(SignUnits()), readout="state")
        >>> layer(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """
    check_units(units)
    return partial(UnitScores, units=units)
