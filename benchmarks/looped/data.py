"""The text of LOOPED, and what learns nothing but counts: characters after the 0, 1, 2, ... before them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..useful_tasks import Examples, described_texts, help_texts, windows

#: Characters of a window. No context reaches back over its beginning, for models and counts alike.
LENGTH = 128
#: Contexts of counts that are tried; the best one on the validation part is shown beside the first ones.
CONTEXTS = (0, 1, 2, 3, 4, 5)


def described(held: int | None) -> dict[str, Any]:
    """What identifies the data in the results."""
    return {**described_texts(), "length": LENGTH, "test": len(windows(help_texts().test, LENGTH, held).inputs)}


class Counts:
    """P(c | context) = (n(context, c) + kinds * P(c | shorter context)) / (n(context) + kinds).

    n counts the training part, `kinds` is the number of different characters that followed the context, and without
    any context all characters are equally likely.

    Reference: Witten and Bell (1991), interpolated.
    """

    def __init__(self, codes: Tensor, size: int, context: int) -> None:
        self.size, self.context = size, context
        self.tables = [self._table(codes, length) for length in range(context + 1)]

    def _table(self, codes: Tensor, length: int) -> tuple[Tensor, ...]:
        grams, seen = self._numbers(codes.unfold(0, length + 1, 1)).unique(return_counts=True)
        contexts, index = (grams // self.size).unique(return_inverse=True)
        totals = torch.zeros(len(contexts), dtype=torch.long).index_add_(0, index, seen)
        return grams, seen, contexts, totals, index.bincount()

    def _numbers(self, characters: Tensor) -> Tensor:
        """One number for the characters (..., n)."""
        return (characters * self.size ** torch.arange(characters.shape[-1] - 1, -1, -1)).sum(-1)

    def bits(self, examples: Examples) -> float:
        """Bits per character; the first ones of a window have shorter contexts."""
        inputs, targets = examples
        likely = torch.full(targets.shape, 1 / self.size, dtype=torch.float64)
        # The context of place t ends with the input at t, and the target follows it.
        written = torch.cat([inputs, targets[:, -1:]], dim=1)
        for length, (grams, seen, contexts, totals, kinds) in enumerate(self.tables[: written.shape[1]]):
            asked = written.unfold(1, length + 1, 1) if length else targets[..., None]
            numbers = self._numbers(asked)
            count = _found(grams, seen, numbers)
            total, kind = (_found(contexts, values, numbers // self.size) for values in (totals, kinds))
            shorter = likely[:, -numbers.shape[1] :]
            mixed = (count + kind * shorter) / (total + kind).clamp_min(1)
            likely[:, -numbers.shape[1] :] = torch.where(total > 0, mixed, shorter)
        return float(-likely.log2().mean())


def _found(keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
    """The values at sorted keys, 0 for keys that are not there."""
    at = torch.searchsorted(keys, asked).clamp_max(len(keys) - 1)
    return torch.where(keys[at] == asked, values[at], 0).double()


def counted(held: int | None) -> dict[str, Any]:
    """Bits per character of counts by the length of their context, and the best length on the validation part."""
    given = help_texts()
    validation, test = (windows(part, LENGTH, held) for part in (given.validation, given.test))
    models = {context: Counts(given.train, len(given.alphabet), context) for context in CONTEXTS}
    best = min(models, key=lambda context: models[context].bits(validation))
    bits = {str(context): model.bits(test) for context, model in models.items()}
    return {"guessing": math.log2(len(given.alphabet)), "bits": bits, "best": best}
