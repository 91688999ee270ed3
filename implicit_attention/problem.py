"""The base of problems z = f(z), one per leading index, with the properties of f that solvers use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from typing_extensions import Self

from . import _validate
from ._autograd import (
    at_least_single,
    check_graph,
    exact_precision,
    grad,
    has_tangent,
    host_may_look,
    is_batched,
    is_exporting,
    jvp_by_vjp,
    same,
    transforms_active,
    vjp,
)
from ._declared import Declared, abstract, pick
from ._types import LinearMap
from .kernels.problem import Attention
from .status import LEVERS, Status, advice

_P = TypeVar("_P", bound=Declared)


class Linearization(NamedTuple):
    """The Jacobian J = df/dz of a problem at one state, as three linear maps without graph.

    jvp: v -> J v; vjp: u -> J^T u; vjp_tensors: u -> (df/dt)^T u for each t of `problem.tensors()`
    (None for tensors that are not floating-point, and maybe for those that do not require grad where others do).
    outer: of a problem with a metric, v -> H v for the symmetric H in J = H M; else None.
    """

    jvp: LinearMap
    vjp: LinearMap
    vjp_tensors: Callable[[Tensor], tuple[Tensor | None, ...]]
    outer: LinearMap | None = None


class Evaluation(NamedTuple):
    """f(z) and, where asked for, E(z) per problem."""

    mapped: Tensor
    energy: Tensor | None


#: What is derived from each of energy, gradient and map.
_DERIVED = (
    *("energy", "gradient", "fixed_point_map", "hessian_product", "evaluate", "linearize", "lipschitz", "select"),
    *("row_block", "plain_steps_descend", "has_metric", "divergence", "metric_product", "metric_root_product"),
    *("outer_product", "bottomless"),
)


class TokenOrder:
    """The order of causal tokens: each reads all tokens before it, or by a mask some, directly or through others.

    Args:
        pairs: boolean, broadcasts to (*lead, N, N): True = token i reads token j <= i. None is all before it.
    """

    def __init__(self, pairs: Tensor | None = None) -> None:
        #: Whether token i reads token j, directly or through others; None where all later tokens read a token.
        self._readers: Tensor | None = None
        if pairs is None:
            return
        count = pairs.shape[-1]
        reads = (pairs | torch.eye(count, dtype=torch.bool, device=pairs.device)).float()
        for _ in range(max(count - 1, 0).bit_length()):
            before, reads = reads, ((reads @ reads) > 0).float()
            if host_may_look(reads) and torch.equal(before, reads):
                break
        # A window, unlike documents, lets every token reach all later ones.
        if not (host_may_look(reads) and torch.equal(reads, torch.ones_like(reads).tril())):
            self._readers = reads

    def behind(self, tokens: Tensor) -> Tensor:
        """The `tokens`, boolean, (*lead, N), and those that read them."""
        if self._readers is None:
            return tokens.cumsum(-1) > 0
        return (self._readers @ tokens.to(self._readers.dtype)[..., None])[..., 0] > 0

    def restricted(self, index: Tensor) -> TokenOrder:
        """The order of the tokens `index`, (K,) or (*lead, K), which follow each other as before."""
        order = TokenOrder()
        if self._readers is not None:
            # One of the two has no leading axes, or both have the same.
            lead = index.shape[:-1] or self._readers.shape[:-2]
            readers, index = self._readers.expand(*lead, -1, -1), index.expand(*lead, -1)
            order._readers = pick(pick(readers, index).mT, index).mT
        return order


class Problem(Declared, general=True):
    """A fixed-point problem z = f(z).

    The last `event_ndim` axes of a state are one problem, all leading axes number independent problems. A subclass
    defines `fixed_point_map`; everything else has a default built on it with automatic differentiation. A subclass that
    overrides the energy of a problem in closed form has these defaults too. One that overrides its map or gradient
    defines the energy, too, or raises TypeError as it is made: of a map alone make a subclass of `Problem`.

    Not for a function at hand: use `FixedPointMap`, or `EnergyFunction` for an energy.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.problem import Problem
        >>> class Cosine(Problem):
        ...     event_ndim = 0
        ...     def fixed_point_map(self, z):
        ...         return z.cos()
        >>> [round(z, 3) for z in solve(Cosine(), torch.zeros(2)).value.tolist()]
        [0.739, 0.739]
    """

    _follows: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("fixed_point_map", "energy", "gradient"), _DERIVED),
        "evaluate": ("linearize",),
        "hessian_product": ("linearize", "lipschitz"),
    }

    #: Number of trailing axes that form one problem.
    event_ndim: int
    #: Whether df/dz is symmetric (f - z is a negative gradient).
    symmetric: bool = False
    #: Whether there is an energy whose negative gradient is f(z) - z.
    has_energy: bool = False
    #: Whether that holds in a metric: grad E(z) = M(z) (z - f(z)) with M(z) symmetric and >= 0, and df/dz = H M with a
    #: symmetric H. Such a problem defines `divergence`, the products with M, M^(1/2) and H, and `Linearization.outer`.
    has_metric: bool = False
    #: Whether it is that only after multiplication by a number > 0 that depends on z (mean shift, steps on a sphere):
    #: E then tells whether a step descends, but not how far it should.
    steps_rescaled: bool = False
    #: Rows are padded to multiples of this, so that a row's bits do not depend on how many others there are. Torch's
    #: kernels do not promise that; attention was measured to give a row the same bits for all multiples of 32.
    row_block: int = 32
    #: Whether E(f(z)) <= E(z) - divergence(z, f(z)) is guaranteed, |f(z) - z|^2/2 without a metric (with
    #: `steps_rescaled`: times a number > 0 that depends on z), so that plain steps need no test.
    plain_steps_descend: bool = False
    #: Whether f is known to compute each problem by itself. Otherwise one evaluation of all judges the answers of a
    #: solve where problems have left the work, and adjoints keep all together.
    separates: bool = True
    #: Whether f is known to read other problems: none has finished then before all have.
    mixes: bool = False
    #: The dtypes of its tensors in a solve, where half precision is float32: "one"; "any" that f converts; or "kept".
    dtypes: str = "one"
    #: Where the axis before the last numbers tokens that read no later ones: the loop then stops each on its own.
    token_order: TokenOrder | None = None

    @abstract
    def fixed_point_map(self, z: Tensor) -> Tensor:
        """f(z), differentiable to any order."""
        raise NotImplementedError(f"{type(self).__name__} must define fixed_point_map(z)")

    @abstract
    def energy(self, z: Tensor) -> Tensor:
        """E(z) per problem."""
        raise NotImplementedError(f"{type(self).__name__} has no energy; use an energy, or a solver that needs none")

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        """f(z) and, if asked for, E(z) in one go."""
        return Evaluation(self.fixed_point_map(z), self.energy(z) if energy else None)

    def linearize(self, z: Tensor) -> Linearization:
        """The Jacobian of f at z, for many products at one state."""

        def mapped(z: Tensor) -> Tensor:
            result = self.fixed_point_map(z)
            check_graph(self._name(), result, self.fixed_point_map, z)
            return result

        _, by_state = vjp(mapped, z)

        def transposed(u: Tensor) -> Tensor:
            result: Tensor = by_state(u)[0]
            return result

        def product(v: Tensor) -> Tensor:
            return transposed(v) if self.symmetric else jvp_by_vjp(self.fixed_point_map, (z,), (v,))

        return Linearization(product, transposed, lambda u: pullback(self, z, u))

    def retract(self, z: Tensor) -> Tensor:
        """The state of this problem's domain that stands for z, such as that on a sphere: where the loop evaluates f.

        The loop returns such states only. f, E and their derivatives at z are those at the state that stands for it.
        """
        return z

    def divergence(self, z: Tensor, mapped: Tensor) -> Tensor:
        """Return the decrease of E by the plain step from z to f(z) where it descends, (*lead): |f(z) - z|^2/2."""
        event = tuple(range(-self.event_ndim, 0))
        square = (mapped - z).square()
        return (square.sum(event) if event else square) / 2

    def metric_product(self, z: Tensor, v: Tensor) -> Tensor:
        """M(z) v with the metric M of the problem, the identity for most."""
        return v

    def metric_root_product(self, z: Tensor, v: Tensor) -> Tensor:
        """M(z)^(1/2) v, with the symmetric root."""
        return v

    def outer_product(self, z: Tensor, v: Tensor) -> Tensor:
        """H v, where df/dz = H M."""
        return self.linearize(z).jvp(v)

    def check_solver(self, solver: Any) -> None:
        """Raise if the problem cannot be solved by this solver."""
        if self.token_order is not None:
            fits = getattr(solver, "by_token", False)
            required = "stop every token of a causal layer on its own"
            _validate.require(fits, "solver", required, type(solver).__name__, "use Anderson(history=1) or Picard()")

    #: The remedy that makes f contract more where no number of the problem is known to.
    to_contract: str = ""

    def advice(self, remedies: Mapping[Status, str]) -> dict[Status, str]:
        """Return the remedies for this problem's failures by status, given those of the solver."""
        names = {name for part in self._within() for name in vars(part)}
        return advice(remedies, " or ".join(LEVERS[name] for name in LEVERS if name in names) or self.to_contract)

    def outside(self, z: Tensor) -> Tensor | None:
        """Which states (*lead) f leaves where they are without solving anything; None where that cannot happen."""
        return None

    def lipschitz(self) -> Tensor | None:
        """A Lipschitz constant of f, per batch entry (*batch) of states (*batch, N, D), or None if none is known.

        Over all states, with a metric over a convex set that holds f(z) for every z.
        """
        return None

    def bottomless(self, z: Tensor | None = None) -> Tensor | None:
        """Whether the energy certainly falls without end, per batch entry (*lead[:-1]); None if none is known to.

        Given states: whether it does, and curves downwards at z, (*lead), so that z is near no minimum.
        """
        return None

    def select(self, index: Tensor) -> Self | None:
        """The problems `index` (*lead[:-1], K) of the last leading axis, or None if that cannot be had."""
        return None

    #: The remedy for a map that turns out to be random.
    if_random: str = "call model.eval(), or hold the dropout for a whole solve as `Equilibrium` does"

    def cause(self, z: Tensor) -> str:
        """Return why the problem may have failed, with the remedy, once its best states z are known; maybe empty.

        f is random if two evaluations at one state differ by more than rounding.
        """
        if self.separates or transforms_active():
            return ""
        with torch.no_grad(), exact_precision(z):
            first, second = (self.apart().fixed_point_map(z.detach()) for _ in range(2))
        size = first.where(torch.isfinite(first), 0.0).norm()
        off = float((second - first).nan_to_num(0.0, 0.0, 0.0).norm() / size)
        if not off > torch.finfo(z.dtype).eps ** (2 / 3):
            return ""
        return (
            f"`{self._name()}` is random: two evaluations at one state differ by {off:.1e} of its size, so that no "
            f"state solves it; {self.if_random}"
        )

    def as_attention(self) -> Attention | None:
        """The tensors of attention whose equilibrium solves this problem, for kernels; None if it is another one.

        A subclass may return `Attention(query, keys, beta, anchor)` where f(z) is anchor x + (1 - anchor) times the
        softmax attention of z over the keys, and each query is a problem (`event_ndim` is 1). Its parts may be computed
        from learned tensors. `solve` then reads f and E from it, by a kernel or not; impl="reference" reads f itself.
        """
        return None

    def without(self, left_out: Tensor) -> Self:
        """The same problems; those that are `left_out` (*lead) read finite numbers in place of their own tensors."""
        return self

    def check_state(self, z: Tensor) -> None:
        """Raise if `z` cannot be a state of this problem."""
        _validate.check_float_tensor("initial", z, min_ndim=self.event_ndim)

    #: What f may read without declaring it, and how to declare it, in the words of an error.
    _undeclared: str = "a tensor"
    _to_declare: str = "hold it in an attribute (a tensor, a module, or a tuple, list or dict of them)"

    def check_undeclared(self, z: Tensor) -> None:
        """Raise if f reads a tensor whose gradient would silently be zero: undeclared, or of an earlier call."""
        if self.all_declared:
            return
        apart = self.apart()
        detached = apart.replace(*(t.detach() for t in apart.tensors()))
        declared = {name for name, _ in apart.named_tensors()}
        with torch.enable_grad():
            # A copy, as a map that works in place is reported later.
            result = detached.fixed_point_map(z.detach().clone())
        required, remedy = "not be kept while the problem is evaluated", "compute it at every call, or once in __init__"
        made = "a tensor made there, through which no gradient would reach what it is made of"
        for name, _ in detached.named_tensors():
            _validate.require(name in declared, name, required, made, remedy)
        hidden = is_batched(result) and not is_batched(z, *self.tensors())
        if result.requires_grad or has_tangent(result) or hidden:
            raise ValueError(
                f"`{self._name()}` reads {self._undeclared}, which requires grad but is not declared, so its gradient "
                f"would silently be zero; {self._to_declare}"
            )


