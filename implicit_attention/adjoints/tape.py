"""One recorded evaluation of a map, for all products of an adjoint solve and for the gradients of the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Linearization, Problem

Gradients = tuple[Tensor | None, ...]


class Tape:
    """The Jacobian of f at z, transposed, by one evaluation of f that autograd records.

    torch.func, which the general `Problem.linearize` uses so that it can be differentiated and batched itself, costs
    more per product and records anew for the gradients of the tensors.
    """

    def __init__(self, problem: Problem, z: Tensor) -> None:
        # Statistics that modules keep while they train count the evaluations of the solve alone; and compiled modules
        # may free tensors that a second product would read.
        problem = problem.apart()
        self.problem, self.z, self.tensors = problem, z, problem.tensors()
        self.wanted = [i for i, t in enumerate(self.tensors) if t.requires_grad]
        self.gradients: Gradients = ()
        with torch.enable_grad():
            self.state = z.detach().requires_grad_()
            self.recorded = problem.fixed_point_map(self.state)
        self.mapped = self.recorded.detach()

    @classmethod
    def of(cls, problem: Problem, z: Tensor) -> Tape | None:
        """A tape, or None for a problem that has products of its own."""
        return cls(problem, z) if type(problem).linearize is Problem.linearize else None

    def linearization(self) -> Linearization:
        return Linearization(lambda v: self.problem.linearize(self.z).jvp(v), self.vjp, self.vjp_tensors)

    def vjp(self, u: Tensor) -> Tensor:
        """J^T u."""
        return self._by_state(u, *self._products(u, self.state))

    def vjp_both(self, u: Tensor) -> Tensor:
        """J^T u; in the same pass `gradients` becomes the result of `vjp_tensors(u)`."""
        product, *gradients = self._products(u, self.state, *(self.tensors[i] for i in self.wanted))
        self.gradients = self._by_tensors(u, tuple(gradients))
        return self._by_state(u, product)

    def vjp_tensors(self, u: Tensor) -> Gradients:
        """(df/dt)^T u for every tensor t of the problem that requires grad."""
        return self._by_tensors(u, self._products(u, *(self.tensors[i] for i in self.wanted)))

    def _products(self, u: Tensor, *inputs: Tensor) -> Gradients:
        if not (self.recorded.requires_grad and inputs):
            return (None,) * len(inputs)
        # The graph serves all products; where the tensors are rows of others, it reaches those, too.
        return torch.autograd.grad(self.recorded, inputs, u, retain_graph=True, allow_unused=True)

    def _by_state(self, u: Tensor, product: Tensor | None) -> Tensor:
        # Without a graph to the state f does not depend on it, or does so unseen, for which `linearize` raises.
        return self.problem.linearize(self.z).vjp(u) if product is None else product

    def _by_tensors(self, u: Tensor, products: Gradients) -> Gradients:
        if all(product is None for product in products):
            return self.problem.linearize(self.z).vjp_tensors(u)
        pairs = zip(self.wanted, products, strict=True)
        gradients = {i: torch.zeros_like(self.tensors[i]) if product is None else product for i, product in pairs}
        return tuple(map(gradients.get, range(len(self.tensors))))
