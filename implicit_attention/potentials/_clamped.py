"""States with known entries: a potential that keeps these fixed, and estimates of the others from patterns."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .._torch import at_least_single, exact_precision, sum_to_shape
from ._shapes import PerRow, ReadOut, States, Values, Weights
from .base import Composite, CovarianceMap, Potential
from .log_sum_exp import LogSumExp
from .scored_keys import ReadsOut


class Clamped(Composite):
    """Phi of states whose known entries are fixed at x: Phi(y) + <x, P z - x>, with y = x on known entries, else z.

    Its mean is x on the known entries (P projects on them) and mean(y) on the others, so that |z|^2/2 less this
    potential is stationary where z has the known entries and the others solve z = mean(z). There it is that of Phi.

    Args:
        potential: Phi.
        known: which entries are known, of the shape of the states.
        at: x, of that shape; zeros where nothing is known.
    """

    declares_all = True
    _by_row = ("known", "at")

    def __init__(self, potential: Potential, known: Bool[Tensor, "*batch N D"], at: States) -> None:
        super().__init__(potential)
        self.known, self.at = known, at

    def _clamped(self, z: Tensor) -> Tensor:
        return z.where(~self.known, self.at)

    def _unknown(self, v: Tensor) -> Tensor:
        return v.where(~self.known, 0.0)

    def value(self, z: States) -> PerRow:
        """Phi(y) + <x, P z - x>, (*batch, N, D) -> (*batch, N)."""
        return self.parts[0].value(self._clamped(z)) + self._linear_term(z)

    def _linear_term(self, z: Tensor) -> Tensor:
        return (self.at * (z - self.at)).where(self.known, 0.0).sum(-1)

    def mean(self, z: States) -> States:
        """The known entries, and the mean of the others, (*batch, N, D) -> (*batch, N, D)."""
        return self._clamped(self.parts[0].mean(self._clamped(z)))

    def covariance_product(self, z: States, v: States) -> States:
        """The covariance among the unknown entries times theirs, zeros for the known ones."""
        return self._unknown(self.parts[0].covariance_product(self._clamped(z), self._unknown(v)))

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, mean = self.parts[0].evaluate(self._clamped(z))
        return value + self._linear_term(z), self._clamped(mean)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        cov = self.parts[0].linearize(self._clamped(z))
        if cov is None or not self._has_only("parts", "known", "at"):
            return None

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            by_mean = self._unknown(u)
            by_at = (u + cov.product(by_mean)).where(self.known, 0.0)
            return *cov.vjp_tensors(by_mean), None, sum_to_shape(by_at, self.at.shape)

        return CovarianceMap(lambda v: self._unknown(cov.product(self._unknown(v))), pullback)

    def probabilities(self, z: States) -> Weights:
        """Those of Phi at y, (*batch, N, M)."""
        return self._weighing.probabilities(self._clamped(z))

    def readout(self, z: States, values: Values, *, dropout_p: float = 0.0) -> ReadOut:
        """probabilities(z) V; see `LogSumExp.readout`."""
        return self._weighing.readout(self._clamped(z), values, dropout_p=dropout_p)

    @property
    def _weighing(self) -> ReadsOut:
        part = self.parts[0]
        assert isinstance(part, ReadsOut)
        return part

    def bounded_below(self, scale: float) -> bool | None:
        # The linear term takes a little of |z|^2/2.
        return self.parts[0].bounded_below(math.inf) or self.parts[0].bounded_below(scale * (1 + 1e-6)) or None

    def lipschitz(self) -> Tensor | None:
        return self.parts[0].lipschitz()


def filled(
    queries: States, known: Bool[Tensor, "*#batch #N #D"], patterns: Float[Tensor, "M D"], beta: float | Tensor
) -> States:
    """Fill the unknown entries of queries with averages of the patterns, by the distances over the known entries.

    The averages are sum_j p_j k_j with p = softmax_j(-beta |P (query - k_j)|^2/2): the mean of Gaussians of variance
    1/beta around the patterns k_j, given the known entries (P projects on them).

    Returns:
        (*batch, N, D); the unknown entries of the queries are not read.
    """
    known, dtype = known.expand(queries.shape), queries.dtype
    with exact_precision(queries):
        queries, patterns = at_least_single(queries), at_least_single(patterns)
        beta = beta.to(queries.dtype) if isinstance(beta, Tensor) else beta
        # |P (q - k)|^2 is linear in P q and P, up to a term that all patterns share; centred it loses fewer digits.
        centre = patterns.mean(0)
        own = (queries - centre).where(known, 0.0)
        around = patterns - centre
        scores = LogSumExp(torch.cat([around, around.square() / -2], -1), beta)
        expected = scores.readout(torch.cat([own, known.to(own)], -1), patterns)
        return queries.where(known, expected).to(dtype)