def check_start(problem: Problem, given: dict[str, Any], solver: Any, adjoint: Any) -> None:
    """Raise if parts that several processes share cannot start a solve with the arguments `given`, by name."""
    own = {name: value for name, value in vars(problem).items() if isinstance(value, Tensor | float | int)}
    for part in problem._within():
        if hasattr(part, "check_start"):
            part.check_start({**own, **given}, solver, adjoint)


def widened(problem: _P, *states: Tensor) -> tuple[_P, tuple[Tensor, ...]]:
    """The problem and states in the precision of the solver's state: float32 for float16 and bfloat16.

    In half precision a state would sit up to a percent away from the solution.
    """
    tensors = problem.tensors()
    wide = tuple(map(at_least_single, tensors))
    changed = any(a is not b for a, b in zip(tensors, wide, strict=True))
    return problem.replace(*wide) if changed else problem, tuple(map(at_least_single, states))


def evaluate_pure(problem: Problem, z: Tensor, *, energy: bool, call: int) -> Evaluation:
    """`problem.evaluate(z)`, or an error if the map changes z, with which f(z) - z would be wrong.

    The first calls, 0 and 1, get copies: the state may be a tensor of the user, or a result of the map itself.
    """
    if is_exporting():
        # A graph that is recorded has no memory to look at, and its operations do not work in place.
        return problem.evaluate(z, energy=energy)
    state = counted(z, copy=call < 2)
    writes = writes_to(state)
    evaluation = problem.evaluate(state, energy=energy)
    # Torch does not count writes of others (by numpy, through `.data`).
    visible = call == 0 and z.device.type == "cpu" and not transforms_active()
    if writes_to(state) != writes or (visible and not same(state, z)):
        refuse_writes(problem)
    return evaluation


