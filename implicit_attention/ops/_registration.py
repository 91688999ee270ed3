"""What the registrations of the operations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

#: The fields of `Hopfield` in a schema.
PROBLEM = "Tensor field, Tensor keys, Tensor beta, Tensor anchor, Tensor? mask, bool is_causal"


def sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of a tensor that was broadcast."""
    return gradient.sum_to_size(like.shape).to(like.dtype)


def batched(
    operation: Any, *, states: tuple[int, ...], outputs: int, keys: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """The rule of torch.vmap: one more leading axis, of which all but the `states` may have size 1.

    `keys` tells that the last output is a gradient of the keys, which then must have the axis too.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        given = []
        for index, (argument, dim) in enumerate(zip(args, in_dims, strict=True)):
            if isinstance(argument, Tensor):
                argument = argument.unsqueeze(0) if dim is None else argument.movedim(dim, 0)
                if index in states or (keys and index == 1):
                    argument = argument.expand(info.batch_size, *argument.shape[1:])
            given.append(argument)
        return operation(*given), (0,) * outputs if outputs > 1 else 0

    return rule
