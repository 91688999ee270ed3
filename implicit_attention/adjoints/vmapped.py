"""A problem inside torch.vmap, as one with one more leading axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..problem import Problem


class VmappedProblem(Problem):
    """A problem whose tensors carry one more leading axis, mapped over with torch.vmap."""

    def __init__(self, inner: Problem, tensors: tuple[Tensor, ...], in_dims: tuple[int | None, ...]) -> None:
        # Held in a closure: the tensors of `inner` are stale and must not be declared.
        self._rebuild: Callable[..., Problem] = lambda *ts: inner.replace(*ts)
        self.mapped_tensors = tensors
        self.in_dims = in_dims
        self.event_ndim = inner.event_ndim
        self.symmetric = inner.symmetric
        self.plain_steps_descend = inner.plain_steps_descend
        self.has_energy = inner.has_energy
        self.steps_rescaled = inner.steps_rescaled

    def _vmap(self, method: str, z: Tensor) -> Tensor:
        def call(z: Tensor, *tensors: Tensor) -> Tensor:
            result: Tensor = getattr(self._rebuild(*tensors), method)(z)
            return result

        return torch.vmap(call, in_dims=(0, *self.in_dims))(z, *self.mapped_tensors)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self._vmap("fixed_point_map", z)

    def retract(self, z: Tensor) -> Tensor:
        return self._vmap("retract", z)

    def energy(self, z: Tensor) -> Tensor:
        return self._vmap("energy", z)
