"""The equations of Thouless, Anderson and Palmer: mean field with the reaction of the others to a spin's own mean."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import _validate
from ..potentials import SphereUnits
from ..solution import Remedies, Status
from ._curvature import covariance_roots, exceeds_one
from ._plefka_expansion import Expansion, IsingExpansion, VectorExpansion
from .approximation import FixedPointApproximation, ResponseApproximation, field_unit, require_numbers
from .system import SpinSystem, mirrored


@dataclasses.dataclass(frozen=True, kw_only=True)
class TAP(ResponseApproximation):
    r"""log Z expanded in the couplings at fixed magnetizations, to second or third order, stationary in them.

    With the covariance S_i(m_i) of a site that has the mean m_i, here for a number J_ij per pair:

    ```math
    \begin{align*}
    \log Z &= \sum_i S(m_i) + \beta \sum_i h_i \cdot m_i + \frac\beta2 \sum_{ij} J_{ij}\, m_i \cdot m_j + G \\
    G &= \frac{\beta^2}4 \sum_{ij} J_{ij}^2 \operatorname{Tr}(S_i S_j)
    + \frac{\beta^3}{12} \sum_{ij} J_{ij}^3\, T_i \cdot T_j
    + \frac{\beta^3}6 \sum_{ijk} J_{ij} J_{jk} J_{ki} \operatorname{Tr}(S_i S_j S_k)
    \end{align*}
    ```

    with sums over ordered pairs and triples of different sites, T_i the third cumulant. m_i answers the field
    h_i + sum_j J_ij m_j + (1/beta) dG/dm_i, whose last term is Onsager's reaction, -beta m_i sum_j J_ij^2 (1 - m_j^2)
    for Ising spins. Off by O((beta J)^3) with order 2, O((beta J)^4) with order 3. -dF/dh is m exactly.

    A step costs O(N^2 D) with order 2 and O(N^3) with order 3, on E bonds O(E D) and one more number for each triangle
    of the graph; with a matrix J_ij per pair O(N^2 D^3) and O(N^3 D^3).
    A diagonal adds its constant beta J_ii R^2/2. Of a matrix J_ii that holds for its trace; the rest, an anisotropy of
    the site, is taken to first order only, whatever `order`.

    Solutions are of use where the expansion converges, Plefka's criterion: the largest eigenvalue of
    beta^2 J_ij^2 tau_i tau_j, tau the largest variance of a site, is below 1 (for Ising spins with random couplings of
    variance 1/N that is the de Almeida-Thouless number beta^2 mean (1 - m^2)^2). The free energy has minima beyond,
    which are not states of the system: there the status is OUT_OF_RANGE, however small the residual.

    Args:
        order: 2 or 3.
        response: of one spin to its field, such as `SphereUnits()` (exact) or `AmosResponse()`.
        solver: None is damped steps from the bare field, which leave solutions beyond the criterion alone, and then
            `Anderson` to the precision of the dtype. A solver that the user passes starts at the bare field.
        adjoint: default `Implicit()`.

    Gradients: with respect to field, couplings and beta, to any order.

    Reference: Thouless, Anderson and Palmer (1977); Plefka (1982); Georges and Yedidia (1991) for the third order.

    Not for strong couplings, where the expansion does not converge (OUT_OF_RANGE): use `AdaTAP()`, on
    lattices `SaddlePoint(one_loop=True)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import TAP, SpinSystem, magnetization
        >>> couplings = 0.5 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.tensor([[0.3], [0.0], [-0.1]]), beta=0.8)
        >>> magnetization(system, TAP())[:, 0].round(decimals=3)  # exact are 0.198, 0.078 and 0.038
        tensor([0.2080, 0.0710, 0.0240])
    """

    remedies: ClassVar[Remedies] = {
        **FixedPointApproximation.remedies,
        Status.OUT_OF_RANGE: "the expansion in the couplings does not converge here: use AdaTAP(), "
        "where neighbours are few SaddlePoint(one_loop=True), or lower beta",
    }

    order: Literal[2, 3] = _validate.integer(2, low=2, remedy="use MeanField for the first order")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.require(self.order <= 3, "order", "be 2 or 3", self.order)

    by_bonds = True

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        if system.graph is not None:
            require_numbers("TAP on bonds", system, "use MeanField(), or Bonds(...).dense()")
            if self.order > 2:
                # Here they are kept, and within derivatives they are not.
                system.graph.triangles()

    def problem(self, system: SpinSystem) -> Expansion:
        return self._expansion(system)[0]

    def start(self, system: SpinSystem) -> Tensor:
        return self.problem(system).field

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        return self.response.inverse(m, 1.0, system.radius)

    def magnetization_at(self, system: SpinSystem, state: Tensor) -> Tensor:
        return self.response.magnetization(state, 1.0, system.radius)

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        problem, constant = self._expansion(system)
        return problem.log_partition(state) + constant

    def unit(self, system: SpinSystem) -> Tensor:
        return system.beta_tensor(2).detach() * field_unit(system)

    def unstable(self, system: SpinSystem, state: Tensor) -> Tensor:
        problem = self.problem(system)
        root, inverse = covariance_roots(self.response, state, 1.0, system.radius)
        # With S the covariances of sites the transposed Jacobian is S A, and S^{-1} - A the Hessian of beta F in m.
        transposed = problem.linearize(state).vjp
        return exceeds_one(lambda v: inverse(transposed(root(v))), state)

    def out_of_range(self, system: SpinSystem, state: Tensor) -> Tensor:
        return torch.gt(self.problem(system).instability(state), 1)

    def _expansion(self, system: SpinSystem) -> tuple[Expansion, Tensor]:
        """The fixed-point problem, and the constant of the diagonal, (*#batch)."""
        field = system.beta_tensor(2) * system.live_field
        kind = IsingExpansion if system.dim == 1 and isinstance(self.response, SphereUnits) else VectorExpansion
        options: dict[str, Any] = {"response": self.response, "radius": system.radius, "order": self.order}
        if (graph := system.graph) is not None:
            values = system.beta_tensor(1) * system.live_numbers
            bonds = graph.without_loops(values)
            return kind(field, bonds, None, graph=graph, **options), system.radius**2 / 2 * (values - bonds).sum(-1)
        couplings, block = system.live_couplings, system.block
        bonds = system.beta_tensor(4 if block else 2) * (couplings + mirrored(couplings, block=block)) / 2
        itself = torch.eye(system.num_sites, dtype=torch.bool, device=bonds.device)
        onsite = None
        if block:
            own = bonds.diagonal(dim1=-4, dim2=-3).movedim(-1, -3)
            trace = own.diagonal(dim1=-2, dim2=-1).mean(-1)
            onsite = own - torch.diag_embed(trace[..., None].expand(*trace.shape, system.dim))
            itself = itself[..., None, None]
        else:
            trace = bonds.diagonal(dim1=-2, dim2=-1)
        return kind(field, bonds.masked_fill(itself, 0.0), onsite, **options), system.radius**2 / 2 * trace.sum(-1)
