"""The working set of a batch of queries: E sets of keys, R queries each, from which finished ones can be dropped."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import Self

from ..attention import mean_and_logsumexp
from ..fold import Fold, addressable, aligned, row_block, widened
from ..problem import Hopfield, common

# Masks are laid out for at most so many pairs at once; a larger working set is evaluated in parts.
MOST_PAIRS = 2**24
# A new working set is made if it has less than this part of the rows, and frees at least so many rows or half.
COMPACT_BELOW, WORTH = 0.9, 256
# Smaller weights count as zero: they are invisible at that precision, and products of subnormal numbers cost ten times
# as much on a CPU.
LEAST = {torch.float32: math.exp(-40), torch.float64: math.exp(-300)}


class TiledRows:
    """States are flat, (E * R, D); `ids` (E * R) numbers them in the whole.

    Axes of the batch along which the keys do not change are laid beside the queries, so that nothing copies the keys.
    `keys` is (E, M, D), `field` (E * R, D), `beta` and `anchor` (#E, #R, 1), `empty` (#E, #R, 1) tells who attends to
    no key. D is widened by zeros to multiples of 16 bytes.
    """

    def __init__(self, problem: Hopfield, *, fused: bool) -> None:
        *batch, self.length, self.dim = problem.field.shape
        self.fold = Fold(torch.Size(batch), problem.keys.shape[:-2])
        self.shape = self.fold.moved(problem.field).shape[:-1]
        kept = self.fold.kept
        self.sets, self.count = self.shape[:kept].numel(), self.shape[kept:].numel()
        keys = problem.keys
        keys = self.fold.moved(keys).reshape(self.sets, keys.shape[-2], self.dim)
        self.keys = widened(keys, aligned(self.dim, keys.dtype)).contiguous()
        self.fused = fused
        self.device = keys.device
        self.block = row_block(self.dim, keys.shape[-2], keys.dtype)
        self.ids = torch.arange(self.sets * self.count, device=self.device)
        self.beta, self.anchor = self._laid(problem.beta), self._laid(problem.anchor)
        # Without an anchor the field is not read, so that NaN in it does not matter.
        self.field = self.laid(problem.field).flatten(0, 1).masked_fill(self.per_row(self.anchor) == 0, 0.0)
        self.first = problem.first
        self.mask: Tensor | None = None
        self.mask_rows: Tensor | None = None
        self.shared = 1
        if problem.mask is not None:
            # Rows of a mask are looked up, so that a shared mask is never repeated as a whole.
            lead = problem.mask.shape[:-1]
            self.mask = problem.mask.expand(*lead, keys.shape[-2]).reshape(-1, keys.shape[-2])
            numbers = self.fold.moved(torch.arange(len(self.mask), device=self.device).view(*lead, 1))
            own = next((axis + 1 for axis in reversed(range(kept)) if numbers.shape[axis] > 1), 0)
            #: So many sets in a row share the rows of a mask.
            self.shared = self.shape[own:kept].numel()
            rows = numbers.shape[kept:-1] if numbers.shape[kept:-1].numel() == 1 else self.shape[kept:]
            self.mask_rows = numbers.expand(*self.shape[:own], *numbers.shape[own:kept], *rows, 1).reshape(
                self.sets // self.shared, rows.numel(), 1
            )
        self.empty = self._empty()
        self._whole = True
        self._pairs: Tensor | None = None

    # Layout.

    def laid(self, states: Tensor) -> Tensor:
        """(*batch, N, D) as (E, R, D), widened, each row in one piece of memory."""
        flat = widened(self.fold.moved(states).reshape(-1, self.dim), self.keys.shape[-1])
        return addressable(flat).view(self.sets, self.count, -1)

    def restored(self, numbers: Tensor) -> Tensor:
        """(E * R, ...) of all queries as (*batch, N, ...)."""
        return self.fold.restored(numbers.view(*self.shape, *numbers.shape[1:]))

    def keys_restored(self, tensor: Tensor) -> Tensor:
        """(E, M, D) in the shape of the keys, (*#batch, M, D) up to missing axes of size 1."""
        lead = (*self.shape[: self.fold.kept], *(1,) * (len(self.shape) - 1 - self.fold.kept))
        tensor = tensor[..., : self.dim].reshape(*lead, *tensor.shape[1:2], self.dim)
        return tensor if self.fold.in_order else tensor.permute(*self.fold.inverse, -2, -1)

    def per_row(self, numbers: Tensor) -> Tensor:
        """(#E, #R, 1) as (E * R, 1)."""
        return numbers.expand(self.sets, self.count, 1).reshape(-1, 1)

    def _laid(self, tensor: Tensor) -> Tensor:
        """(*#batch, #N, X) as (#E, #R, X), repeated no more than needed."""
        tensor = self.fold.moved(tensor)
        kept, shape = self.fold.kept, tensor.shape
        sets = shape[:kept] if shape[:kept].numel() == 1 else self.shape[:kept]
        rows = shape[kept:-1] if shape[kept:-1].numel() == 1 else self.shape[kept:]
        return tensor.expand(*sets, *rows, shape[-1]).reshape(sets.numel(), rows.numel(), shape[-1])

    def _empty(self) -> Tensor | None:
        if self.mask is None or self.mask_rows is None:
            return None
        attended = self.mask if self.mask.dtype == torch.bool else self.mask != -torch.inf
        if self.first is None:
            empty = ~attended.any(-1)
            return empty[self._rows_of_each_set()]
        # Without a causal rule it lies behind every query; there may be more queries than keys.
        first = torch.where(attended.any(-1), attended.to(torch.int8).argmax(-1), torch.iinfo(torch.int64).max)
        return first[self._rows_of_each_set()] > self._places().view(self.sets, self.count, 1)

    def _rows_of_each_set(self) -> Tensor | None:
        rows = self.mask_rows
        return rows if rows is None or self.shared == 1 else rows.repeat_interleave(self.shared, 0)

    def without_common(self) -> Self:
        """The same for weights and covariances, which do not change when all keys are shifted, but their rounding."""
        new = copy.copy(self)
        new.keys = self.keys - common(self.keys, self._attended())
        return new

    def _attended(self) -> Tensor | None:
        """Whether a query attends to the key, (#E, M)."""
        keys = torch.arange(self.keys.shape[1], device=self.device)
        inside = None if self.first is None else (keys < self.first + self.length)[None]
        if self.mask is None or self.mask_rows is None:
            return inside
        attended = self.mask if self.mask.dtype == torch.bool else self.mask != -torch.inf
        own, lower = self.mask_rows.shape[1] > 1, None
        if self.first is not None and own:
            lower = self._places()[: self.count, None] >= keys
        size = max(MOST_PAIRS // (self.mask_rows.shape[1] * len(keys)), 1)
        parts = []
        for rows in torch.split(self.mask_rows.squeeze(-1), size):
            pairs = attended[rows]
            parts.append((pairs if lower is None else pairs & lower).any(1))
        result = torch.cat(parts).repeat_interleave(self.shared, 0)
        return result if inside is None else result & inside

    # The working set.

    def select(self, flat: Tensor, entries: Tensor | None) -> Self:
        """The rows `flat` (E' * R') of this working set, those of the sets `entries` (None: of all)."""
        new = copy.copy(self)
        new._whole, new._pairs = False, None
        new.ids = self.ids[flat]
        new.field = self.field.index_select(0, flat)
        if entries is not None:
            new.keys = self.keys.index_select(0, entries)
        new.sets, before = len(new.keys), self.count
        new.count = len(flat) // new.sets
        if self.shared > 1:
            new.mask_rows, new.shared = self._rows_of_each_set(), 1
        for name in ("beta", "anchor", "mask_rows", "empty"):
            tensor = getattr(new, name)
            if tensor is None:
                continue
            if tensor.shape[1] > 1:
                tensor = tensor.expand(self.sets, before, 1).reshape(-1, 1)[flat].view(new.sets, new.count, 1)
            elif len(tensor) > 1 and entries is not None:
                tensor = tensor[entries]
            setattr(new, name, tensor)
        return new

    def parts(self, pairs: int) -> Iterator[tuple[Self, Tensor | None]]:
        """Groups of sets, each with about so many pairs of a query and a key, and the rows that they hold."""
        together = max(pairs // max(self.count * self.keys.shape[1], 1), 1)
        if together >= self.sets:
            yield self, None
            return
        for start in range(0, self.sets, together):
            end = min(start + together, self.sets)
            entries = torch.arange(start, end, device=self.device)
            flat = torch.arange(start * self.count, end * self.count, device=self.device)
            part = self.select(flat, entries)
            part._whole = True
            yield part, flat

    def padded(self, filler: int) -> tuple[Self, Tensor | None]:
        """This working set up to a multiple of `block`, and the rows of this one that it holds (None: the same).

        The copies of the last row that fill it up have the number `filler`.
        """
        count = -(-self.count // self.block) * self.block
        if count == self.count:
            return self, None
        local = torch.arange(count, device=self.device)
        start = torch.arange(0, len(self.ids), self.count, device=self.device)
        flat = (start[:, None] + local.clamp(max=self.count - 1)).flatten()
        new = self.select(flat, None)
        new.ids = new.ids.view(self.sets, count).masked_fill(local >= self.count, filler).flatten()
        return new, flat

    def counts(self, active: Tensor) -> list[int]:
        """Return the number of active rows of each set."""
        counts: list[int] = active.view(self.sets, self.count).sum(-1).tolist()
        return counts

    def compacted(
        self, active: Tensor, counts: list[int], *, below: float = COMPACT_BELOW
    ) -> tuple[Self, Tensor] | None:
        """The working set without most of its inactive rows, and the indices of its rows in this one; or None.

        All its rows are distinct: finished rows fill it up and are carried along.
        """
        most = -(-max(counts) // self.block) * self.block
        live = [entry for entry, count in enumerate(counts) if count]
        freed = len(active) - most * len(live)
        if freed < (1 - below) * len(active) or freed < min(WORTH, len(active) // 2):
            return None
        active = active.view(self.sets, self.count)
        start = torch.arange(0, len(self.ids), self.count, device=self.device)
        entries = None
        if len(live) < len(counts):
            entries = torch.tensor(live, device=self.device)
            active, start = active[entries], start[entries]
        order = torch.argsort(active, dim=-1, stable=True, descending=True)[:, :most]
        flat = (start[:, None] + order).flatten()
        return self.select(flat, entries), flat

    # Evaluation.

    def mapped(self, mean: Tensor) -> Tensor:
        """f(z) = anchor x + (1 - anchor) mean."""
        return mean.lerp(self.field, self.per_row(self.anchor))

    def energy(self, z: Tensor, logsumexp: Tensor) -> Tensor:
        """E(z)."""
        anchor, beta = self.per_row(self.anchor)[:, 0], self.per_row(self.beta)[:, 0]
        value: Tensor = dot(z, z) / 2 + (anchor - 1) / beta * logsumexp - anchor * dot(z, self.field)
        return value

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (E * R, D) and logsumexp (E * R) of the keys at z."""
        z = z.view(self.sets, self.count, -1)
        masked = self.mask is not None or (self.first is not None and not self._triangle)
        size = max(MOST_PAIRS // (self.count * self.keys.shape[1]), 1) * self.shared if masked else self.sets
        if size >= self.sets:
            if self._pairs is None and masked:
                self._pairs = self._laid_mask(slice(None))
            mean, logsumexp = self._evaluate(z, self.keys, self.beta, self._pairs)
        else:
            parts = []
            for start in range(0, self.sets, size):
                part = slice(start, start + size)
                beta = self.beta[part] if len(self.beta) > 1 else self.beta
                parts.append(self._evaluate(z[part], self.keys[part], beta, self._laid_mask(part)))
            mean, logsumexp = (torch.cat(p) for p in zip(*parts, strict=True))
        if self.empty is not None:
            mean, logsumexp = mean.masked_fill(self.empty, 0.0), logsumexp.masked_fill(self.empty.squeeze(-1), 0.0)
        return mean.view(-1, z.shape[-1]), logsumexp.flatten()

    def weights(self, z: Tensor) -> Tensor:
        """softmax(beta K z), (E, R, M), without weights that the precision cannot see; 0 for a row without keys."""
        weights = self._scores(z.view(self.sets, self.count, -1), self.keys, self.beta, self._own_mask()).softmax(-1)
        weights = torch.threshold_(weights, LEAST[weights.dtype], 0.0)
        return weights if self.empty is None else weights.masked_fill_(self.empty, 0.0)

    def _own_mask(self) -> Tensor | None:
        return self._laid_mask(slice(None)) if self.mask is not None or self.first is not None else None

    def _places(self) -> Tensor:
        """The last key that each row attends to, (E * R)."""
        assert self.first is not None
        return self.first + self.ids % self.length

    @property
    def _triangle(self) -> bool:
        """Whether the kernel's own causal triangle is the whole mask."""
        return self.first == 0 and self.fused and self._whole and self.mask is None and self.count == self.length

    def _laid_mask(self, part: slice) -> Tensor:
        """Return the bias that is added to the scaled scores, (E / shared, #R, M), for some of the sets."""
        pairs = None
        if self.mask is not None and self.mask_rows is not None:
            start, stop, _ = part.indices(self.sets)
            pairs = self.mask[self.mask_rows[start // self.shared : -(-stop // self.shared)].squeeze(-1)]
        if self.first is not None:
            position = self._places().view(self.sets, self.count, 1)[part][:: self.shared]
            lower = position >= torch.arange(self.keys.shape[1], device=self.device)
            if pairs is None or pairs.dtype == torch.bool:
                pairs = lower if pairs is None else pairs & lower
            else:
                pairs = pairs.where(lower, -torch.inf)
        assert pairs is not None
        if pairs.dtype == torch.bool:
            pairs = torch.zeros((), dtype=self.keys.dtype, device=self.device).where(pairs, -torch.inf)
        return pairs

    def _evaluate(self, z: Tensor, keys: Tensor, beta: Tensor, pairs: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.fused:
            return mean_and_logsumexp(z * beta, keys, pairs, 1.0, is_causal=self._triangle)
        scores = self._scores(z, keys, beta, pairs)
        return _product(scores.softmax(-1), keys), scores.logsumexp(-1)

    def _scores(self, z: Tensor, keys: Tensor, beta: Tensor, pairs: Tensor | None) -> Tensor:
        scores = _product(z * beta, keys.mT)
        if pairs is None:
            return scores
        return (scores.view(len(pairs), -1, *scores.shape[1:]) + pairs[:, None]).view_as(scores)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """<left, right> per row."""
    return (left * right).sum(-1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """(E, R, X) times (E, X, Y), with X and Y widened by zeros: bits depend on whether rows begin at 16 bytes."""
    inner, outer = (aligned(size, left.dtype) for size in right.shape[-2:])
    columns = right.shape[-1]
    if (inner, outer) != right.shape[-2:]:
        right = torch.nn.functional.pad(right, (0, outer - columns, 0, inner - right.shape[-2]))
    return (widened(left, inner) @ right)[..., :columns]
