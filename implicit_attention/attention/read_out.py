"""Potentials that layers make, and their read-out: softmax attention over values, or its weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _validate
from ..errors import UnsupportedImplementation
from ..kernels.attention import attend, differentiable, sdpa
from ..kernels.fold import Fold
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
    *,
    named: tuple[str, str] = ("potential", "(keys, beta, mask=, bias=)"),
    **options: Any,
) -> Potential:
    """The potential that the factory, `named` with what it takes, makes with the options that are not None."""
    (argument, takes), given = named, {name: option for name, option in options.items() if option is not None}
    try:
        made: Any = make(keys, beta, **given)
    except TypeError as error:
        received = getattr(make, "__name__", repr(make))
        try:
            received += str(signature := inspect.signature(make))
            signature.bind(keys, beta, **given)
        except (TypeError, ValueError):
            remedy = "pass a class or function with these names; beta is a number, or has one for each head, (H,)"
            raise TypeError(_validate.message(argument, f"take {takes}", received, remedy)) from error
        raise
    if not isinstance(made, Potential):
        required = f"make a Potential from {takes}"
        raise TypeError(_validate.message(argument, required, type(made).__name__, "for example LogSumExp"))
    return made


def refuse_shapes(call: Any, error: RuntimeError | ValueError) -> None:
    """Raise if a potential of the user's failed, in torch's words about shapes, on what the call gives it."""
    home, ours = str(getattr(call.potential, "__module__", "")), __name__.partition(".")[0]
    own = home.startswith(ours) or str(error).startswith("`")
    if not own and type(error) in (RuntimeError, ValueError) and _validate.OF_SHAPES.search(str(error)) is not None:
        given = {"keys": call.keys, "beta": call.beta, "mask": call.mask, "bias": call.bias, "states": call.query}
        required = "take " + ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items() if isinstance(t, Tensor))
        received = f"{getattr(call.potential, '__name__', repr(call.potential))}, which raised: {error}"
        remedy = "beta has one number for each head: multiply scores (*batch, H, N, M) by beta[..., None, None]"
        raise ValueError(_validate.message("potential", required, received, remedy))


def read_out(potential: Potential, z: Tensor, values: Tensor, dropout_p: float) -> Tensor:
    """softmax(beta z K^T) V. A state that is not finite reads NaN and adds nothing to other gradients."""
    # Bits depend on whether z is aligned as new memory is, which a copy without its lost rows would be.
    if isinstance(potential, ScoredKeys) and surely_finite(z) and z.data_ptr() % LINE == 0:
        return potential.readout(z, values, dropout_p=dropout_p)
    lost = ~torch.isfinite(z).all(-1, keepdim=True)
    output = reads_out(potential).readout(z.masked_fill(lost, 0.0), values, dropout_p=dropout_p)
    return output.masked_fill(lost, torch.nan)


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
