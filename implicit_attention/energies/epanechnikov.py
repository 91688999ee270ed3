"""The energy of keys with a finite range, whose plain steps are mean shift."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import host_may_look
from ..potentials._attention import common
from ..potentials._shapes import Bias, Keys, Mask, PerBatch, PerRow, States, of_part
from ..potentials.masked_keys import MaskedKeys, Read
from ..problem import Evaluation, Linearization, pullback
from ..solution import Status
from .base import Energy

#: The largest (beta/2) |k|^2 at which float32 tells 1 - (beta/2) |z - k|^2 to 1e-5.
LARGEST = 16.0


class Epanechnikov(Energy):
    r"""The energy of a memory that reads the keys in range alone.

    ```math
    E(z) = -\frac1\beta \log \left( \varepsilon + \sum_j w_j \left[ 1 - \tfrac\beta2 |z - k_j|^2 \right]_+ \right)
    ```

    A key is in range where |z - k_j|^2 < 2/beta; w_j = exp(bias_j), 1 without a bias. Plain steps are mean shift:
    f(z) = m, the mean of the keys in range, weighted by w. With W the sum of their weights and S that of the logarithm,
    grad E(z) = a (z - m), a = W/S, and Hess E v = a v + beta grad E <grad E, v>: positive definite as long as the same
    keys are in range. Across the borders of these cells E has kinks, it is not convex, and may have a minimum for every
    key and every group of keys.

    f(z) - z is -grad E divided by a: residual and tolerance are those of the map. Plain steps descend,
    E(f(z)) <= E(z) - |f(z) - z|^2/(2 (1 + eps/W)), and end after finitely many, exactly: f is constant in a cell, so
    that a solution is the mean of the keys in range, dz/dk_j = w_j/W I for these and 0 for others, and dz/dbeta = 0.

    In float32 on a CPU, distances are computed in float64 where (beta/2) |k|^2 > 16 from the centre of all keys,
    because matrix products in float32 do not resolve them; on accelerators use float64 there.

    A state with no key in range (or with every key masked) has E = -(1/beta) log eps (at eps 0 infinity) and gradient
    0. It stays where it is, with the residual 0 and the status OUT_OF_RANGE, a failure; its gradients are 0.

    Args:
        keys: (*batch, M, D).
        beta: inverse temperature > 0 in units of 1/|k|^2, a float or a tensor that broadcasts to *batch. The range of a
            key is sqrt(2/beta).
        eps: >= 0, added inside the logarithm. It changes E, but no solution.
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
    row_block: int = of_part("memory", "row_block")
    plain_steps_descend = True
    steps_rescaled = True
    if_bottomless = ""

    def __init__(self, keys: Keys, beta: PerBatch, eps: float = 0.0, *, mask: Mask = None, bias: Bias = None) -> None:
        self.memory = MaskedKeys(keys, beta, mask=mask, bias=bias)
        self.eps: float = _validate.check_number("eps", eps, low=0.0)

    def check_state(self, z: Tensor) -> None:
        self.memory.check_state("initial", z)

    def energy(self, z: States) -> PerRow:
        """E(z), one number per query, (*batch, N, D) -> (*batch, N)."""
        return self._energy(self._cell(z))

    def fixed_point_map(self, z: States) -> States:
        """f(z), the mean of the keys in range; z where there are none."""
        return self._cell(z).mean(z)

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        cell = self._cell(z)
        return Evaluation(cell.mean(z), self._energy(cell) if energy else None)

    def gradient(self, z: States) -> States:
        """Grad E(z) = a (z - m)."""
        cell = self._cell(z)
        return cell.steepness(self.eps)[..., None] * (z - cell.mean(z))

    def hessian_product(self, z: States, v: States) -> States:
        """Hess E(z) v = a v + beta grad E <grad E, v>."""
        cell = self._cell(z)
        steepness = cell.steepness(self.eps)[..., None]
        gradient = steepness * (z - cell.mean(z))
        return steepness * v + self.memory._scale * gradient * (gradient * v).sum(-1, keepdim=True)

    def linearize(self, z: Tensor) -> Linearization:
        """df/dz = 0. (It is I where no key is in range, but no tensor moves such a state.)"""
        return Linearization(torch.zeros_like, torch.zeros_like, lambda u: pullback(self, z, u))

    def advice(self, remedies: Mapping[Status, str]) -> dict[Status, str]:
        far = "no key is within sqrt(2/beta) of the state, which stays: lower beta, or start nearer to the keys"
        return super().advice(remedies) | {Status.OUT_OF_RANGE: far}

    def outside(self, z: Tensor) -> Tensor:
        cell = self._cell(z)
        return cell.read.fold.restored(cell.none & (cell.poison == 0))

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
        moved = moved - centre.reshape(*centre.shape[:-2], *(1,) * (moved.ndim - keys.ndim), *centre.shape[-2:])
        half = fold.moved(scale) / 2 if isinstance(scale, Tensor) else torch.full_like(moved[..., :1], scale / 2)
        if _loses_digits(moved, keys, half):
            moved, keys, half = moved.double(), keys.double(), half.double()
        # 1 - (beta/2) (|z|^2 - 2 <z, k> + |k|^2) as one product: fewer passes over the pairs.
        offset, half = 1 - half * moved.square().sum(-1, keepdim=True), half.expand(*moved.shape[:-1], 1)
        squares = keys.square().sum(-1, keepdim=True)
        left = torch.cat([2 * half * moved, offset, -half], dim=-1)
        kernel = fold.product(left, torch.cat([keys, torch.ones_like(squares), squares], dim=-1).mT).to(z.dtype)
        bias = None if read.pairs is None or read.pairs.dtype == torch.bool else read.pairs
        low, high = torch.aminmax(
            read.zero_unread(kernel.detach() if bias is None else (kernel + bias).detach()), dim=-1
        )
        poison = torch.where((low > -torch.inf) & (high < torch.inf), 0.0, torch.nan).to(z.dtype)
        poison = poison if read.poison is None else poison + read.poison
        inside = kernel > 0 if read.attended is None else (kernel > 0) & read.attended
        count = inside.to(z.dtype).sum(-1)
        return _Cell(read, kernel, inside, count.clamp(min=1), (count == 0) | poison.isnan(), bias, poison)

    def _energy(self, cell: _Cell) -> Tensor:
        return -cell.read.fold.restored(cell.log_sum(self.eps)) / self.memory._row_scale


