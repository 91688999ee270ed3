"""One process's part of a softmax over keys that are spread over processes, at the log-sum-exp of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import sum_to_shape
from ..potentials import LogSumExp
from ..potentials.log_sum_exp import CUTOFF
from ..potentials.masked_keys import Read

# The largest number of weights that are kept for all products at a state; each product computes more than that again.
KEPT = 2**24
# Number of weights in a tile.
TILE = 2**18


def read_local(local: LogSumExp, z: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """The read-out of the local values (None: keys) and log-sum-exp, -inf for a query that attends to none of them."""
    return local.readout_with_logsumexp(z, local.keys if values is None else values)


class KeyTile(NamedTuple):
    """Keys from `start` to `stop` as they are read, and their weights (*kept, *folded, N, m) if these are kept."""

    read: Read
    weights: Tensor | None
    start: int
    stop: int


class LocalWeights:
    """The weights p_ij = exp(s_ij - logsumexp_i) of the local keys, and products with them, in tiles; without graph.

    Args:
        local: the potential of the local keys.
        z: states, (*batch, N, D).
        values: (*batch, M, E), or None for the keys.
        logsumexp: over the keys of all processes, (*batch, N).
    """

    def __init__(self, local: LogSumExp, z: Tensor, values: Tensor | None, logsumexp: Tensor) -> None:
        self.local, self.z = local, z
        self.values = None if values is None else values.shape
        self.read = local._read(z, values)
        self.fold = self.read.fold
        # A query that attends to nothing has the weight 0 everywhere.
        top = logsumexp.where(logsumexp > -torch.inf, torch.inf).where(~logsumexp.isnan(), torch.nan)
        self.top = self.fold.moved(top[..., None])
        count, rows = local.keys.shape[-2], max(z.shape[:-1].numel(), 1)
        self.size = max(TILE // rows, 1) if rows * count > TILE else max(count, 1)
        self.tiles = [self._tile(start, min(start + self.size, count)) for start in range(0, count, self.size)]
        if rows * count <= KEPT:
            self.tiles = [tile._replace(weights=self._weights(tile.read)) for tile in self.tiles]

    def _tile(self, start: int, stop: int) -> KeyTile:
        read, size = self.read, stop - start
        pairs = read.pairs
        if pairs is not None and pairs.shape[-1] > 1:
            pairs = pairs.narrow(-1, start, size)
        keys, values = (t.narrow(-2, start, size) for t in (read.keys, read.values))
        return KeyTile(read._replace(keys=keys, values=values, pairs=pairs), None, start, stop)

    def _weights(self, read: Read) -> Tensor:
        cutoff = CUTOFF[self.z.dtype]
        shifted = (self.local._scores(self.z, read) - self.top).clamp_(min=-cutoff)
        return read.zero_empty(shifted.exp().masked_fill_(shifted <= -cutoff, 0.0), rows=True)

    def _all(self) -> Iterator[tuple[KeyTile, Tensor]]:
        for tile in self.tiles:
            yield tile, self._weights(tile.read) if tile.weights is None else tile.weights

    def spread(self, mean: Tensor, v: Tensor) -> Tensor:
        """sum_j p_j (k_j - mean) <k_j - mean, v> over the local keys, for the mean of all keys; (*batch, N, D)."""
        fold, mean, v = self.fold, self.fold.moved(mean), self.fold.moved(v)
        along, total = (mean * v).sum(-1, keepdim=True), torch.zeros_like(v)
        for tile, p in self._all():
            keys = tile.read.keys
            weighted = fold.product(v, keys.mT).sub_(along).mul_(p)
            # Both sides are centred: where one key has all the weight, little is left of numbers that cancel.
            total += fold.product(weighted, keys).addcmul_(mean, weighted.sum(-1, keepdim=True), value=-1.0)
        return fold.restored(total)

    def gradients(
        self, out: Tensor, by_out: Tensor, by_logsumexp: Tensor | None, *, by_states: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of a loss by the scores' side of z (to be summed over processes), keys, values and bias.

        The first, sum_j a_j k_j with a = p (<v_j - out, by_out> + by_logsumexp), is the gradient by beta z. out is the
        read-out over all keys. Where the keys are the values, theirs is the whole gradient.
        """
        fold, local = self.fold, self.local
        rows, g = fold.rows, fold.moved(by_out)
        scaled = fold.moved(local._scale * self.z)
        along = (fold.moved(out) * g).sum(-1, keepdim=True)
        if by_logsumexp is not None:
            along = along - fold.moved(by_logsumexp[..., None])
        by_state = torch.zeros_like(scaled) if by_states else None
        by_keys, by_values, by_bias = [], [], []
        for tile, p in self._all():
            a = fold.product(g, tile.read.values.mT).sub_(along).mul_(p)
            if by_state is not None:
                by_state += fold.product(a, tile.read.keys)
            by_keys.append(rows(a).mT @ rows(scaled))
            by_value = rows(p).mT @ rows(g)
            if self.values is None:
                # Added up while the tile is in the processor's cache.
                by_keys[-1] += by_value
            else:
                by_values.append(by_value)
            if local.bias is not None:
                width = tile.stop - tile.start if local.bias.shape[-1] > 1 else 1
                by_bias.append(sum_to_shape(fold.restored(a), torch.Size((*local.bias.shape[:-1], width))))
        bias = None if local.bias is None else sum_to_shape(torch.cat(by_bias, -1), local.bias.shape)
        keys = self._unfolded(by_keys, local.keys.shape)
        values = None if self.values is None else self._unfolded(by_values, self.values)
        return None if by_state is None else fold.restored(by_state), keys, values, bias

    def _unfolded(self, parts: list[Tensor], shape: torch.Size) -> Tensor:
        """Gradients (*kept, m, X) of the tiles as one tensor of keys or values of this shape."""
        fold, whole = self.fold, torch.cat(parts, -2)
        ones = (1,) * (len(fold.order) - fold.kept)
        return sum_to_shape(fold.restored(whole.reshape(*whole.shape[: fold.kept], *ones, *whole.shape[-2:])), shape)

    def probabilities(self) -> Tensor:
        """All weights of the local keys, (*batch, N, M)."""
        return self.fold.restored(torch.cat([p for _, p in self._all()], -1))
