"""Loops by hand, plain steps and Anderson's, with the evidence that a solve gives: what such a loop has to cost.

States are torch's; numbers of samples are numpy's, whose calls are shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: How much the residual may grow in a mixed step, as in `Safeguarded`.
GROWTH = 20.0
ATOL = 1e-8


class Ends:
    """Of each sample the best state, its residual, the evaluations, and whether it is unfinished or has converged.

    A sample that is neither met numbers that are not finite.
    """

    def __init__(self, z: Tensor) -> None:
        count = len(z)
        self.active, self.converged = np.ones(count, dtype=bool), np.zeros(count, dtype=bool)
        self.evaluations = np.zeros(count, dtype=np.int32)
        self.value, self.residual = z, np.full(count, np.inf)

    def unfinished(self, z: Tensor, size: Any, tolerance: Any, accepted: Any = None) -> bool:
        """Take note of |f(z) - z| and the tolerances, and say whether a sample is unfinished.

        accepted: which candidates the method accepts; None for all.
        """
        self.evaluations += self.active
        if accepted is None and (size > tolerance).all() and (size < self.residual).all() and self.active.all():
            self.value, self.residual = z, size
            return True
        candidates = self.active if accepted is None else self.active & accepted
        done = candidates & (size <= tolerance)
        better = (candidates & (size < self.residual)) | done
        self.value = torch.where(mask_of(better, z), z, self.value)
        self.residual = np.where(better, size, self.residual)
        self.converged |= done
        self.active &= ~(done | (candidates & ~(size + tolerance < np.inf)))
        return bool(self.active.any())


def mask_of(chosen: Any, like: Tensor) -> Tensor:
    """Truth values of samples as a mask of states."""
    return torch.from_numpy(chosen).view(-1, *(1,) * (like.ndim - 1))


def lengths(t: Tensor) -> Any:
    return torch.linalg.vector_norm(t.flatten(1), dim=-1).numpy()


def plain(f: Callable[[Tensor], Tensor], z: Tensor, rtol: float, *, most: int, atol: float = ATOL) -> Ends:
    """Plain steps until the slowest sample, (B, ...), is done, or after `most` evaluations."""
    ends = Ends(z)
    for _ in range(most):
        mapped = f(z)
        if not ends.unfinished(z, lengths(mapped - z), atol + rtol * lengths(mapped)):
            break
        z = mapped
    return ends


def anderson(
    f: Callable[[Tensor], Tensor], z: Tensor, rtol: float, *, history: int, most: int, atol: float = ATOL
) -> Ends:
    """The same by Anderson's steps over the last changes, with the safeguard that the solver has.

    A mixed step whose residual grows by more than `GROWTH` is taken back: that sample makes a plain step from its state
    before, and its changes are forgotten. One product finds all lengths and products of residuals and their changes.
    """
    count, n = len(z), z[0].numel()
    # Changes of r, then r at the last two states; changes of f(z).
    of_r, of_f = z.new_zeros(count, history + 2, n), z.new_zeros(count, history, n)
    transposed, places = of_r.mT, [of_r[:, i].view_as(z) for i in range(history + 2)]
    changes = [of_f[:, i].view_as(z) for i in range(history)]
    one, kind = np.eye(history), torch.finfo(z.dtype)
    # Changes that are dependent to rounding, or none, keep the systems regular.
    ridge, floor = (z.new_tensor(a).numpy() for a in (1 + 4 * kind.eps * one, kind.tiny * one))
    ends, kept = Ends(z), z
    mixed, before = np.zeros(count, dtype=bool), np.full(count, np.inf)
    all_mixed = ~mixed
    for step in range(most):
        new, r, last = step % history, history + step % 2, history + (step + 1) % 2
        mapped = f(z)
        torch.sub(mapped, z, out=places[r])
        torch.sub(places[r], places[last], out=places[new])
        products = torch.bmm(of_r, transposed).numpy()
        size = np.sqrt(products[:, r, r])
        short = size <= GROWTH * before
        accepted = None if short.all() else short | ~mixed
        if not ends.unfinished(z, size, atol + rtol * lengths(mapped), accepted):
            break
        if step == 0:
            places[new].zero_()
        else:
            torch.sub(mapped, kept, out=changes[new])
        if accepted is not None:
            mask = mask_of(accepted, z)
            torch.where(mask, places[r], places[last], out=places[r])
            mapped, size = torch.where(mask, mapped, kept), np.where(accepted, size, before)
            forgotten = torch.from_numpy(~accepted)[:, None, None]
            of_r[:, :history].masked_fill_(forgotten, 0.0)
            of_f.masked_fill_(forgotten, 0.0)
            products[~accepted] = 0.0
        z, kept, before = mapped, mapped, size
        if step > 1:
            system = products[:, :history, :history] * ridge + floor
            weights = torch.from_numpy(np.linalg.solve(system, products[:, :history, r, None]))
            z = torch.baddbmm(mapped.view(count, 1, n), weights.mT, of_f, alpha=-1).view_as(z)
            mixed = all_mixed if accepted is None else accepted
    return ends