def refuse_writes(problem: Problem) -> NoReturn:
    """Raise because the map of the problem changes its state."""
    required, received = "leave its state as it is", "a map that works on it in place"
    remedy = "start from z = z.clone(), or use operations that are not in place (nn.ReLU(), not inplace=True)"
    raise ValueError(_validate.message(problem._name(), required, received, remedy))


def isolated(problem: Problem, z: Tensor, left_out: Tensor) -> tuple[Problem, Tensor]:
    """Problem and state with those `left_out` (*lead) reading nothing that is not finite.

    They add 0 to a gradient, and 0 * NaN would be NaN in all tensors that they share. Where a problem does not know
    which numbers belong to which row, numbers that are not finite become 1 if f of all other rows stays the same.
    """
    batched = is_batched(left_out, z, *problem.tensors())
    if not batched and z.device.type == "cpu" and not bool(left_out.any()):
        return problem, z
    rows = left_out.reshape((*left_out.shape, *(1,) * problem.event_ndim))
    z, apart = z.masked_fill(rows, 0.0), problem.without(left_out)
    if problem.all_declared or batched or not bool(left_out.any()):
        return apart, z

    def others(problem: Problem) -> Tensor:
        with torch.no_grad():
            return problem.fixed_point_map(z.detach()).detach().masked_fill(rows, 0.0)

    def filled(good: Callable[[Tensor], Tensor]) -> Problem:
        return problem.replace(*(t.where(good(t), 1.0) if t.is_floating_point() else t for t in problem.tensors()))

    expected = others(problem)
    # Others may read what looks like a row's own, as with a table of as many rows.
    problem = apart if same(others(apart), expected) else problem
    for found in map(filled, (torch.isfinite, lambda t: ~torch.isnan(t))):
        if same(others(found), expected):
            return found, z
    return problem, z