@torch.no_grad()
def _loses_digits(moved: Tensor, keys: Tensor, half: Tensor) -> bool:
    """Whether float32 is too coarse to tell which keys are in range; checked on a CPU only.

    Keys in several distant groups have no common centre nearby.
    """
    if moved.dtype != torch.float32 or not host_may_look(moved, keys, half) or 0 in (moved.numel(), keys.numel()):
        return False
    longest = [t.square().sum(-1).nan_to_num(0.0, 0.0).amax() for t in (moved, keys)]
    return bool(half.nan_to_num(0.0, 0.0).abs().amax() * torch.maximum(*longest) > LARGEST)


class _Cell(NamedTuple):
    """The keys in range of states, in the layout of `read`.

    kernel, inside: 1 - (beta/2) |z - k|^2, and whether the key is in range, (..., N, M).
    number: the number of keys in range, at least 1, (..., N).
    none: which states have none, or read a number that is not finite, (..., N).
    bias: that of the pairs, if there is one.
    poison: NaN for states that read a number that is not finite, else 0.
    """

    read: Read
    kernel: Tensor
    inside: Tensor
    number: Tensor
    none: Tensor
    bias: Tensor | None
    poison: Tensor

    def mean(self, z: Tensor) -> Tensor:
        """m, and z where there is none, (*batch, N, D)."""
        fold = self.read.fold
        weights = self.inside.to(z.dtype) if self.bias is None else self._logits(self.bias).softmax(-1)
        mean = fold.product(weights, self.read.keys)
        mean = mean / self.number[..., None] if self.bias is None else mean
        return z.where(fold.restored(self.none)[..., None], fold.restored(mean)) + fold.restored(self.poison)[..., None]

    def log_sum(self, eps: float) -> Tensor:
        """log S; log eps where nothing is in range."""
        if self.bias is None:
            total = (self.kernel.where(self.inside, 0.0).sum(-1) + eps).masked_fill(self.none, 1.0).log()
        else:
            total = (self._logits(self.bias) + self.kernel.where(self.inside, 1.0).log()).logsumexp(-1)
            total = torch.logaddexp(total, torch.full_like(total, math.log(eps))) if eps > 0 else total
        return total.masked_fill(self.none, math.log(eps) if eps > 0 else -torch.inf) + self.poison

    def steepness(self, eps: float) -> Tensor:
        """a = W/S, and 0 where nothing is in range, (*batch, N)."""
        weight = self.number.log() if self.bias is None else self._logits(self.bias).logsumexp(-1)
        steepness = (weight - self.log_sum(eps).masked_fill(self.none, 0.0)).exp()
        return self.read.fold.restored(steepness.masked_fill(self.none, 0.0) + self.poison)

    def _logits(self, bias: Tensor) -> Tensor:
        """Return log w of the keys in range, -inf for others; zeros for states that read no key, to be replaced."""
        logits = bias.expand_as(self.kernel).masked_fill(~self.inside, -torch.inf)
        return logits.masked_fill(self.none[..., None], 0.0)
