"""What the registrations of the operations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._autograd import may_have_tangent
from ..errors import UnsupportedImplementation

#: The fields of `Hopfield` in a schema.
PROBLEM = "Tensor field, Tensor keys, Tensor beta, Tensor anchor, Tensor? mask, bool is_causal"


def sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of a tensor that was broadcast."""
    return gradient.sum_to_size(like.shape).to(like.dtype)


def refuse_tangents(operation: str, *inputs: Any) -> None:
    """Raise in forward mode, for which torch lets an operation have no rule: every derivative would be 0."""
    if any(isinstance(t, Tensor) and may_have_tangent(t) for t in inputs):
        raise UnsupportedImplementation(
            f"`{operation}` has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers); use "
            "solve(AnchoredEnergy(LogSumExp(keys, beta), query, anchor), query), which has every derivative"
        )


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
