"""Naive mean field: every spin answers the mean of the others."""

from __future__ import annotations

import dataclasses

import torch
from einops import einsum
from torch import Tensor

from .. import _validate
from .._autograd import sum_to_shape
from ..adjoints import Adjoint
from ..potentials.spin import BesselResponse, Response
from ..problem import Linearization, Problem
from ..solve import solve
from ..solvers import Anderson, Solver
from .method import LogPartition, Method
from .system import SpinSystem, couple


class MeanFieldProblem(Problem):
    """m_i = R A(beta R |f_i|) f_i/|f_i| with f = h + J m: all sites of a sample are one problem.

    Args:
        system: the spins.
        response: of one spin to its field.
    """

    event_ndim = 2

    def __init__(self, system: SpinSystem, response: Response) -> None:
        self.field = system.live_field
        self.couplings = system.live_couplings
        self.beta = system.beta
        self.response = response
        self.radius = system.radius
        self.block = system.block

    def local_field(self, m: Tensor) -> Tensor:
        """h + J m."""
        return self.field + couple(self.couplings, m, block=self.block)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.response.magnetization(self.local_field(z), self.beta, self.radius)

    def linearize(self, z: Tensor) -> Linearization:
        f = self.local_field(z)
        beta = self.beta[..., None, None] if isinstance(self.beta, Tensor) else self.beta

        def responded(v: Tensor) -> Tensor:
            return beta * self.response.covariance_product(f, self.beta, self.radius, v)

        def product(v: Tensor) -> Tensor:
            return responded(couple(self.couplings, v, block=self.block))

        def transposed(u: Tensor) -> Tensor:
            twin = self.couplings.transpose(-4, -3) if self.block else self.couplings
            return couple(twin.mT, responded(u), block=self.block)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            w = responded(u)
            pattern = "... i a, ... j b -> ... i j a b" if self.block else "... i d, ... j d -> ... i j"
            gradients: list[Tensor | None] = [w, sum_to_shape(einsum(w, z, pattern), self.couplings.shape)]
            if isinstance(self.beta, Tensor):
                gradients.append(sum_to_shape((w * f).sum((-1, -2)) / self.beta, self.beta.shape))
            return tuple(gradients)

        return Linearization(product, transposed, pullback)

    def check_closure(self, z: Tensor) -> None:
        """Nothing is read but attributes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanField(Method):
    """log Z = sum_i log Z_1(h_i + sum_j J_ij m_j) - (beta/2) sum_ij m_i J_ij m_j, stationary at m = response(h + J m).

    The free energy of independent spins: with the exact response it is an upper bound on F. Off by O((beta J)^2).

    Args:
        response: of one spin to its field: `BesselResponse()` (exact), `AmosResponse()` or `LargeDResponse()`.
        solver: default `Anderson`, to a relative residual of 1e-10 (1e-6 in float32).
        adjoint: default `Implicit()`.

    Above the transition there are several branches; the one that starts at the response to the bare field is taken.

    Reference: Plefka (1982), first order.
    """

    response: Response = dataclasses.field(default_factory=BesselResponse)
    solver: Solver | None = None
    adjoint: Adjoint | None = None

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("response", Response, "BesselResponse()"),
            ("solver", Solver, "Anderson()"),
            ("adjoint", Adjoint, "Implicit()"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "response"):
                required = f"be a {kind.__name__}"
                raise TypeError(_validate.message(name, required, repr(value), f"for example {example}"))

    def site_response(self) -> Response:
        return self.response

    def log_partition(self, system: SpinSystem) -> LogPartition:
        problem = MeanFieldProblem(system, self.response)
        start = self.response.magnetization(problem.field, problem.beta, problem.radius).detach()
        solution = solve(
            problem, start, solver=self.solver or physics_solver(start.dtype), adjoint=self.adjoint, on_failure="ignore"
        )
        m = solution.value
        sites = self.response.log_partition(problem.local_field(m), problem.beta, problem.radius).sum(-1)
        pairs = (m * couple(problem.couplings, m, block=problem.block)).sum((-1, -2))
        return LogPartition(sites - system.sample_beta * pairs / 2, solution.evidence())


def physics_solver(dtype: torch.dtype) -> Solver:
    """The default of mean-field equations: numbers that are compared to ten digits."""
    tolerance = 1e-6 if dtype == torch.float32 else 1e-11
    return Anderson(rtol=tolerance, atol=tolerance, max_steps=1000)
