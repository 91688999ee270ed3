"""The energy of keys with a finite range, whose plain steps are mean shift."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from ..potentials.masked_keys import MaskedKeys, common
from ..problem import Evaluation, Linearization, pullback
from .base import Energy


class Epanechnikov(Energy):
    """E(z) = -(1/beta) log(eps + sum_j w_j relu(1 - (beta/2) |z - k_j|^2)): memory that reads the keys in range alone.

    A key is in range where |z - k_j|^2 < 2/beta; w_j = exp(bias_j), 1 without a bias. Plain steps are mean shift:
    f(z) = m, the mean of the keys in range, weighted by w. With W the sum of their weights and S that of the logarithm,
    grad E(z) = a (z - m), a = W/S, and Hess E v = a v + beta grad E <grad E, v>: positive definite as long as the same
    keys are in range. Across the borders of these cells E has kinks, it is not convex, and may have a minimum for every
    key and every group of keys.

    f(z) - z is -grad E divided by a: residual and tolerance are those of the map. Plain steps descend,
    E(f(z)) <= E(z) - |f(z) - z|^2/(2 (1 + eps/W)), and end after finitely many, exactly: f is constant in a cell, so
    that a solution is the mean of the keys in range, dz/dk_j = w_j/W I for these and 0 for others, and dz/dbeta = 0.

    A state with no key in range (or with every key masked) has E = -(1/beta) log eps (at eps 0 infinity) and gradient
    0. It stays where it is, with the residual 0 and the status OUT_OF_RANGE, a failure; its gradients are 0.

    Args:
        keys: (*batch, M, D).
        beta: inverse temperature > 0 in units of 1/|k|^2, a float or a tensor that broadcasts to *batch. The range of a
            key is sqrt(2/beta).
        eps: >= 0, what the logarithm has where no key is in range. It changes E, but no solution.
        mask: boolean, broadcasts to (*batch, N, M); True = the query reads the key.
        bias: the logarithms of the weights w, broadcasts to (*batch, N, M); -inf masks.

    Raises:
        TypeError, ValueError: as `LogSumExp`; eps < 0.

    Gradients: with respect to keys and bias, to any order. Those of solutions with respect to beta are 0.

    Not for states far from all keys, which nothing pulls, nor for a smooth dependence on the start: use
    `AnchoredEnergy` over `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.energies import Epanechnikov
        >>> keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
        >>> start = torch.tensor([[0.5, 0.4], [4.0, 5.0], [9.0, 0.0]])
        >>> solution = solve(Epanechnikov(keys, beta=1.0), start, on_failure="ignore")
        >>> solution.value.tolist()
        [[0.5, 0.0], [5.0, 5.0], [9.0, 0.0]]
        >>> solution.converged
        tensor([ True,  True, False])
    """

    event_ndim = 1
    plain_steps_descend = True
    steps_rescaled = True
    if_outside = "no key is within sqrt(2/beta) of the state, which stays: lower beta, or start nearer to the keys"

    def __init__(
        self,
        keys: Float[Tensor, "*batch M D"],
        beta: float | Float[Tensor, "*#batch"],
        eps: float = 0.0,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        self.memory = MaskedKeys(keys, beta, mask=mask, bias=bias)
        self.eps: float = _validate.check_number("eps", eps, low=0.0)

    @property
    def row_block(self) -> int:  # type: ignore[override]
        return self.memory.row_block

    def check_state(self, z: Tensor) -> None:
        self.memory.check_state("initial", z)

    def energy(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """E(z), one number per query, (*batch, N, D) -> (*batch, N)."""
        return self._energy(self._cell(z))

    def fixed_point_map(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """f(z), the mean of the keys in range; z where there are none."""
        return self._shifted(z, self._cell(z))

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        cell = self._cell(z)
        return Evaluation(self._shifted(z, cell), self._energy(cell) if energy else None)

    def gradient(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """Grad E(z) = a (z - m)."""
        cell = self._cell(z)
        return self._steepness(cell) * (z - self._shifted(z, cell))

    def hessian_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess E(z) v = a v + beta grad E <grad E, v>."""
        cell = self._cell(z)
        steepness = self._steepness(cell)
        gradient = steepness * (z - self._shifted(z, cell))
        return steepness * v + self.memory._scale * gradient * (gradient * v).sum(-1, keepdim=True)

    def linearize(self, z: Tensor) -> Linearization:
        """df/dz = 0. (It is I where no key is in range, but no tensor moves such a state.)"""
        return Linearization(torch.zeros_like, torch.zeros_like, lambda u: pullback(self, z, u))

    def outside(self, z: Tensor) -> Tensor:
        return self._cell(z).alone

    def select(self, index: Tensor) -> Self | None:
        memory = self.memory.select(index)
        if memory is None or not self._has_only("memory", "eps"):
            return None
        clone = self.replace(*self.tensors())
        clone.memory = memory
        return clone

    def _cell(self, z: Tensor) -> _Cell:
        read = self.memory._read(z)
        fold, scale = read.fold, self.memory._scale
        # Matrix products tell no distance that is small beside the keys themselves.
        centre = common(read.keys)
        moved, keys = fold.moved(z), read.keys - centre
        between = (1,) * (moved.ndim - keys.ndim)

        def beside(t: Tensor) -> Tensor:
            """(*kept, X, Y) with the axes that are folded."""
            return t.reshape(*t.shape[:-2], *between, *t.shape[-2:])

        moved = moved - beside(centre)
        squares = moved.square().sum(-1, keepdim=True) + beside(keys.square().sum(-1)[..., None, :])
        half = fold.moved(scale) / 2 if isinstance(scale, Tensor) else scale / 2
        kernel = 1 - half * (squares - 2 * fold.product(moved, keys.mT))
        bias = None if read.pairs is None or read.pairs.dtype == torch.bool else read.pairs
        scores = read.zero_unread(kernel if bias is None else kernel + bias)
        poison = torch.where(torch.isfinite(scores).all(-1), 0.0, torch.nan).to(z.dtype)
        poison = poison if read.poison is None else poison + read.poison
        inside = kernel > 0 if read.attended is None else (kernel > 0) & read.attended
        alone = ~inside.any(-1)
        # Rows without a key get finite numbers, which are replaced below.
        none = alone[..., None]
        logits = torch.zeros_like(kernel) if bias is None else bias.expand_as(kernel)
        logits = logits.masked_fill(~inside, -torch.inf).masked_fill(none, 0.0)
        weighted = logits + kernel.where(inside, 1.0).log()
        total = weighted.logsumexp(-1)
        if self.eps > 0:
            total = torch.logaddexp(total, torch.full_like(total, math.log(self.eps)))
        nothing = math.log(self.eps) if self.eps > 0 else -torch.inf
        mean = fold.product(logits.softmax(-1), read.keys) + poison[..., None]
        weight = logits.logsumexp(-1) - total
        total = total.masked_fill(alone, nothing) + poison
        steepness = weight.exp().masked_fill(alone, 0.0) + poison
        return _Cell(*map(fold.restored, (mean, total, steepness, alone & (poison == 0))))

    def _energy(self, cell: _Cell) -> Tensor:
        return -cell.total / self.memory._row_scale

    def _shifted(self, z: Tensor, cell: _Cell) -> Tensor:
        return z.where(cell.alone[..., None], cell.mean)

    def _steepness(self, cell: _Cell) -> Tensor:
        return cell.steepness[..., None]


class _Cell(NamedTuple):
    """What states (*batch, N, D) have in range.

    The mean of the keys, log S, a = W/S with the sum W of the weights, and whether there is none.
    """

    mean: Tensor
    total: Tensor
    steepness: Tensor
    alone: Tensor
