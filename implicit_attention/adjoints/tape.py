"""One recorded evaluation of a map, for all products of an adjoint solve and for the gradients of the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Linearization, Problem


def recorded(problem: Problem, z: Tensor) -> Linearization:
    """`problem.linearize(z)`; of a map without a closed form, from one evaluation that autograd records.

    torch.func, which the general `linearize` uses so that it can be differentiated and batched itself, records anew for
    the gradients of the tensors, and costs more per product.
    """
    tensors = problem.tensors()
    if type(problem).linearize is not Problem.linearize:
        return problem.linearize(z)
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
    with torch.enable_grad():
        state = z.detach().requires_grad_()
        mapped = problem.fixed_point_map(state)

    def products(u: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        if not mapped.requires_grad:
            return (None,) * len(inputs)
        # What follows the tensors' gradients wants this graph again, too: the tensors of rows are made of whole ones.
        return torch.autograd.grad(mapped, inputs, u, retain_graph=True, allow_unused=True)

    def transposed(u: Tensor) -> Tensor:
        (product,) = products(u, state)
        # Without a graph to the state: f does not depend on it, or does so unseen, which is told there.
        return problem.linearize(z).vjp(u) if product is None else product

    def by_tensors(u: Tensor) -> tuple[Tensor | None, ...]:
        found = products(u, *(tensors[i] for i in wanted))
        if all(gradient is None for gradient in found):
            return problem.linearize(z).vjp_tensors(u)
        gradients: list[Tensor | None] = [None] * len(tensors)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = torch.zeros_like(tensors[i]) if gradient is None else gradient
        return tuple(gradients)

    return Linearization(lambda v: problem.linearize(z).jvp(v), transposed, by_tensors)
