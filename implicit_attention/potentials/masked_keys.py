"""Potentials over keys with a mask and a bias per query: arguments, layout, the keys that are read, blocks of rows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import Self, TypedDict

from .. import _validate
from .._torch import host_may_look, is_plain, sum_to_shape
from ..problem import restricted
from ._attention import Fold, common, row_block, triangle
from ._read import check_masks, check_masks_fit, joined, restricted_to, surely_finite, without_nan, without_nan_before
from ._shapes import Bias, Keys, Mask, PerBatch, per_state
from .base import CovarianceMap, Potential

_P = TypeVar("_P", bound="MaskedKeys")
_R = TypeVar("_R")
# Pairs in one block of work: memory that stays in the processor's cache costs a fraction of fresh memory.
BLOCK = 2**18
# How many axes of these attributes belong to one batch entry; the other attributes have none.
_OWN_AXES = {"keys": 2, "mask": 2, "bias": 2}
# Scores below half of this are lost in rounding beside a bias of this / eps.
LOST = 64.0


class Masks(TypedDict, total=False):
    """The keyword arguments that every potential over masked keys takes: which pairs count, and by how much more."""

    mask: Mask
    bias: Bias


class KeyPotential(Potential):
    """Base of potentials that are sums over keys (*batch, M, D) at inverse temperature beta.

    `beta` is a float or a tensor that broadcasts to *batch.
    """

    keys: Tensor
    beta: float | Tensor
    #: Beta, shaped to multiply one number per row.
    _row_scale: float | Tensor = per_state("beta", axes=1)
    #: Beta, shaped to multiply scores or states.
    _scale: float | Tensor = per_state("beta")

    def __init__(self, keys: Tensor, beta: float | Tensor) -> None:
        _validate.check_float_tensor("keys", keys, min_ndim=2)
        if keys.shape[-2] == 0:
            received = f"shape {tuple(keys.shape)}"
            raise ValueError(_validate.message("keys", "hold at least one key", received, "mask keys out instead"))
        self.keys = keys
        remedy = "parametrise it, for example as an exponential"
        self.beta = _validate.check_per_batch("beta", beta, low=0.0, open_low=True, remedy=remedy)
        if isinstance(beta, Tensor):
            _validate.check_same_kind([("keys", keys), ("beta", beta)])
            _validate.check_together("beta", beta.shape, keys.shape[:-2], "the leading axes of `keys`")

    def check_state(self, argument: str, z: Tensor) -> None:
        _validate.check_float_tensor(argument, z, min_ndim=2)
        if z.shape[-1] != self.keys.shape[-1]:
            raise self._another_width(argument, z)
        _validate.check_same_kind([("keys", self.keys), (argument, z)])
        _validate.check_broadcast("keys", self.keys.shape[:-2], z.shape[:-2], f"the leading axes of `{argument}`")
        _validate.check_fits_batch("beta", self.beta, argument, z)

    def _another_width(self, argument: str, z: Tensor) -> ValueError:
        required = f"have the keys' dimension {self.keys.shape[-1]} on its last axis"
        return ValueError(_validate.message(argument, required, f"shape {tuple(z.shape)}"))

    def _check_readout(self, z: Tensor, values: Tensor, dropout_p: float) -> None:
        self.check_state("z", z)
        _validate.check_float_tensor("values", values, min_ndim=2)
        _validate.check_same_kind([("keys", self.keys), ("values", values)])
        if values.shape[-2] != self.keys.shape[-2]:
            required = f"have one row for each of the {self.keys.shape[-2]} keys, shape (*batch, M, E)"
            raise ValueError(_validate.message("values", required, f"shape {tuple(values.shape)}"))
        _validate.check_broadcast("values", values.shape[:-2], z.shape[:-2], "the leading axes of `z`")
        _validate.check_number("dropout_p", dropout_p, low=0.0, high=1.0, remedy="0 drops nothing")

    def diameter(self) -> Tensor:
        """The largest distance between two keys of a set, (*batch), or slightly more, without an (M, M, D) tensor."""
        keys = in_double(self.keys)
        # Matrix products tell no distance that is small beside the keys themselves.
        keys = keys - common(keys)
        blocks = [torch.cdist(part, keys).amax(dim=(-1, -2)) for part in torch.split(keys, 512, dim=-2)]
        largest = torch.stack(blocks).amax(0) * (1 + 8 * keys.shape[-1] * torch.finfo(keys.dtype).eps)
        return (largest * (1 + 2 * torch.finfo(self.keys.dtype).eps)).to(self.keys)


class MaskedKeys(KeyPotential):
    """Base of potentials that read each key by its score s_j = beta <k_j, z>, with a mask and a bias of every pair.

    Args:
        keys: (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        mask: boolean, broadcasts to (*batch, N, M); True = the query attends to the key.
        bias: added to the scores, broadcasts to (*batch, N, M); -inf masks.
    """

    #: The attributes of the class: closed forms and `select` hold for these, and not for a subclass with more.
    _attributes: ClassVar[tuple[str, ...]] = ("keys", "beta", "mask", "bias")
    #: The index of the first query where each reads keys up to its own only; None where a mask says all.
    query_offset: int | None = None

    def __init__(self, keys: Keys, beta: PerBatch, *, mask: Mask = None, bias: Bias = None) -> None:
        super().__init__(keys, beta)
        check_masks(mask, bias, keys)
        self.mask = mask
        self.bias = bias

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        check_masks_fit(self.mask, self.bias, argument, z, self.keys.shape[-2], "(*batch, N, M)")

    @property
    def row_block(self) -> int:  # type: ignore[override]
        keys = self.keys
        return row_block(keys.shape[-1], keys.shape[-2], keys.dtype) if keys.device.type == "cpu" else super().row_block

    def select(self, index: Tensor) -> Self | None:
        if not self._has_only(*self._attributes):
            return None
        if self.query_offset is not None:
            # The selected queries are no longer in a row: a mask replaces the offset.
            place = (self.query_offset + index)[..., None]
            clone = self.replace(*self.tensors())
            clone.mask, clone.query_offset = place >= torch.arange(self.keys.shape[-2], device=index.device), None
            return clone
        return self if self.mask is None and self.bias is None else restricted(self, index, mask=1, bias=1)

    def masked_for(self, rows: int) -> Self:
        """The same potential for `rows` queries, with the mask that `query_offset` stands for written out."""
        if self.query_offset is None:
            return self
        clone = self.replace(*self.tensors())
        clone.mask = triangle(rows, self.keys.shape[-2], self.query_offset, self.keys.device)
        clone.query_offset = None
        return clone

    # Parts.

    def _blocks(self, z: Tensor) -> tuple[int, Iterator[tuple[Self, Tensor]]] | None:
        """Return an axis, and potential and states in blocks along it; None for one block or where gradients matter."""
        *batch, rows, _ = z.shape
        pairs = z.shape[:-1].numel() * self.keys.shape[-2]
        # A number of rows that is no multiple of `row_block` would change the bits of the results.
        if pairs <= BLOCK or rows % self.row_block or not self._has_only(*self._attributes):
            return None
        if not (is_plain(z, *self.tensors()) and host_may_look(z)):
            return None
        axis = next((i for i, size in enumerate(batch) if size > 1), len(batch))
        whole = z.shape[axis]
        size = max(BLOCK * whole // pairs, 1)
        if axis == len(batch):
            size = max(size // self.row_block, 1) * self.row_block
        if size >= whole:
            return None
        return axis, (
            (self._narrowed(axis - len(batch), start, min(size, whole - start)), part)
            for start, part in zip(range(0, whole, size), torch.split(z, size, axis), strict=True)
        )

    def _narrowed(self, axis: int, start: int, size: int) -> Self:
        """Return the potential for a part of a batch axis (< 0, counted from the last), or of the rows (axis 0)."""
        clone = copy.copy(self)
        for name in self._attributes:
            tensor = getattr(self, name)
            if isinstance(tensor, Tensor) and (axis < 0 or name in ("mask", "bias")):
                own = tensor.ndim - _OWN_AXES.get(name, 0) + axis
                if own >= 0 and tensor.shape[own] > 1:
                    setattr(clone, name, tensor.narrow(own, start, size))
        if axis == 0 and clone.query_offset is not None:
            clone.query_offset += start
        return clone

    def _read(self, z: Tensor, values: Tensor | None = None, *, fused: bool = False) -> Read:
        """Return the keys that states of z's shape read; with `fused` the kernel applies a causal triangle itself."""
        if z.shape[-1] != self.keys.shape[-1]:
            raise self._another_width("z", z)
        sources = [self.keys] if values is None else [self.keys, values]
        fold = Fold(z.shape[:-2], *(t.shape[:-2] for t in sources))
        sources = [fold.moved(t) for t in sources]
        pairs, attended = joined(*(None if t is None else fold.moved(t) for t in (self.mask, self.bias)))
        empty = poison = None
        first = self.query_offset
        if first is not None and not fused:
            pairs = attended = fold.moved(triangle(z.shape[-2], self.keys.shape[-2], first, z.device))
            first = None
        if first is not None and not surely_finite(*sources):
            sources, poison = without_nan_before(sources, first, z.shape[-2], z.dtype)
        if attended is not None:
            empty = ~attended.any(-1)
            if not surely_finite(*sources):
                sources, poison = without_nan(sources, attended, z.dtype)
        sources = [fold.rows(t) for t in sources]
        return Read(fold, sources[0], sources[-1], pairs, empty, poison, first)

    def _products(self, z: Tensor, read: Read) -> Tensor:
        """Return the scores s without function, bias and mask."""
        return read.fold.product(read.fold.moved(self._scale * z), read.keys.mT)

    def _scores_read(self, z: Tensor, read: Read) -> Tensor:
        """Return the scores with bias, and zeros where the query does not attend to the key."""
        scores, pairs = self._products(z, read), read.pairs
        if pairs is not None and pairs.dtype != torch.bool:
            scores = scores + pairs
        return read.zero_unread(scores)

    def _covariance_map(
        self, z: Tensor, read: Read, pull: Tensor, change: Callable[[Tensor], Tensor]
    ) -> CovarianceMap | None:
        """Linearize mean = sum_j w_j(s) k_j, from w (`pull`, zero where a key is not read) and the symmetric dw/ds.

        None for a subclass with further attributes, whose tensors would have no gradients.
        """
        if not self._has_only(*self._attributes):
            return None
        fold, keys = read.fold, read.keys

        def product(v: Tensor) -> Tensor:
            return self._scale * fold.restored(fold.product(change(fold.product(fold.moved(v), keys.mT)), keys))

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            u = fold.moved(u)
            return self._by_tensors(z, read, u, pull, change(fold.product(u, keys.mT)))

        return CovarianceMap(product, pullback)

    def _by_tensors(self, z: Tensor, read: Read, u: Tensor, pull: Tensor, changed: Tensor) -> tuple[Tensor | None, ...]:
        """The pullback of u to keys, beta, mask and bias, from the weights `pull` and their changes (dw/ds) K u."""
        fold, rows, scaled = read.fold, read.fold.rows, read.fold.moved(self._scale * z)
        by_keys = rows(pull).mT @ rows(u) + rows(changed).mT @ rows(scaled)
        gradients: list[Tensor | None] = [by_keys.reshape(self.keys.shape)]
        if isinstance(self.beta, Tensor):
            by_beta = (fold.restored(fold.product(changed, read.keys)) * z).sum((-1, -2))
            gradients.append(sum_to_shape(by_beta, self.beta.shape))
        if self.mask is not None:
            gradients.append(None)
        if self.bias is not None:
            gradients.append(sum_to_shape(fold.restored(changed), self.bias.shape))
        return tuple(gradients)

    def _keys_read(self) -> Tensor:
        """The keys in float64 without graph, for bounds: zeros for a key that no query reads or that is not finite."""
        keys = in_double(self.keys)
        counts = torch.isfinite(keys).all(-1)
        attended = joined(self.mask, self.bias)[1]
        if attended is not None:
            counts = counts & (attended.any(-2) if attended.ndim > 1 else attended).to(keys.device)
        return keys.where(counts[..., None], 0.0)

    def _bound(self, keys: Tensor, factor: float) -> Tensor:
        """factor beta lambda_max(K^T K), (*batch)."""
        largest: Tensor = torch.linalg.matrix_norm(keys, ord=2)
        return factor * self.beta * largest.square().to(self.keys)


def in_blocks(evaluate: Callable[[_P, Tensor], _R]) -> Callable[[_P, Tensor], _R]:
    """Evaluate a method, (*batch, N, D) -> tensors (*batch, N, ...), block by block where no gradient is recorded."""

    @functools.wraps(evaluate)
    def in_parts(self: _P, z: Tensor) -> _R:
        if (blocks := self._blocks(z)) is None:
            return evaluate(self, z)
        axis, parts = blocks
        results: list[Any] = [in_parts(potential, part) for potential, part in parts]
        if isinstance(results[0], Tensor):
            return cast(_R, torch.cat(results, axis))
        return cast(_R, tuple(torch.cat(pieces, axis) for pieces in zip(*results, strict=True)))

    return in_parts


class Read(NamedTuple):
    """The keys that states read, in the layout of `fold`.

    keys, values: the keys, and the values that are read (the keys themselves where there are no others).
    pairs: mask or bias of the pairs.
    empty: which rows attend to no key.
    poison: NaN for the rows that attend to a key that is not finite, else 0.
    first: in place of a mask, row i attends to keys up to first + i.
    """

    fold: Fold
    keys: Tensor
    values: Tensor
    pairs: Tensor | None
    empty: Tensor | None
    poison: Tensor | None
    first: int | None = None

    @property
    def attended(self) -> Tensor | None:
        """Which pairs count; None if all do."""
        return self.pairs if self.pairs is None or self.pairs.dtype == torch.bool else torch.ne(self.pairs, -torch.inf)

    def zero_unread(self, pairs: Tensor) -> Tensor:
        """Return numbers of the pairs (..., N, M) with zeros where the query does not attend to the key."""
        attended = self.attended
        return pairs if attended is None else pairs.masked_fill(~attended, 0.0)

    def restricted(self, scores: Tensor) -> Tensor:
        """Scores with the bias, and -inf where the mask is False."""
        pairs = self.pairs
        if self.first is not None:
            pairs = triangle(scores.shape[-2], scores.shape[-1], self.first, scores.device)
        return restricted_to(scores, pairs, self.empty)

    def zero_empty(self, values: Tensor, *, rows: bool = False, empty: float = 0.0) -> Tensor:
        """Set the results of queries that attend to no key to `empty`; `rows`: a query has more than one number."""
        if self.empty is None:
            return values
        return values.masked_fill(self.empty[..., None] if rows else self.empty, empty)

    def finish(self, values: Tensor, *, rows: bool = False, empty: float = 0.0) -> Tensor:
        """Apply `zero_empty`, add NaN for queries that attend to a key that is not finite; (*batch, N, ...)."""
        values = self.zero_empty(values, rows=rows, empty=empty)
        if self.poison is not None:
            values = values + (self.poison[..., None] if rows else self.poison)
        return self.fold.restored(values)

    def for_kernels(self) -> tuple[Read, Tensor | None]:
        """Return what fused kernels read, and the queries (*#batch, #N, 1) that must be replaced by zeros for them.

        Where all biases of a row are so low that scores are lost beside them, only the largest biases matter. Kernels
        compute the right output there but a wrong gradient, because they weigh by exp(score - logsumexp), which rounds
        in the same way; a row of -inf has no gradient at all. With zero queries such a row attends to its largest
        biases, which are replaced by zeros.
        """
        if self.pairs is None:
            return self, None
        if self.pairs.dtype == torch.bool:
            assert self.empty is not None
            return self._replace(pairs=self.pairs | self.empty[..., None]), None
        top = self.pairs.detach().amax(-1, keepdim=True)
        low = top < -LOST / torch.finfo(torch.promote_types(top.dtype, torch.float32)).eps
        largest = torch.zeros_like(top).where(self.pairs == top, -torch.inf)
        return self._replace(pairs=largest.where(low, self.pairs)), self.fold.restored(low)

    def centred(self) -> Read:
        """Shift all keys to their centre: weights and covariances stay the same, and round less."""
        attended = self.attended
        if attended is not None:
            rows = tuple(range(self.fold.kept, attended.ndim - 1))
            shape = *attended.shape[: self.fold.kept], self.keys.shape[-2]
            attended = (attended.any(rows) if rows else attended).expand(shape)
        return self._replace(keys=self.keys - common(self.keys, attended))


def in_double(tensor: Tensor) -> Tensor:
    """The same numbers in float64, where the device has it."""
    return tensor.detach().to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)
