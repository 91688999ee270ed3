"""Potentials that layers make, and their read-out: softmax attention over values, or its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _validate
from ..errors import UnsupportedImplementation
from ..ops.attention import attend, differentiable, sdpa
from ..ops.fold import Fold
from ..potentials import Potential, ReadsOut
from ..potentials._read import surely_finite
from ..potentials.scored_keys import ScoredKeys

#: Makes a potential: (keys, beta, mask=, bias=) -> Potential; mask and bias are passed only if the call has them.
PotentialFactory: TypeAlias = Callable[..., Potential]

# Torch aligns new memory to a multiple of so many bytes.
LINE = 64
# Rows of so many numbers are aligned in any precision.
WIDTH = 4


def made_by(
    make: PotentialFactory,
    keys: Tensor,
    beta: float | Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    query_offset: int | None = None,
) -> Potential:
    """The potential that the factory makes, or an error if it is none; `query_offset` is for `LogSumExp` alone."""
    options = (("mask", mask), ("bias", bias), ("query_offset", query_offset))
    given = {name: option for name, option in options if option is not None}
    made: Any = make(keys, beta, **given)
    if not isinstance(made, Potential):
        required = "make a Potential from (keys, beta, mask=, bias=)"
        raise TypeError(_validate.message("potential", required, type(made).__name__, "for example LogSumExp"))
    return made


def read_out(potential: Potential, z: Tensor, values: Tensor, dropout_p: float) -> Tensor:
    """softmax(beta z K^T) V. A state that is not finite reads NaN and adds nothing to other gradients."""
    if isinstance(potential, ScoredKeys) and surely_finite(z) and lies_aligned(z):
        return potential.readout(z, values, dropout_p=dropout_p)
    lost = ~torch.isfinite(z).all(-1, keepdim=True)
    output = reads_out(potential).readout(z.masked_fill(lost, 0.0), values, dropout_p=dropout_p)
    return output.masked_fill(lost, torch.nan)


def lies_aligned(z: Tensor) -> bool:
    """Whether `z` is aligned as new memory is, which a copy without its lost rows would be: bits depend on it."""
    return z.data_ptr() % LINE == 0


def reads_out(potential: Potential) -> ReadsOut:
    """The potential, or an error if it has no weights to read values out with."""
    if isinstance(potential, ReadsOut):
        return potential
    raise UnsupportedImplementation(
        f"{type(potential).__name__} has no attention weights (no methods `probabilities` and `readout`); use "
        "readout='state', without weights"
    )


def read_out_plain(
    z: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, first: int | None, columns: Tensor | None = None
) -> Tensor:
    """softmax(beta z K^T) V of finite states and keys, as `LogSumExp.readout` has it.

    columns: beta with two more axes, where that is at hand.
    """
    if isinstance(beta, Tensor):
        query, scale = (beta.unsqueeze(-1).unsqueeze(-1) if columns is None else columns) * z, 1.0
    else:
        query, scale = z, beta
    differentiated = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad)
    kernel = differentiable if differentiated else sdpa
    if is_laid_out(z.shape, keys.shape, values.shape):
        # The same as `attend`, for tensors that lie as the kernel takes them.
        if first is None and not differentiated and query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1:
            return F.scaled_dot_product_attention(query, keys, values, scale=scale)
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
        return kernel(query, keys, values, attn_mask=None, scale=scale, first=first)[0]
    fold = Fold(z.shape[:-2], keys.shape[:-2], values.shape[:-2])
    keys, values = (fold.rows(fold.moved(t)) for t in (keys, values))
    return fold.restored(attend(kernel, fold, fold.moved(query), keys, values, None, scale, first)[0])


@functools.lru_cache(maxsize=1024)
def is_laid_out(shape: torch.Size, of_keys: torch.Size, of_values: torch.Size) -> bool:
    """Whether torch's kernel takes tensors of these shapes, and takes them aligned, as they are."""
    return len(shape) == 4 and of_keys == of_values and shape[:-2] == of_keys[:-2] and shape[-1] % WIDTH == 0
