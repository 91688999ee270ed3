"""The core of equilibrium attention, which the function and the layers share: solve for the queries, then read out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import _validate
from ._autograd import exact_precision, is_batched, is_differentiated, transforms_active, uncompiled
from ._reporting import check_on_failure
from ._types import Impl, OnFailure
from .adjoints import Adjoint, Unrolled
from .energies import AnchoredEnergy
from .errors import UnsupportedImplementation
from .potentials import LogSumExp, Potential
from .potentials._flash import FLASH_KEYS
from .potentials.log_sum_exp import ReferenceLogSumExp
from .problem import HALF
from .solution import Evidence, Solution, Trace
from .solve import solve
from .solvers import Anderson, Picard, Solver
from .status import Status

#: Makes a potential: (keys, beta, mask=, bias=) -> Potential; mask and bias are given only where there are any.
PotentialFactory: TypeAlias = Callable[..., Potential]

_IMPLEMENTATIONS = ("auto", "reference", "sdpa", "triton")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """How an equilibrium is found and differentiated: what `solve` takes, with the budget in short.

    Args:
        solver: default `Anderson()`.
        adjoint: default `Implicit()`.
        impl: "auto"; "reference" writes every product out; "sdpa" insists on torch's fused attention.
        max_steps: the solver's `max_steps` in short; 0 is one explicit step of attention, without any solve.
        on_failure: "raise", "warn" or "ignore".
    """

    solver: Solver | None = None
    adjoint: Adjoint | None = None
    impl: Impl = "auto"
    max_steps: int | None = None
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        for name, kind in (("solver", Solver), ("adjoint", Adjoint)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                example = "Anderson()" if name == "solver" else "Implicit()"
                received = value.__name__ if isinstance(value, type) else repr(value)
                raise TypeError(
                    _validate.message(name, f"be None or a {kind.__name__}", received, f"for example {example}")
                )
        _validate.check_choice("impl", self.impl, _IMPLEMENTATIONS)
        if self.max_steps is not None:
            _validate.check_integer("max_steps", self.max_steps, low=0)
        check_on_failure(self.on_failure)

    def override(self, **given: Any) -> SolveOptions:
        """These options with those that are not None replaced; another solver comes with its own `max_steps`."""
        changes = {name: value for name, value in given.items() if value is not None}
        if "solver" in changes:
            changes.setdefault("max_steps", None)
        return dataclasses.replace(self, **changes) if changes else self

    @property
    def explicit(self) -> bool:
        """Whether nothing is solved."""
        return self.effective_solver.max_steps == 0

    @property
    def effective_solver(self) -> Solver:
        solver = Anderson() if self.solver is None else self.solver
        return solver if self.max_steps is None else dataclasses.replace(solver, max_steps=self.max_steps)


class Attended(NamedTuple):
    """What was read out, the solution behind it, and its evidence (None inside torch.vmap, which it would leave).

    The output is (*batch, H, N, E), or (*batch, N, E) without heads; weights (*batch, H, N, M) if they were asked for.
    """

    output: Tensor
    solution: Solution
    evidence: Evidence | None
    weights: Tensor | None


def _attended(output: Tensor, solution: Solution, weights: Tensor | None) -> Attended:
    return Attended(output, solution, None if is_batched(solution.status) else solution.evidence(), weights)


@uncompiled
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    *,
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    potential: PotentialFactory = LogSumExp,
    options: SolveOptions,
    dropout_p: float = 0.0,
    grouped: bool = False,
    initial: Tensor | None = None,
    trace: bool = False,
    measure: bool = True,
    weigh: bool = False,
) -> Attended:
    """Equilibria of `query` over `keys` and what is read out there: softmax over `values`, or the state itself.

    With an explicit budget nothing is solved: the read-out is taken at the query, and without values it is one step of
    the map. Its residual is evaluated only if `measure`; `weigh` returns the weights of the read-out.
    """
    if grouped and (groups := _group_size(query, keys)) > 1:
        heads = query.shape[-3]
        parts = (query, mask, bias, initial)
        query, mask, bias, initial = (t if t is None else _split_heads(t, heads, groups, -3) for t in parts)  # type: ignore[assignment]
        beta, anchor = (
            _split_heads(t, heads, groups, -1) if isinstance(t, Tensor) and t.ndim else t for t in (beta, anchor)
        )
        keys, values = keys.unsqueeze(-3), None if values is None else values.unsqueeze(-3)
        attended = attend(
            query,
            keys,
            values,
            beta=beta,
            anchor=anchor,
            mask=mask,
            bias=bias,
            potential=potential,
            options=options,
            dropout_p=dropout_p,
            initial=initial,
            trace=trace,
            measure=measure,
            weigh=weigh,
        )
        output, weights = (None if t is None else t.flatten(-4, -3) for t in (attended.output, attended.weights))
        assert output is not None
        return _attended(output, _merge_heads(attended.solution), weights)

    if empty := keys.shape[-2] == 0:
        # Nothing to attend to is one key that nobody attends to.
        keys = keys.new_zeros(*keys.shape[:-2], 1, keys.shape[-1])
        values = None if values is None else values.new_zeros(*values.shape[:-2], 1, values.shape[-1])
        mask, bias = torch.zeros(1, dtype=torch.bool, device=keys.device), None
    make = _implementation(potential, options.impl, keys, bias)
    dtype, narrow = query.dtype, (query, keys, values, bias)
    with exact_precision(query):
        query, keys, values, bias, initial = map(at_least_single, (query, keys, values, bias, initial))
        beta, anchor = (t.to(query.dtype) if isinstance(t, Tensor) else t for t in (beta, anchor))
        energy = AnchoredEnergy(_made(make, keys, beta, mask, bias), query, anchor)
        if values is not None and not hasattr(energy.potential, "readout"):
            raise UnsupportedImplementation(
                f"{type(energy.potential).__name__} has no weights to read values out with (no method `readout`); "
                "use readout='state'"
            )
        if not options.explicit:
            solution = solve(
                energy,
                query if initial is None else initial,
                solver=options.effective_solver,
                adjoint=options.adjoint,
                on_failure=options.on_failure,
                trace=trace,
            )
            z = output = solution.value
            if values is not None:
                output = _read_out(energy.potential, z, values, dropout_p)
        else:
            z = query
            solution = _explicit_solution(energy, query, trace) if measure else _unmeasured(query)
            if values is None:
                output = energy.fixed_point_map(query)
            elif dtype in HALF and all(t is None or t.dtype == dtype for t in narrow):
                output = _narrow_read_out(make, narrow, beta, mask, dropout_p)
            else:
                output = _read_out(energy.potential, query, values, dropout_p)
            if isinstance(anchor, Tensor) and anchor.requires_grad:
                # No part of it, but a parameter without any gradient stops distributed training.
                output = output + 0 * anchor.sum()
        weights = _weights(energy.potential, z)[..., : 0 if empty else None] if weigh else None
        return _attended(output.to(dtype), solution, weights)


def _read_out(potential: Potential, z: Tensor, values: Tensor, dropout_p: float) -> Tensor:
    """softmax(beta z K^T) V; a state that is not finite gives NaN, and nothing to the gradients of what is shared."""
    lost = ~torch.isfinite(z).all(-1, keepdim=True)
    output: Tensor = potential.readout(z.masked_fill(lost, 0.0), values, dropout_p=dropout_p)  # type: ignore[attr-defined]
    return output.masked_fill(lost, torch.nan)


def _narrow_read_out(
    make: PotentialFactory,
    narrow: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    beta: float | Tensor,
    mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """An explicit step as torch does it in half precision."""
    query, keys, values, bias = narrow
    assert values is not None
    if isinstance(beta, Tensor):
        # Rounded by itself, a temperature would shift all scores alike.
        query, beta = (beta[..., None, None] * query).to(keys.dtype), 1.0
    return _read_out(_made(make, keys, beta, mask, bias), query, values, dropout_p)


def _weights(potential: Potential, z: Tensor) -> Tensor:
    if not hasattr(potential, "probabilities"):
        raise UnsupportedImplementation(f"{type(potential).__name__} has no attention weights (no `probabilities`)")
    weights: Tensor = potential.probabilities(z)
    return weights


def at_least_single(given: Any) -> Any:
    """What is solved in float32 although it came in half precision."""
    return given.float() if isinstance(given, Tensor) and given.dtype in HALF else given


def _made(
    make: PotentialFactory, keys: Tensor, beta: float | Tensor, mask: Tensor | None, bias: Tensor | None
) -> Potential:
    given = {name: pairs for name, pairs in (("mask", mask), ("bias", bias)) if pairs is not None}
    made: Any = make(keys, beta, **given)
    if not isinstance(made, Potential):
        required = "make a Potential from (keys, beta, mask=, bias=)"
        raise TypeError(_validate.message("potential", required, type(made).__name__, "for example LogSumExp"))
    return made


def _implementation(potential: PotentialFactory, impl: Impl, keys: Tensor, bias: Tensor | None) -> PotentialFactory:
    """The factory that does it as `impl` says, or an error that says who can."""
    if impl == "auto":
        return potential
    if potential is not LogSumExp:
        name = getattr(potential, "__name__", type(potential).__name__)
        raise UnsupportedImplementation(f"`impl={impl!r}` exists for LogSumExp only, not for {name}; use impl='auto'")
    if impl == "triton":
        raise UnsupportedImplementation("`impl='triton'`: there is no Triton kernel yet; use impl='auto' or 'sdpa'")
    if impl == "sdpa":
        if keys.shape[-2] < FLASH_KEYS:
            raise UnsupportedImplementation(
                f"`impl='sdpa'` needs at least {FLASH_KEYS} keys (torch's kernel loses NaN below), got "
                f"{keys.shape[-2]}; use impl='auto' or 'reference'"
            )
        if transforms_active() or (bias is not None and is_differentiated(bias)):
            what = "inside torch.func" if transforms_active() else "with an additive mask that requires grad"
            raise UnsupportedImplementation(f"`impl='sdpa'` has no derivative {what}; use impl='auto' or 'reference'")
        return potential
    return ReferenceLogSumExp


# Explicit steps.


def _explicit_solution(energy: AnchoredEnergy, query: Tensor, trace: bool) -> Solution:
    """The query as a solution with the status EXPLICIT and its residual."""
    with torch.no_grad():
        detached = energy.replace(*(t.detach() for t in energy.tensors()))
        return solve(
            detached,
            query.detach(),
            # Without tolerances the status is EXPLICIT even where the query solves its problem.
            solver=Picard(rtol=0, atol=0, max_steps=0),
            adjoint=Unrolled(),
            on_failure="ignore",
            trace=trace,
        )


def _unmeasured(query: Tensor) -> Solution:
    unknown = query.detach().new_full(query.shape[:-1], torch.nan)
    none = torch.zeros_like(unknown, dtype=torch.int32)
    status = torch.full_like(none, int(Status.EXPLICIT), dtype=torch.int8)
    return Solution(
        value=query.detach(), status=status, residual=unknown, tolerance=unknown, num_steps=none, num_evals=none
    )


# Grouped queries: heads that share keys become an axis along which the keys broadcast.


def _group_size(query: Tensor, keys: Tensor) -> int:
    heads, kv_heads = query.shape[-3], keys.shape[-3]
    _validate.require(
        kv_heads > 0 and heads % kv_heads == 0,
        "query",
        f"have a number of heads that the {kv_heads} heads of `key` divide",
        f"{heads} heads, shape {tuple(query.shape)}",
    )
    return heads // kv_heads


def _split_heads(tensor: Tensor, heads: int, groups: int, axis: int) -> Tensor:
    """The axis of H heads as (Hkv, groups); one of size 1 as (1, 1); none stays none."""
    if tensor.ndim < -axis:
        return tensor
    split = (heads // groups, groups) if tensor.shape[axis] == heads else (tensor.shape[axis], 1)
    parts: Tensor = tensor.unflatten(axis, split)  # type: ignore[no-untyped-call]
    return parts


def _merge_heads(solution: Solution) -> Solution:
    fields: dict[str, Any] = {
        name: getattr(solution, name).flatten(-3, -2)
        for name in ("status", "residual", "tolerance", "num_steps", "num_evals")
    }
    trace, function = solution.trace, solution.energy_function
    split = solution.value.shape
    if trace is not None:
        residual, energy, evals = (None if t is None else t.flatten(-3, -2) for t in trace[:3])
        fields["trace"] = Trace(residual, energy, evals, trace.value.flatten(-4, -3))  # type: ignore[arg-type]
    if function is not None:
        fields["energy_function"] = lambda z: function(z.reshape(split)).flatten(-3, -2)
    solution.adjoint.lead = fields["status"].shape
    return dataclasses.replace(solution, value=solution.value.flatten(-4, -3), **fields)


# Checks.


def split_mask(argument: str, mask: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias) from a boolean or an additive mask."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        received = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            _validate.message(
                argument, "be boolean (True = attend) or additive floating-point", received, f"use {argument}.bool()"
            )
        )
    remedy = "move it with .to(device)"
    _validate.require(mask.device == like.device, argument, f"be on {like.device}", mask.device, remedy)
    if mask.dtype == torch.bool:
        return mask, None
    if like.dtype in HALF:
        return None, mask if mask.dtype == like.dtype else mask.float()
    return None, mask.to(like.dtype)


def check_causal(argument: str, mask: Tensor | None, causal: str) -> None:
    """Beside a causal flag a mask may say which keys exist, not which query reads which."""
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        raise ValueError(
            _validate.message(
                argument,
                f"have one row for all queries, shape (..., 1, M), beside {causal}=True, which they may contradict",
                f"shape {tuple(mask.shape)}",
                f"pass {causal}=False with the causal triangle in {argument}, e.g. mask & mask.new_ones(N, M).tril()",
            )
        )
