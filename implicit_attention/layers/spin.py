"""`SpinAttention`: tokens are the field of a spin system, and what comes out are its magnetizations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from .. import _validate
from .._autograd import at_least_single, uncompiled
from .._types import OnFailure
from ..adjoints import Adjoint, Unrolled
from ..attention.heads import merge_heads, split_heads
from ..attention.masks import check_key_mask
from ..options import SolveOptions
from ..potentials import AmosResponse, SphericalLaw
from ..solvers import Picard, Solver
from ..spins import (
    Approximation,
    DynamicalMethod,
    FixedPointApproximation,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SignUnits,
    SpinSystem,
    magnetization,
)
from .couplings import Couplings, FreeCouplings, SoftmaxCouplings, SymmetricCouplings
from .projections import LearnedBeta, Rotary, Scalar, anchor_or_beta
from .remembering import Remembering

#: Couplings by name, or any function of the field (*batch, heads, N, head_dim) with values (*batch, heads, N, N).
CouplingChoice: TypeAlias = Literal["softmax", "symmetric", "free"] | Callable[..., Tensor]


class SpinAttention(Remembering):
    """Magnetizations of a spin system as a layer: the tokens are its field, and couplings may be made of them.

    Per head, with the field h = norm(W_v x) and couplings J, which may depend on h:
    m = <s> of spins with E(s) = -1/2 sum_ij J_ij s_i.s_j - sum_i h_i.s_i at beta, by `method`; output = W_o m.
    |m_i| <= R = sqrt(head_dim) for the explicit answer of mean-field methods.

    Args:
        dim: width of input and output.
        heads: number of heads.
        head_dim: width of a head, default dim / heads.
        couplings: "softmax": attention over the other sites (J = (A + A^T)/2 for a method that needs symmetry);
            "symmetric": the same with one map for queries and keys, normalised over both; "free": a parameter for each
            pair of `sites`; or a function or module of the field.
        method: of the spins; None is `MeanField` for symmetric couplings and `KineticPlefka`, synchronous dynamics, for
            others, both by `AmosResponse` (the exact law where head_dim is 1) to a relative residual of 1e-4.
        derivative: "explicit": <s_i> at given couplings; "total": m = -dF/dh, in which couplings answer the field, too.
        beta: inverse temperature, "learned" (per head, from .5, where normalised couplings contract) or a number > 0.
        field_norm: "rms" makes all fields of length R, so that tokens do not just align; None leaves them.
        causal: a token reads itself and the tokens before it. Couplings are asymmetric then.
        rotary: None, or `Rotary()` to turn queries and keys by their positions.
        steps: None solves. A number makes as many steps m <- response(h + J m), differentiated through.
        sites: number of tokens, for free couplings.
        bare: no projections, one head and no field norm: the spin system itself, over raw inputs.
        solver: replaces the method's, if given.
        adjoint: replaces the method's, if given.
        on_failure: for samples without an answer, "raise", "warn" or "ignore".
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        method: what answers.
        last_solve: the `SolveReport` of the last call, one problem per sample and head.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to inputs and parameters, to second order; none with respect to `initial`.

    Not for reading values that a query looks up: use `ImplicitAttention`.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import SpinAttention
        >>> layer, x = SpinAttention(16, heads=4), torch.randn(2, 5, 16)
        >>> layer(x).shape, layer.last_solve.status.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 4]))
        >>> output, state = layer(x, return_state=True)  # starts the next call
        >>> bool((layer(x, initial=state) - output).abs().max() < 1e-2), bool(layer.last_solve.num_evals.max() <= 2)
        (True, True)
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        couplings: CouplingChoice = "softmax",
        method: Approximation | None = None,
        derivative: Literal["explicit", "total"] = "explicit",
        beta: Scalar = "learned",
        field_norm: Literal["rms"] | None = "rms",
        causal: bool = False,
        rotary: Rotary | None = None,
        steps: int | None = None,
        sites: int | None = None,
        bare: bool = False,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        on_failure: OnFailure = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(dim, heads, head_dim, bare)
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads if head_dim is None else head_dim
        self.causal, self.bare, self.steps = causal, bare, steps
        _validate.check_choice("derivative", derivative, ("explicit", "total"))
        _validate.check_choice("field_norm", field_norm, ("rms", None))
        if rotary is not None and not isinstance(rotary, Rotary):
            raise TypeError(_validate.message("rotary", "be None or a Rotary", repr(rotary), "for example Rotary()"))
        self.derivative = derivative
        # What it checks is the same for all layers.
        self.options = SolveOptions(solver=solver, adjoint=adjoint, on_failure=on_failure)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.couplings = self._couplings(couplings, method, rotary, sites, made)
        self.method = self._method(method, not causal and bool(self.couplings.symmetric))
        self.beta = anchor_or_beta("beta", beta, LearnedBeta((heads,), 0.5, **made))
        self.norm = nn.RMSNorm(self.head_dim, **made) if field_norm == "rms" and not bare else None
        self.in_proj = self.out_proj = None
        if not bare:
            self.in_proj = nn.Linear(dim, heads * self.head_dim, False, **made)
            self.out_proj = nn.Linear(heads * self.head_dim, dim, False, **made)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        initial: Tensor | None = None,
        return_state: bool = False,
        return_answer: bool = False,
    ) -> Any:
        """The magnetizations that the tokens of x make.

        Args:
            x: (*batch, N, dim).
            mask: which tokens a token may read, boolean, (N, N) or (*batch, N, N): True = i may read j. Symmetric, for
                methods that need symmetric couplings.
            key_mask: which tokens exist, boolean, (*batch, N). The others change nothing, and their output is 0.
            initial: magnetizations that the solve starts from, (*batch, heads, N, head_dim), such as a state of the
                call before.
            return_state: return <s_i> as well, (*batch, heads, N, head_dim), detached.
            return_answer: return the `Answer` as well, last, with the report of the solve.

        Returns:
            (*batch, N, dim), or a tuple (output, state, answer) without the parts that were not asked for.
        """
        field, pairs, sites = self._read(x, mask, key_mask)
        couplings = self._made(field, pairs, self.derivative)
        m, answer = _answered(self, couplings, at_least_single(field), sites, initial)
        self._remember(answer.report)
        output = merge_heads(m.to(x.dtype))
        output = output if self.out_proj is None else self.out_proj(output)
        results = [output]
        if return_state:
            results.append(answer.magnetization.detach())
        if return_answer:
            results.append(answer)
        return tuple(results) if len(results) > 1 else output

    def system(self, x: Tensor, *, mask: Tensor | None = None, key_mask: Tensor | None = None) -> SpinSystem:
        """The spins that x makes, one sample per head, with couplings as a function of the field.

        Args:
            x: as in `forward`.
            mask: as in `forward`.
            key_mask: as in `forward`.

        Returns:
            A `SpinSystem` of batch (*batch, heads). Its `magnetization` is <s_i> and, beside it, what J(h) adds.
        """
        field, pairs, sites = self._read(x, mask, key_mask)
        return SpinSystem(self._made(field, pairs, "total"), at_least_single(field), self.beta(), mask=sites)

    # Parts of the forward.

    def _read(self, x: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Field, (*batch, heads, N, head_dim), with which site reads which, and which sites exist, as of `_pairs`."""
        _validate.check_float_tensor("x", x, min_ndim=2)
        _validate.require(x.shape[-1] == self.dim, "x", f"have width {self.dim} on its last axis", tuple(x.shape))
        if key_mask is not None:
            check_key_mask(key_mask, x.shape[:-2], x.shape[-2])
            # 0 * NaN is NaN: what stands at a missing token must not reach the weights' gradients.
            x = x.masked_fill(~key_mask[..., None], 0.0)
        return self._field(x), *self._pairs(x, mask, key_mask)

    def _field(self, x: Tensor) -> Tensor:
        field = split_heads(x if self.in_proj is None else self.in_proj(x), self.heads)
        return field if self.norm is None else self.norm(field.to(self.norm.weight.dtype))

    def _couplings_at(self, field: Tensor, pairs: Tensor) -> Tensor:
        couplings: Tensor = self.couplings(field, pairs)
        return couplings

    def _pairs(self, x: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Which site reads which, (*#batch, #heads, N, N), and which sites exist, (*#batch, 1, N)."""
        count, sites = x.shape[-2], None
        everything = torch.ones(count, count, dtype=torch.bool, device=x.device)
        pairs = everything.tril() if self.causal else ~torch.eye(count, dtype=torch.bool, device=x.device)
        if callable(getattr(self.couplings, "function", None)) and not self.causal:
            # What a given function says of a site itself counts.
            pairs = everything
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                received = getattr(mask, "dtype", type(mask).__name__)
                raise TypeError(_validate.message("mask", "be boolean, True = i may read j", received))
            _validate.check_broadcast("mask", mask.shape, (*x.shape[:-2], count, count), "(*batch, N, N)")
            if self.method.symmetric and not bool((mask == mask.mT).all()):
                name = type(self.method).__name__
                required = f"be symmetric for {name}, whose spins act on each other"
                remedy = "use method=KineticPlefka() or GaussianClosure()"
                raise ValueError(_validate.message("mask", required, "a pair in one order only", remedy))
            pairs = pairs & (mask if mask.ndim == 2 else mask.unsqueeze(-3))
        if key_mask is not None:
            sites = key_mask.unsqueeze(-2) if key_mask.ndim > 1 else key_mask
            pairs = pairs & sites[..., :, None] & sites[..., None, :]
        return pairs, sites

    def _made(self, field: Tensor, pairs: Tensor, derivative: str) -> Tensor | Callable[[Tensor], Tensor]:
        """J at this field, or, where the derivative goes through it, the function."""

        def made(wide: Tensor) -> Tensor:
            # In the precision of the layer, as it has its weights.
            couplings: Tensor = at_least_single(self._couplings_at(wide.to(field.dtype), pairs))
            return couplings

        return made if derivative == "total" else made(field)

    # Housekeeping.

    def _couplings(
        self,
        given: Any,
        method: Any,
        rotary: Rotary | None,
        sites: int | None,
        made: dict[str, Any],
    ) -> nn.Module:
        if given == "free":
            remedy = "pass sites=N"
            _validate.require(sites is not None, "sites", "be the number of tokens for couplings='free'", None, remedy)
            _validate.require(rotary is None, "rotary", "be None for couplings='free', which make no queries", rotary)
            assert sites is not None
            return FreeCouplings(self.heads, sites, **made)
        _validate.require(sites is None, "sites", "be None unless couplings='free'", sites)
        if given == "softmax":
            # Without a method, softmax is a mean of both orders, unless it is causal.
            twofold = not self.causal and getattr(method, "symmetric", True)
            return SoftmaxCouplings(self.heads, self.head_dim, rotary=rotary, mean_of_orders=twofold, **made)
        if given == "symmetric":
            required = "be False for couplings='symmetric', by which both tokens of a pair read each other"
            _validate.require(not self.causal, "causal", required, self.causal, "use couplings='softmax'")
            return SymmetricCouplings(self.heads, self.head_dim, rotary=rotary, **made)
        if isinstance(given, str) or not callable(given):
            required = "be 'softmax', 'symmetric', 'free', or a function of the field"
            raise TypeError(_validate.message("couplings", required, repr(given)))
        _validate.require(rotary is None, "rotary", "be None for couplings of one's own", rotary, "turn them there")
        if not isinstance(given, Couplings):
            return _Given(given)
        required = "be False for couplings that are symmetric, by which a token is read by those that it reads"
        _validate.require(not (self.causal and given.symmetric), "causal", required, self.causal)
        return given

    def _method(self, method: Any, symmetric: bool) -> Approximation:
        if method is None:
            law: SphericalLaw = SignUnits() if self.head_dim == 1 else AmosResponse()
            kind: type[MeanField] | type[KineticPlefka] = MeanField if symmetric else KineticPlefka
            method = kind(response=law, rtol=1e-4)
        if not isinstance(method, Approximation):
            received = method.__name__ if isinstance(method, type) else repr(method)
            remedy = "for example AdaTAP()"
            raise TypeError(_validate.message("method", "be None or an Approximation", received, remedy))
        name = type(method).__name__
        # Of a function of one's own the numbers tell, at every call.
        if method.symmetric and not symmetric and not isinstance(self.couplings, _Given):
            what = "causal=True" if self.causal else f"couplings={type(self.couplings).__name__}"
            required = f"answer asymmetric couplings, which {what} makes"
            remedy = "use KineticPlefka() or GaussianClosure(), or couplings='symmetric'"
            raise ValueError(_validate.message("method", required, f"{name}, which needs J_ij = J_ji", remedy))
        if self.derivative == "total":
            remedy = "use derivative='explicit', or MeanField, TAP, AdaTAP or SaddlePoint"
            has_one = not isinstance(method, DynamicalMethod)
            _validate.require(
                has_one, "derivative", f"be 'explicit' for {name}, which has no free energy", "'total'", remedy
            )
        if self.steps is not None:
            self.steps = _validate.check_integer("steps", self.steps, low=1, remedy="use None to solve")
            remedy = "use MeanField, KineticPlefka(order=1) or GaussianClosure"
            is_state = isinstance(method, MeanField | GaussianClosure) or getattr(method, "order", None) == 1
            _validate.require(is_state, "steps", f"be None for {name}, whose steps are not of m", self.steps, remedy)
            required, remedy = "be None for derivative='total'", "use derivative='explicit'"
            _validate.require(self.derivative == "explicit", "steps", required, self.steps, remedy)
            required = "be None beside steps, which are plain ones"
            for option in ("solver", "adjoint"):
                _validate.require(getattr(self.options, option) is None, option, required, "one", "leave it out")
            horizon = Picard(rtol=0.0, atol=0.0, max_steps=self.steps)
            return dataclasses.replace(method, solver=horizon, adjoint=Unrolled(), rtol=None)  # type: ignore[call-arg]
        given = {name: getattr(self.options, name) for name in ("solver", "adjoint")}
        given = {name: value for name, value in given.items() if value is not None}
        if "solver" in given:
            given["rtol"] = None
        if given and not isinstance(method, FixedPointApproximation):
            option = next(iter(given))
            raise ValueError(_validate.message(option, f"be None for {name}, which has no solver to replace", "one"))
        return dataclasses.replace(method, **given) if given else method

    def extra_repr(self) -> str:
        parts = [f"{self.dim}", f"heads={self.heads}", f"head_dim={self.head_dim}", f"method={self.method!r}"]
        parts += [f"derivative={self.derivative!r}"] * (self.derivative != "explicit")
        return ", ".join(parts + [name for name in ("causal", "bare") if getattr(self, name)])


@uncompiled
def _answered(
    layer: SpinAttention,
    couplings: Tensor | Callable[[Tensor], Tensor],
    field: Tensor,
    sites: Tensor | None,
    initial: Tensor | None,
) -> Any:
    system = SpinSystem(couplings, field, layer.beta(), mask=sites)
    return magnetization(system, layer.method, initial=initial, on_failure=layer.options.on_failure, return_answer=True)


class _Given(nn.Module):
    """Couplings by a function or a module of the field, which are zero where `pairs` says so."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.symmetric = bool(getattr(function, "symmetric", False))

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        made = self.function(field)
        _validate.check_float_tensor("couplings", made, min_ndim=2)
        count = field.shape[-2]
        shape = (*field.shape[:-1], count)
        _validate.check_broadcast("couplings", made.shape, shape, "(*batch, heads, N, N)")
        required, received = f"end with the axes (N, N) = {(count, count)}", f"shape {tuple(made.shape)}"
        _validate.require(made.shape[-2:] == (count, count), "couplings", required, received)
        return made.masked_fill(~pairs, 0.0)


def _check_sizes(dim: int, heads: int, head_dim: int | None, bare: bool) -> None:
    _validate.check_integer("dim", dim, low=1)
    _validate.check_integer("heads", heads, low=1)
    if head_dim is None:
        remedy = f"use a divisor of {dim}, or pass head_dim"
        _validate.require(dim % heads == 0, "heads", f"divide dim = {dim}", heads, remedy)
    else:
        _validate.check_integer("head_dim", head_dim, low=1)
    if bare:
        remedy = "without bare=True there are projections to make heads with"
        _validate.require(heads == 1, "heads", "be 1 with bare=True", heads, remedy)
        _validate.require(head_dim in (None, dim), "head_dim", f"be dim = {dim} with bare=True", head_dim, remedy)


@torch.no_grad()
def alignment(state: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """The mean cosine between the vectors of two different sites, (*batch): 1 where all tokens have become one.

    Args:
        state: (*batch, N, D), for example the state of a `SpinAttention`.
        key_mask: which sites exist, boolean, broadcasts to (*batch, N).

    Not for how different the vectors' lengths are.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.spin import alignment
        >>> alignment(torch.ones(3, 4)), alignment(torch.eye(3))
        (tensor(1.), tensor(0.))
    """
    unit = nn.functional.normalize(state, dim=-1)
    live = torch.ones_like(unit[..., 0]) if key_mask is None else key_mask.expand(unit.shape[:-1]).to(unit)
    unit, count = unit * live[..., None], live.sum(-1)
    own = unit.square().sum((-2, -1))
    return (unit.sum(-2).square().sum(-1) - own) / (count * (count - 1)).clamp(min=1)
