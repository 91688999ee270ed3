"""Energies of states that act through an activation: the gradient of a Lagrangian, such as a layer norm."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..potentials import Potential
from ..potentials._shapes import States, of_part
from ..potentials.layer_norm import LayerNormPotential
from ..problem import Evaluation, Linearization, Problem, pullback
from .anchored import Fielded
from .base import Dynamics, Energy


class _Activated(Problem, general=True):
    """A problem whose states x act through g = grad L(x)."""

    event_ndim: int = of_part("potential", "event_ndim")
    row_block: int = of_part("potential", "row_block")

    def __init__(self, lagrangian: LayerNormPotential, potential: Potential) -> None:
        for name, value, kind in (("lagrangian", lagrangian, LayerNormPotential), ("potential", potential, Potential)):
            _validate.check_instance(name, value, kind)
        self.lagrangian, self.potential = lagrangian, potential

    def activation(self, z: States) -> States:
        """g = grad L(x), the normalised tokens."""
        return self.lagrangian.mean(z)

    def metric_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess L(x) v."""
        return self.lagrangian.covariance_product(z, v)

    def metric_root_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self.lagrangian.root_product(z, v)

    def divergence(self, z: Tensor, mapped: Tensor) -> Tensor:
        """D_L(f, x) = L(f) - L(x) - <g, f - x>."""
        return self._summed(self.lagrangian.divergence(mapped, z))

    def outer_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess Phi(g) v."""
        return self.potential.covariance_product(self.activation(z), v)

    def _summed(self, per_token: Tensor) -> Tensor:
        return per_token if self.event_ndim == 1 else per_token.sum(-1)


class LegendreEnergy(_Activated, Fielded):
    r"""The energy of the equilibrium Energy Transformer, with g the layer norm of x.

    ```math
    E(x) = L^*(g) - \langle b, g \rangle - \Phi(g), \qquad g = \nabla L(x)
    ```

    f(x) = b + mean(g), with the mean of Phi: fixed points are x = b + grad Phi(LN(x)). With M = Hess L(x),
    grad E(x) = M (x - f(x)), so that the residual is a gradient in the metric M; df/dx = Hess Phi(g) M, whose
    eigenvalues are real, and x is a minimum where I - M^(1/2) Hess Phi(g) M^(1/2) is positive.

    E is bounded below whatever Phi: g lies in a ball, on which L* is finite. Plain steps are the concave-convex
    procedure: with D_L(f, x) = L(f) - L(x) - <g, f - x>, E(x) - E(f) = D_L(f, x) + D_Phi(g(f), g(x)). They descend by
    D_L at least where Phi is convex (memories), and with attention where min s/gamma exceeds -lambda_min(Hess Phi).
    Otherwise solvers with an energy guard shorten them.

    Args:
        lagrangian: L, a `LayerNormPotential`.
        potential: Phi, such as `TokenAttention(...) + TokenMemory(...)`. Its `event_ndim` is that of the problem.
        field: the input tokens b, (*batch, N, D).

    The solution is x; read it through `activation`. A layer norm forgets the mean of its token, and nearly forgets its
    length: the gradient to b of a loss that reads g has mean zero over the entries of a token.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit.

    Gradients: with respect to field and the tensors of both potentials, to any order.

    Not for the dynamics as published, which have no fixed point: use `PublishedDynamics`.

    Reference: Hoover et al. (2023), Energy Transformer, with the Legendre term of its layer norm.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.energies import LegendreEnergy
        >>> from implicit_attention.potentials import LayerNormPotential, Polynomial
        >>> memory, tokens = Polynomial(0.5 * torch.eye(4), beta=1.0), torch.linspace(-1, 1, 12).view(3, 4)
        >>> energy = LegendreEnergy(LayerNormPotential(), memory, field=tokens)
        >>> solution = solve(energy, tokens)
        >>> solution.converged, energy.activation(solution.value).shape
        (tensor([True, True, True]), torch.Size([3, 4]))
    """

    declares_all = True
    has_energy = True
    has_metric = True
    #: Plain steps descend for every convex potential.
    plain_steps_descend: bool = of_part("potential", "convex")
    select = Fielded._rows
    #: The attributes of the class: closed forms do not hold for a subclass with more.
    _attributes: ClassVar[tuple[str, ...]] = ("lagrangian", "potential", "field")

    def __init__(self, lagrangian: LayerNormPotential, potential: Potential, field: States) -> None:
        _Activated.__init__(self, lagrangian, potential)
        Fielded.__init__(self, field)
        lagrangian.check_state("field", field)
        potential.check_state("field", field)

    def energy(self, z: States) -> Float[Tensor, "*lead"]:
        """E(x), one number per problem."""
        g = self.activation(z)
        return self._energy(z, g, self.potential.value(g))

    def _energy(self, z: Tensor, g: Tensor, value: Tensor) -> Tensor:
        self.potential.check_value(value, z)
        return self._summed(self.lagrangian.conjugate_at(z) - (self.field * g).sum(-1)) - value

    def fixed_point_map(self, z: States) -> States:
        """f(x) = b + mean(g)."""
        return self.field + self.potential.mean(self.activation(z))

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        if not energy:
            return Evaluation(self.fixed_point_map(z), None)
        g = self.activation(z)
        value, mean = self.potential.evaluate(g)
        return Evaluation(self.field + mean, self._energy(z, g, value))

    def gradient(self, z: States) -> States:
        """Grad E(x) = M (x - f(x))."""
        return self.metric_product(z, z - self.fixed_point_map(z))

    #: Hess E(x) v, each problem with its own Hessian.
    hessian_product = Energy.hessian_product

    def lipschitz(self) -> Tensor | None:
        """gamma |Hess Phi|/min s, (*batch), over the states that f leads to, where it is below 1, else infinite.

        None where Phi knows no bound of its Hessian. f(x) lies within |Hess Phi| gamma sqrt(D) (of a sample of N tokens
        together sqrt(D N)) of b + mean(delta), which bounds s from below where the field b is long enough.
        """
        bound, norm = self.potential.lipschitz(), self.lagrangian
        if bound is None:
            return None
        delta = torch.zeros_like(self.field) if norm.delta is None else norm.delta.expand(self.field.shape)
        centre = self.field + self.potential.mean(delta)
        length = torch.linalg.vector_norm(centre - centre.mean(-1, keepdim=True), dim=-1)
        width, count = self.field.shape[-1], 1 if self.event_ndim == 1 else self.field.shape[-2]
        steep = bound[..., None] * (norm.gain if isinstance(norm.gain, float) else norm.gain.squeeze(-1))
        # A little further, because computed states are rounded.
        shortest = (length - (1 + 1e-6) * steep * (width * count) ** 0.5).relu()
        slope = (steep / (shortest.square() / width + norm.eps).sqrt()).amax(-1)
        return torch.where(slope < 1, slope, torch.inf)

    def linearize(self, z: Tensor) -> Linearization:
        norm = self.lagrangian.linearize(z)
        g = self.activation(z)
        cov = self.potential.linearize(g)

        def outer(v: Tensor) -> Tensor:
            return self.potential.covariance_product(g, v) if cov is None else cov.product(v)

        def by_tensors(u: Tensor) -> tuple[Tensor | None, ...]:
            if cov is None or not self._has_only(*self._attributes):
                return pullback(self, z, u)
            return *norm.vjp_tensors(outer(u)), *cov.vjp_tensors(u), u

        return Linearization(lambda v: outer(norm.product(v)), lambda u: norm.product(outer(u)), by_tensors, outer)


class PublishedDynamics(_Activated, Dynamics):
    """x -> x + grad Phi(LN(x)), with the energy -Phi(LN(x)): the Energy Transformer as it was published.

    It has no fixed point in x: along its steps x grows without bound, and only g = LN(x) slows down. A step of size a
    is `GradientDescent(a)`, and its energy falls for small a.

    Args:
        lagrangian: L, a `LayerNormPotential`; `LN` is its gradient.
        potential: Phi, such as `TokenAttention(...) + TokenMemory(...)`.

    Raises:
        TypeError: an argument that is no potential. ValueError: in `solve`, a solver that waits for convergence.

    Gradients: with respect to the initial state and the tensors of both potentials, by `Unrolled()`.

    Reference: Hoover et al. (2023), Energy Transformer.

    Not for an answer that does not depend on the number of steps: use `LegendreEnergy`.

    Examples:
        >>> import torch
        >>> from implicit_attention import Unrolled, solve
        >>> from implicit_attention.energies import PublishedDynamics
        >>> from implicit_attention.potentials import LayerNormPotential, Polynomial
        >>> from implicit_attention.solvers import GradientDescent
        >>> steps = GradientDescent(step_size=0.1, max_steps=12, rtol=0, atol=0)
        >>> problem = PublishedDynamics(LayerNormPotential(), Polynomial(torch.eye(4), beta=1.0))
        >>> solution = solve(problem, torch.linspace(-1, 1, 12).view(3, 4), solver=steps, adjoint=Unrolled())
        >>> solution.value.shape, solution.status
        (torch.Size([3, 4]), tensor([2, 2, 2], dtype=torch.int8))
    """

    has_energy = True
    has_metric = True
    _instead = "use GradientDescent(0.1, max_steps=12, rtol=0, atol=0), or LegendreEnergy, which has fixed points"

    def check_state(self, z: Tensor) -> None:
        super().check_state(z)
        self.lagrangian.check_state("initial", z)
        self.potential.check_state("initial", z)

    def energy(self, z: States) -> Float[Tensor, "*lead"]:
        """-Phi(g), one number per problem."""
        return -self.potential.value(self.activation(z))

    def fixed_point_map(self, z: States) -> States:
        """x + mean(g)."""
        return z + self.potential.mean(self.activation(z))

    def gradient(self, z: States) -> States:
        """Grad E(x) = -M mean(g)."""
        return -self.metric_product(z, self.potential.mean(self.activation(z)))
