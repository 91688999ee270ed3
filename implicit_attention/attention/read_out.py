"""What is read out at an equilibrium, or at a query: softmax attention over values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import _validate
from .._autograd import HALF
from ..errors import UnsupportedImplementation
from ..potentials import Potential

#: Makes a potential: (keys, beta, mask=, bias=) -> Potential; mask and bias are given only where there are any.
PotentialFactory: TypeAlias = Callable[..., Potential]


def explicit_read_out(
    make: PotentialFactory,
    potential: Potential,
    query: Tensor,
    values: Tensor,
    narrow: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """softmax(beta x K^T) V, for `narrow` inputs of one half precision in that precision."""
    dtype = narrow[0].dtype
    if dtype in HALF and all(t is None or t.dtype == dtype for t in narrow):
        return with_anchor(narrow_read_out(make, narrow, beta, mask, dropout_p), anchor)
    return with_anchor(read_out(potential, query, values, dropout_p), anchor)


def with_anchor(output: Tensor, anchor: float | Tensor) -> Tensor:
    """The anchor is no part of an explicit step, but a parameter without any gradient stops distributed training."""
    return output + 0 * anchor.sum() if isinstance(anchor, Tensor) and anchor.requires_grad else output


def read_out(potential: Potential, z: Tensor, values: Tensor, dropout_p: float) -> Tensor:
    """softmax(beta z K^T) V; a state that is not finite gives NaN, and nothing to the gradients of what is shared."""
    lost = ~torch.isfinite(z).all(-1, keepdim=True)
    output: Tensor = potential.readout(z.masked_fill(lost, 0.0), values, dropout_p=dropout_p)  # type: ignore[attr-defined]
    return output.masked_fill(lost, torch.nan)


def narrow_read_out(
    make: PotentialFactory,
    narrow: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    beta: float | Tensor,
    mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """An explicit step as torch does it in half precision."""
    query, keys, values, bias = narrow
    assert values is not None
    if isinstance(beta, Tensor):
        # Rounded by itself, a temperature would shift all scores alike.
        query, beta = (beta[..., None, None] * query).to(keys.dtype), 1.0
    return read_out(made_by(make, keys, beta, mask, bias), query, values, dropout_p)


def weights_of(potential: Potential, z: Tensor) -> Tensor:
    if not hasattr(potential, "probabilities"):
        raise UnsupportedImplementation(f"{type(potential).__name__} has no attention weights (no `probabilities`)")
    weights: Tensor = potential.probabilities(z)
    return weights


def at_least_single(given: Any) -> Any:
    """What is solved in float32 although it came in half precision."""
    return given.float() if isinstance(given, Tensor) and given.dtype in HALF else given


def made_by(
    make: PotentialFactory, keys: Tensor, beta: float | Tensor, mask: Tensor | None, bias: Tensor | None
) -> Potential:
    given = {name: pairs for name, pairs in (("mask", mask), ("bias", bias)) if pairs is not None}
    made: Any = make(keys, beta, **given)
    if not isinstance(made, Potential):
        required = "make a Potential from (keys, beta, mask=, bias=)"
        raise TypeError(_validate.message("potential", required, type(made).__name__, "for example LogSumExp"))
    return made
