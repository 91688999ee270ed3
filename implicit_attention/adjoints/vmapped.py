"""A problem inside torch.vmap, as one with one more leading axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..problem import Linearization, Problem


class VmappedProblem(Problem):
    """A problem whose tensors carry one more leading axis, mapped over with torch.vmap."""

    def __init__(self, inner: Problem, tensors: tuple[Tensor, ...], in_dims: tuple[int | None, ...]) -> None:
        # A closure, as the tensors of `inner` are stale and must not be declared.
        self._rebuild: Callable[..., Problem] = lambda *ts: inner.replace(*ts)
        self.mapped_tensors = tensors
        self.in_dims = in_dims
        self.event_ndim, self.token_order = inner.event_ndim, inner.token_order
        self.symmetric, self.has_energy, self.has_metric = inner.symmetric, inner.has_energy, inner.has_metric
        self.plain_steps_descend, self.steps_rescaled = inner.plain_steps_descend, inner.steps_rescaled
        self.separates, self.mixes = inner.separates, inner.mixes

    def _vmap(self, method: str, *states: Tensor) -> Tensor:
        def call(*arguments: Tensor) -> Tensor:
            states_of_one, tensors = arguments[: len(states)], arguments[len(states) :]
            result: Tensor = getattr(self._rebuild(*tensors), method)(*states_of_one)
            return result

        return torch.vmap(call, in_dims=(*(0 for _ in states), *self.in_dims))(*states, *self.mapped_tensors)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self._vmap("fixed_point_map", z)

    def retract(self, z: Tensor) -> Tensor:
        return self._vmap("retract", z)

    def energy(self, z: Tensor) -> Tensor:
        return self._vmap("energy", z)

    def divergence(self, z: Tensor, mapped: Tensor) -> Tensor:
        return self._vmap("divergence", z, mapped)

    def metric_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._vmap("metric_product", z, v)

    def metric_root_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._vmap("metric_root_product", z, v)

    def outer_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._vmap("outer_product", z, v)

    def linearize(self, z: Tensor) -> Linearization:
        linear = super().linearize(z)
        return linear._replace(outer=lambda v: self.outer_product(z, v)) if self.has_metric else linear