def check_kept(problem: Problem, now: Tensor, before: Tensor) -> None:
    """Raise where a later call of a map overwrote an earlier result."""
    if not same(now, before):
        remedy = "return buffer.clone()"
        received = "a map that writes into what it returned before"
        raise ValueError(_validate.message(problem._name(), "return new memory at every call", received, remedy))


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are views of the same memory."""
    if is_functorch_wrapped_tensor(a) or is_functorch_wrapped_tensor(b) or a.numel() == 0:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def counted(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """The tensor, or a `copy`; always one of an inference tensor, to which torch counts no writes."""
    if not torch.compiler.is_compiling() and tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone()
    return tensor.clone() if copy else tensor


def is_like(result: Any, z: Tensor) -> bool:
    """Whether the result of a map is a plain tensor of the kind of its state."""
    if type(result) is not Tensor:
        return False
    return result.shape == z.shape and result.dtype == z.dtype and result.device == z.device


def writes_to(tensor: Tensor) -> int:
    """Return the number of torch's writes to the memory of `tensor`."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return 0 if tensor.is_inference() else tensor._version


def pullback(
    problem: Problem, z: Tensor, cotangent: Tensor, needed: Sequence[bool] | None = None
) -> tuple[Tensor | None, ...]:
    """(df/dt)^T u at fixed z for every tensor t that is `needed`; differentiable when derivatives are recorded.

    `needed` is None for those that require grad, or for all if none does. The others may hold tensors that torch cannot
    differentiate, such as the running mean of a normalisation.
    """
    tensors = problem.tensors()
    if needed is None and any(t.requires_grad for t in tensors):
        needed = [t.requires_grad for t in tensors]
    where = [i for i, t in enumerate(tensors) if t.is_floating_point() and (needed is None or needed[i])]

    def unchecked(*floating: Tensor) -> Tensor:
        # Under nested transforms torch loses an input that an operation of the map saves as it is.
        new = {i: t.view_as(t) for i, t in zip(where, floating, strict=True)}
        return problem.replace(*(new.get(i, t) for i, t in enumerate(tensors))).fixed_point_map(z.view_as(z))

    def along(*floating: Tensor) -> Tensor:
        result = unchecked(*floating)
        check_graph(problem._name(), result, unchecked, *floating)
        return (result * cotangent).sum()

    if not where:
        return (None,) * len(tensors)
    # Not a vjp, of which torch loses the level where a tensor has no part in f.
    by_tensors = grad(along, argnums=tuple(range(len(where))))(*(tensors[i] for i in where))
    gradients = dict(zip(where, by_tensors, strict=True))
    return tuple(map(gradients.get, range(len(tensors))))
