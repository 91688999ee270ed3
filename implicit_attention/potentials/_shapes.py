"""Names of the tensors that potentials and energies take and return, with their shapes."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

from .. import _validate

#: States, queries or tokens, and vectors beside them.
States: TypeAlias = Float[Tensor, "*batch N D"]
#: One number for each state.
PerRow: TypeAlias = Float[Tensor, "*batch N"]
#: One number, or one for each batch entry.
PerBatch: TypeAlias = float | Float[Tensor, "*#batch"]
Keys: TypeAlias = Float[Tensor, "*batch M D"]
#: The attention weights of states over keys.
Weights: TypeAlias = Float[Tensor, "*batch N M"]
#: One value for each key, and the averages of them that states read.
Values: TypeAlias = Float[Tensor, "*#batch M E"]
ReadOut: TypeAlias = Float[Tensor, "*batch N E"]
#: The keys that each query reads, and numbers that are added to its scores: both broadcast to (*batch, N, M).
Mask: TypeAlias = Bool[Tensor, "..."] | None
Bias: TypeAlias = Float[Tensor, "..."] | None


def of_part(part: str, name: str) -> Any:
    """A property: the attribute `name` of a part, such as that of the potential of an energy."""
    return property(lambda owner: getattr(getattr(owner, part), name))


def per_state(name: str, axes: int = 2, *, high: float = math.inf, open_low: bool = True) -> Any:
    """A property: the attribute `name`, a number or a tensor (*batch), shaped to multiply states (or so many axes).

    Entries of a tensor outside of (0, high], or [0, high] without `open_low`, are NaN.
    """
    place = (..., *(None,) * axes)

    def shaped(owner: Any) -> float | Tensor:
        number: float | Tensor = getattr(owner, name)
        if not isinstance(number, Tensor):
            return number
        return _validate.inside(number, low=0.0, high=high, open_low=open_low)[place]

    return property(shaped)
