"""The Bethe approximation of Ising systems by belief propagation: exact where the couplings form a tree."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._torch import host_may_look, host_may_look_at_constant, is_batched, norm, readable
from ..linear import CG
from ..linear._vectors import divide
from ..linear.base import FLOAT32_RTOL
from ..potentials import SignUnits
from ..problem import Linearization, Problem
from ..solution import Remedies, Status
from ..solvers import NewtonKrylov, Solver
from ..solvers.loop import Iteration, flat, rows_where, unflat
from ..solvers.safeguard import Proposal
from ._curvature import DENSE, everywhere, exceeds_one
from .approximation import FixedPointApproximation, SampleProblem, physics_solver, power_of_two, require_ising
from .bonds import Graph
from .system import SpinSystem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bethe(FixedPointApproximation):
    """log Z from messages u_ij, the field that site i passes on to site j through their coupling, for D = 1.

    With c_ij = beta h_i + sum_{k != j} u_ki, the field of i without j's part in it, and t_i = c_ij + u_ji:

        u_ij  = atanh(tanh(beta J_ij) tanh c_ij)
        log Z = sum_i log cosh t_i + sum_{i<j} (log Z_ij - log cosh t_i - log cosh t_j)

    for R = 1, with Z_ij the mean of exp(beta J_ij s_i s_j + c_ij s_i + c_ji s_j) over the four states of a pair. Exact
    on trees; elsewhere an approximation that is good where loops are long or couplings weak. log Z is stationary in the
    messages. They start from the bare fields, so that without one they stay at 0, also at temperatures where a
    magnetized solution is the stable one, which `initial=` leads to. Where loops are strong the messages may not
    settle, which the status says, and where they do the answer may be far off.

    Newton's steps are found from the sums of messages at sites: those of a bond follow from the sums at its ends, and a
    system of N numbers is left, whose matrix is the inverse covariance of the spins. A step is taken where the residual
    falls by half; else come steps of messages. Derivatives begin with that system, too.

    Correlations are derivatives of this log Z, as for every method: for a pair without a coupling that is m_i m_j even
    on a tree, where <s_i s_j> = chi_ij/beta + m_i m_j is exact. Of the matrix chi the column of one site is one linear
    solve for messages, which takes some tens of products, each linear in the bonds: `susceptibility_product` below.

    Args:
        solver: for the messages, all of a sample one problem; None is damped steps, unless messages are certain to
            contract, and then Newton's steps to a residual of 1e-11 (1e-6 in float32). Evaluations count products with
            the matrix of N numbers, too. For 10^6 sites of a lattice plain steps, `Picard(rtol=1e-11)`, take four times
            as long as Newton's; for 10^5 of a random graph with strong couplings of both signs they take half as long.
        adjoint: None is `Implicit()`.

    Gradients: with respect to field, couplings and beta, to any order.

    Reference: Yedidia, Freeman and Weiss (2005), section IV; Ricci-Tersenghi (2012), eq. 22, for the inverse covariance
    whose sign decides on stability; Mooij and Kappen (2007) for where messages contract, and Heskes (2003) for what
    that says of the free energy.

    Not for dense couplings, whose loops are short: use `AdaTAP()` or `TAP()`; nor for magnetizations of lattices below
    their transition, where m is off by .4 and F by .02 a spin (open 3 x 3, beta J = 1): `SaddlePoint(one_loop=True)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Bethe, Enumeration, SpinSystem, magnetization
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> bethe, exact = (magnetization(system, method) for method in (Bethe(), Enumeration()))
        >>> torch.allclose(bethe, exact, atol=1e-5)  # a pair is a tree
        True
        >>> from implicit_attention.spins import Bonds, thermodynamics
        >>> sites = torch.arange(1000)  # a chain, of which C_0j of the first site and all others are asked
        >>> chain = Bonds(torch.stack([sites[:-1], sites[1:]], -1), torch.full((999,), 0.5), 1000)
        >>> found = thermodynamics(SpinSystem(chain, torch.zeros(1000)), Bethe())
        >>> first = found.susceptibility_product((sites == 0)[:, None].float())[:, 0]
        >>> torch.allclose(first, torch.tanh(torch.tensor(0.5)) ** sites, atol=1e-5)
        True
    """

    by_bonds = True
    remedies: ClassVar[Remedies] = {
        **FixedPointApproximation.remedies,
        Status.MAX_STEPS: "messages need not settle around strong loops: use AdaTAP(), Enumeration() or samples",
    }

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        require_ising(self, system)

    def problem(self, system: SpinSystem) -> _Messages:
        return _messages(system)[0]

    def start(self, system: SpinSystem) -> Tensor:
        messages = self.problem(system)
        return messages.fixed_point_map(messages.bonds.new_zeros(*system.batch, 2, messages.graph.num_bonds))

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        # u_ij = atanh(t x) with t = tanh(beta J_ij), where x is the mean that i has without j. A pair of the means m_i
        # and m_j obeys m_i (1 - t^2 x^2) = x (1 - t^2) + t m_j (1 - x^2).
        messages = self.problem(system)
        below = 1 - torch.finfo(m.dtype).eps
        t = below * torch.tanh(messages.bonds)[..., None, :]
        own = messages.graph.at_ends(m[..., 0] / system.radius)
        other = own.flip(-2)
        between = (1 - t) * (1 + t)
        root = (between.square() - 4 * t * (own - t * other) * (other - t * own)).clamp(min=0).sqrt()
        return torch.atanh((2 * t * (own - t * other) / (between + root)).clamp(-below, below))

    def unit(self, system: SpinSystem) -> Tensor:
        # No message is larger than its bond.
        return power_of_two(self.problem(system).bonds.detach().abs().clamp(min=1.0))[..., None, :]

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        messages, constant = _messages(system)
        return messages.log_partition(state) + constant

    def magnetization_at(self, system: SpinSystem, state: Tensor) -> Tensor:
        return system.radius * torch.tanh(self.problem(system).cavity(state)[0])[..., None]

    def contracting(self, system: SpinSystem) -> Tensor:
        # A message changes by tanh |K_ij| times the changes of those that i gets from others, at most. Steps contract
        # where that map, taken several times, makes all changes of size 1 smaller.
        messages = self.problem(system)
        graph, size = messages.graph, torch.tanh(messages.bonds.detach().abs())[..., None, :]
        change = size.new_ones(*system.batch, 2, graph.num_bonds)
        certain = torch.zeros_like(change[..., 0, :0].sum(-1), dtype=torch.bool)
        for _ in range(LINEAR_STEPS):
            after = size * graph.others(change.flip(-2))
            certain = certain | (torch.nn.functional.pad(after.flatten(-2), (0, 1)).amax(-1) < 1)
            if everywhere(certain):
                break
            change = after
        return certain

    def unstable(self, system: SpinSystem, state: Tensor) -> Tensor:
        if everywhere(certain := self.contracting(system)):
            # Where messages settle by plain steps, the free energy has a minimum.
            return torch.zeros_like(certain)
        messages = self.problem(system)
        graph, sign = messages.graph, torch.sign(messages.bonds)
        r, weights, _ = _correlations(*messages.slopes(state))
        # The inverse covariance, 1 + sum_j r^2/(1 - r^2) on the diagonal and -r/(1 - r^2), by the sums of its rows.
        own = 1 - graph.sums_of(r / (1 + r)) + torch.finfo(r.dtype).eps ** 0.5
        if system.num_sites <= DENSE:
            return _indefinite(own, graph.dense(sign * weights))
        diagonal = own + graph.sums_of(weights)
        root = torch.where(diagonal > 0, diagonal, torch.inf).rsqrt()[..., None]
        inner = exceeds_one(lambda v: root * graph.product(sign * weights, root * v), root)
        return torch.logical_or(inner, (diagonal <= 0).any(-1))

    def default_solver(self, dtype: torch.dtype) -> Solver:
        near = physics_solver(dtype, self.rtol)
        # A guess that leaves this part of the residual costs no more than the rest of a step.
        return _Newton(rtol=near.rtol, atol=near.atol, max_steps=near.max_steps, forcing=1e-3)


_log_cosh = SignUnits().cumulant
#: Steps of the linear map that bounds those of messages, by which these are known to contract or not.
LINEAR_STEPS = 16


class _Pause(NamedTuple):
    """Counts of plain steps, (*lead): those left before Newton's is tried, and those after one that is rejected."""

    left: Tensor
    length: Tensor


@dataclasses.dataclass(frozen=True)
class _Newton(NewtonKrylov):
    """Newton's method by the guesses of a problem, after plain steps; some more of these after each rejected one."""

    backtracks: ClassVar[bool] = False
    growth: ClassVar[float] = 0.5
    plain_steps: ClassVar[int] = 6

    def plain_start(self, problem: Problem) -> int:
        return self.plain_steps

    def init_history(self, z: Tensor) -> _Pause:
        left = z.new_zeros(z.shape[:-1])
        return _Pause(left, torch.full_like(left, self.plain_steps))

    def remember(self, problem: Problem, history: _Pause, dz: Tensor, dr: Tensor, fresh: Tensor) -> _Pause:
        left, length = history
        return _Pause(torch.where(fresh, (left - 1).clamp(min=0), length), length + self.plain_steps * ~fresh)

    def propose(self, problem: Problem, history: Any, point: Iteration, accepted: Tensor) -> Proposal:
        due, event = accepted & (history.left == 0), point.event_shape
        if host_may_look(due) and not bool(due.any()):
            return Proposal(point.r, due)
        guess = problem.linearize(unflat(point.z, event)).guess
        if guess is None:
            # Inside torch.vmap.
            return super().propose(problem, history, point, due)
        # The last step, which squares a small residual, goes as far as it has to, so that no other follows.
        size = norm(point.mapped)
        needed = (self.atol + self.rtol * size) / (4 * point.residual)
        rtol = torch.where(needed > point.residual / size, needed, self.forcing).clamp(max=self.forcing)[..., None]
        step, spent = guess(unflat(rows_where(due, point.r, 0.0), event), rtol, False)
        step = flat(step, event)
        return Proposal(step, due & (step != 0).any(-1), spent)


class _Messages(SampleProblem):
    """u = f(u) for the messages u_ij and u_ji of each bond, (*batch, 2, E), in units of 1/beta.

    Args:
        graph: of the bonds.
        field: (*batch, N).
        bonds: (*batch, E), 0 for those that join a site to itself.
    """

    def __init__(self, graph: Graph, field: Tensor, bonds: Tensor) -> None:
        self.graph: Graph = graph
        self.field = field
        self.bonds = bonds
        self.own_axes = {"field": 1, "bonds": 1}

    def cavity(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """t_i, (*batch, N), and c_ij and c_ji of each bond, (*batch, 2, E)."""
        into = u.flip(-2)
        total = self.field + self.graph.sums(into)
        return total, self.graph.at_ends(total) - into

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return _message(self.cavity(z)[1], self.bonds[..., None, :])

    def linearize(self, z: Tensor) -> Linearization:
        size, rest = self.slopes(z)
        slope = torch.sign(self.bonds)[..., None, :] * size

        def by_tensors(u: Tensor) -> tuple[Tensor | None, ...]:
            cavity = self.cavity(z)[1]
            by_bonds = torch.sign(cavity) * _slope(cavity.abs(), self.bonds.abs()[..., None, :]) * u
            by_field = self.graph.sums(slope * u)
            return None, by_field.sum_to_size(self.field.shape), by_bonds.sum(-2).sum_to_size(self.bonds.shape)

        return Linearization(
            lambda v: slope * self.graph.others(v.flip(-2)),
            lambda u: self.graph.others(slope * u).flip(-2),
            by_tensors,
            guess=partial(self._by_sites, z, slope, rest),
        )

    def _by_sites(
        self, u: Tensor, slope: Tensor, rest: Tensor, rhs: Tensor, rtol: float | Tensor, transpose: bool
    ) -> tuple[Tensor, Tensor]:
        """`Linearization.guess` at messages u from the sums of messages at N sites, which the two of a bond follow.

        x_ij = rhs_ij + s_ij (X_i - x_ji) with X_i = sum_j x_ji, and the same for x_ji, give with S = s_ij s_ji

            (1 + sum_j S/(1 - S)) X_i - sum_j s_ji/(1 - S) X_j = sum_j (rhs_ji - s_ji rhs_ij)/(1 - S).

        At a solution S is the square of the correlation coefficient of the pair, and the matrix, in units of the
        standard deviations of spins, their inverse covariance, which conjugate gradients solve for.
        """
        graph = self.graph
        r, weights, gap = _correlations(slope.abs(), rest)
        square, gap, bonds = r.square()[..., None, :], gap[..., None, :], torch.sign(self.bonds) * weights
        deviation = torch.exp(-_log_cosh(self.cavity(u)[0])).clamp(min=torch.finfo(u.dtype).tiny ** 0.5)
        unit = deviation if transpose else 1 / deviation
        root = (1 + graph.sums_of(r * weights)).rsqrt()
        bonds = bonds * graph.at_ends(root).prod(-2)

        def matvec(v: Tensor) -> Tensor:
            return v - graph.product(bonds, v[..., None])[..., 0]

        given = slope * rhs if transpose else rhs
        alone = (given - slope * given.flip(-2)) / gap
        sums = graph.sums(alone if transpose else alone.flip(-2))
        # In units of the right-hand side, as the sums are larger where bonds are strong.
        size, finest = rtol * norm(rhs.flatten(-2))[..., None], FLOAT32_RTOL if rhs.dtype == torch.float32 else 0.0
        found = CG(rtol=finest, atol=1.0).solve(matvec, root / unit * divide(sums, size))
        ends = graph.at_ends(unit * root * size * found.value)
        mine, other = (ends.flip(-2), ends) if transpose else (ends, ends.flip(-2))
        x = alone + (slope * mine - square * other) / gap
        if transpose:
            # What was solved for is slope x.
            x = rhs + mine - x.flip(-2)
        # Where the free energy curves downwards, what is found does not move along that direction, to a saddle.
        return torch.where(x.isfinite(), x, 0.0), found.num_steps

    def slopes(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """|df_ij/dc_ij|, sinh(2 |K|)/(cosh(2 c) + cosh(2 K)), (*batch, 2, E), and 1 less that."""
        strength, other = self.bonds.abs()[..., None, :], self.cavity(u)[1].abs()
        # Nothing overflows, and no two large numbers are subtracted.
        p, q = torch.exp(-2 * strength), torch.exp(-2 * other)
        far = torch.sigmoid(2 * (other - strength)) / (1 + p * q)
        return _slope(strength, other), (1 + q * (q + 2 * p)) * far

    def log_partition(self, u: Tensor) -> Tensor:
        """The Bethe log Z, (*batch); at the fixed point its derivative in every message is 0."""
        total, cavity = self.cavity(u)
        here, there = cavity.unbind(-2)
        # A pair with the fields a and b that all others leave it: the mean of exp(K + log cosh(a + b)) and of
        # exp(-K + log cosh(a - b)), as terms that are positive, so that they do not cancel where they are small.
        pairs = (_log_cosh(here + there) + _log_cosh(here - there)) / 2
        sites = _log_cosh(total)
        pairs = pairs + _log_cosh(self.bonds + _message(here, there)) - self.graph.at_ends(sites).sum(-2)
        return sites.sum(-1) + self.graph.without_loops(pairs).sum(-1)


def _correlations(size: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|r|, |r|/(1 - r^2) and 1 - r^2 for the correlation coefficient r of each bond, (*batch, E), from its slopes."""
    (here, there), (beyond_here, beyond_there) = size.unbind(-2), rest.unbind(-2)
    r, gap = (here * there).sqrt(), beyond_here + here * beyond_there
    gap = gap.clamp(min=torch.finfo(gap.dtype).max ** -0.25)
    return r, r / gap, gap


def _indefinite(own: Tensor, bonds: Tensor) -> Tensor:
    """Whether the matrix diag(own_i + sum_j |b_ij|) - b, (*batch, N, N), has a negative eigenvalue, (*batch).

    By elimination in terms of these numbers, which subtracts no large ones: it holds to the rounding of `own`, however
    large b is.

    Reference: O'Cinneide (1996), for b without negative entries.
    """
    result = torch.zeros_like(own[..., 0], dtype=torch.bool)
    for _ in range(own.shape[-1]):
        row, rest = bonds[..., 0, 1:], bonds[..., 1:, 1:]
        pivot = own[..., :1] + row.abs().sum(-1, keepdim=True)
        result = result | (pivot[..., 0] < 0)
        # After a negative pivot the verdict stands, and only the numbers must stay finite.
        part = row / torch.where(pivot > 0, pivot, torch.inf)
        joined = row[..., :, None] * part[..., None, :]
        joined = joined - torch.diag_embed(joined.diagonal(dim1=-2, dim2=-1))
        cancelled = torch.where(rest * joined < 0, torch.minimum(rest.abs(), joined.abs()), 0.0)
        own = own[..., 1:] + part.abs() * own[..., :1] + 2 * cancelled.sum(-1)
        bonds = rest + joined
    return result


def _messages(system: SpinSystem) -> tuple[_Messages, Tensor]:
    """The problem of +-1 spins in units of 1/beta, and the constant of the diagonal, (*batch)."""
    field = system.beta_over(1) * system.radius * system.live_field[..., 0]
    if (graph := system.graph) is None:
        i, j = torch.triu_indices(system.num_sites, system.num_sites, 1, device=field.device)
        graph, numbers = Graph(torch.stack([i, j]), system.num_sites, loops=False), system.live_couplings
        values, own = (numbers[..., i, j] + numbers[..., j, i]) / 2, numbers.diagonal(dim1=-2, dim2=-1)
    else:
        values = graph.without_loops(system.live_numbers)
        own = system.live_numbers - values
    scale = system.beta_over(1) * system.radius**2
    constant = (scale * own).expand(*system.batch, -1).sum(-1) / 2
    return _Messages(graph, field, (scale * values).expand(*system.batch, -1)), constant


def _slope(a: Tensor, b: Tensor) -> Tensor:
    """sinh(2 a)/(cosh(2 a) + cosh(2 b)) of numbers >= 0, the derivative of their message by b."""
    return -torch.expm1(-4 * a) * torch.sigmoid(2 * (a - b)) / (1 + torch.exp(-2 * (a + b)))


def _message(a: Tensor, b: Tensor) -> Tensor:
    """atanh(tanh a tanh b): where it is small, and where tanh is 1 to rounding, too."""
    numbers, weak, strongest = readable(b), None, math.inf
    if numbers is not None and numbers.numel() > 0 and host_may_look_at_constant(numbers) and not is_batched(b):
        # Samples whose bonds are weak take fewer operations, whatever others take.
        largest = numbers.abs().amax(-1, keepdim=True)
        weak, strongest = largest <= 1, float(largest.amax())
        if bool(weak.all()):
            return torch.atanh(torch.tanh(a) * torch.tanh(b))
    # By sizes, with signs whose derivative is 0, so that a derivative at 0 is that of the size.
    s, t = (torch.copysign(x.new_tensor(2.0), x) for x in (a, b))
    x, y, common = -s * a, -t * b, a.new_zeros(())
    # Below -large, exp(x) is less than rounding; down to there its powers are far from underflow.
    large = -1.1 * math.log(torch.finfo(a.dtype).eps)
    if not 2 * strongest <= large:
        # What two large numbers have in common the message has, too.
        common = (-torch.maximum(x, y) - large).clamp(min=0)
        x, y = x + common, y + common
    u = s * (t / 8) * (torch.log1p(torch.expm1(x) * torch.expm1(y) / (torch.exp(x) + torch.exp(y))) + common)
    if weak is None or not bool(weak.any()):
        return u
    return torch.where(weak, torch.atanh((torch.tanh(a) * torch.tanh(b)).clamp(-0.8, 0.8)), u)
