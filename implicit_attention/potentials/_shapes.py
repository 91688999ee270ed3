"""Names of the tensors that potentials and energies take and return, with their shapes."""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

#: States, queries or tokens, and vectors beside them.
States: TypeAlias = Float[Tensor, "*batch N D"]
#: One number for each state.
PerRow: TypeAlias = Float[Tensor, "*batch N"]
#: One number, or one for each batch entry.
PerBatch: TypeAlias = float | Float[Tensor, "*#batch"]
Keys: TypeAlias = Float[Tensor, "*batch M D"]
#: The attention weights of states over keys.
Weights: TypeAlias = Float[Tensor, "*batch N M"]
#: One value for each key, and what states read of them.
Values: TypeAlias = Float[Tensor, "*#batch M E"]
ReadOut: TypeAlias = Float[Tensor, "*batch N E"]
#: Which keys each query reads, and what is added to its scores: both broadcast to (*batch, N, M).
Mask: TypeAlias = Bool[Tensor, "..."] | None
Bias: TypeAlias = Float[Tensor, "..."] | None
