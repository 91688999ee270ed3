"""`SpinAttention`: the tokens are the field of a spin system, and the output is its magnetizations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from .._torch import at_least_single, host_may_look, uncompiled
from ..adjoints import Unrolled
from ..failure import without_gradient
from ..potentials import AmosResponse, SphericalLaw
from ..problem import TokenOrder
from ..solvers import Picard
from ..spins import (
    Approximation,
    DynamicalMethod,
    FixedPointApproximation,
    GaussianClosure,
    KineticPlefka,
    LowRank,
    MeanField,
    SignUnits,
    SpinSystem,
    magnetization,
)
from ..spins._request import nonfinite_sites
from .cache import CachedKeys, KeyValueCache, check_cache
from .calls import plain
from .causal_tokens import Lost, lost_tokens, without_nonfinite
from .couplings import CouplingChoice, GivenCouplings, SoftmaxCouplings, chosen
from .projections import LearnedBeta, Rotary, Scalar, anchor_or_beta
from .token_mixing import TokenMixing, TokenOptions, for_heads, pairs_that_read


class SpinAttention(TokenMixing):
    """Magnetizations of a spin system as a layer: the tokens are its field, and may determine its couplings.

    Per head, with the field h = norm(W_v x) and couplings J, which may depend on h:
    m = <s> of spins with E(s) = -1/2 sum_ij J_ij s_i.s_j - sum_i h_i.s_i at beta, by `method`; output = W_o m.
    |m_i| <= R = sqrt(head_dim) for the explicit answer of mean-field methods.

    Args:
        dim: width of input and output.
        heads: number of heads.
        couplings: "softmax": attention over the other sites (J = (A + A^T)/2 for a method that needs symmetry);
            "symmetric": the same with one map for queries and keys, normalised over both; "free": a parameter for each
            pair of `sites`; "low_rank": J = U U^T without its diagonal, for long inputs; or a function or module of the
            field.
        method: of the spins; None is `MeanField` for symmetric couplings and `KineticPlefka`, synchronous dynamics, for
            others, both by `AmosResponse` (the exact law where head_dim is 1) to a relative residual of 1e-4.
        derivative: "explicit": <s_i> at fixed couplings; "total": m = -dF/dh, in which couplings answer the field, too.
        beta: inverse temperature, "learned" (per head, from .5, where normalised couplings contract) or a number > 0.
        field_norm: "rms" makes all fields of length R, so that tokens do not just align; None leaves them.
        rotary: None, or `Rotary()` to turn queries and keys by their positions.
        sites: number of tokens, for free couplings.
        **options: `head_dim`, the width of a head, default dim / heads. `causal`: a token reads itself and the tokens
            before it. Couplings are asymmetric then. Tokens stop each on its own, by default of
            `Anderson(history=1, plain_steps=5)`: a later token changes no bit of an earlier one. `steps`: None solves;
            a number makes as many steps m <- response(h + J m), differentiated through. `bare`: no projections, one
            head and no field norm, so that the layer is the spin system itself, over raw inputs. `solver` and `adjoint`
            replace those of the method. `on_failure`, for samples without an answer: "raise", "warn" or "ignore".
            `device` and `dtype` of the parameters.

    Attributes:
        method: the method of the spins, with the options of the layer.
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
        couplings: CouplingChoice = "softmax",
        method: Approximation | None = None,
        derivative: Literal["explicit", "total"] = "explicit",
        beta: Scalar = "learned",
        field_norm: Literal["rms"] | None = "rms",
        rotary: Rotary | None = None,
        sites: int | None = None,
        **options: Unpack[TokenOptions],
    ) -> None:
        super().__init__(dim, heads, **options)
        _validate.check_choice("derivative", derivative, ("explicit", "total"))
        _validate.check_choice("field_norm", field_norm, ("rms", None))
        if rotary is not None:
            _validate.check_instance("rotary", rotary, Rotary, "be None or a Rotary", "for example Rotary()")
        self.derivative = derivative
        place: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        self.couplings = chosen(
            couplings, method, heads, self.head_dim, causal=self.causal, rotary=rotary, sites=sites, **place
        )
        self.method = self._method(method, not self.causal and bool(self.couplings.symmetric))
        self.beta = anchor_or_beta("beta", beta, LearnedBeta((heads,), 0.5, **place))
        self.norm = nn.RMSNorm(self.head_dim, **place) if field_norm == "rms" and not self.bare else None
        self._make_projections(place)
        # Identifies the caches of this layer. A copy of the layer has its own, copied together with its caches.
        self._identity = object()

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        initial: Tensor | None = None,
        cache: KeyValueCache | None = None,
        return_state: bool = False,
        return_answer: bool = False,
    ) -> Any:
        """The magnetizations that the tokens of x make.

        Args:
            x: (*batch, N, dim).
            mask: which tokens a token may read, boolean, (N, N) or (*batch, N, N): True = i may read j. Symmetric, for
                methods that need symmetric couplings.
            key_mask: which tokens exist, boolean, (*batch, N). The others change nothing, and their output is 0. With a
                cache, of all tokens or of the new ones.
            initial: magnetizations that the solve starts from, (*batch, heads, N, head_dim), such as a state of the
                call before.
            cache: from `new_cache`; the tokens of x are added to it, and read all tokens in it.
            return_state: return <s_i> as well, (*batch, heads, N, head_dim), detached.
            return_answer: return the `Answer` as well, last, with the report of the solve.

        Returns:
            (*batch, N, dim), or a tuple (output, state, answer) of the parts that were requested.
        """
        self._check_tokens(x)
        if cache is not None:
            check_cache(cache, self._identity, tuple(x.shape[:-2]))
        x = self._live(x, key_mask, 0 if cache is None else cache.length)
        order = contents = pairs = None
        if self.causal:
            order = TokenOrder(None if mask is None else self._pairs(x, mask, key_mask)[0])
        field, lost = self._finite_field(x)
        if cache is None:
            pairs, sites = self._pairs(x, mask, key_mask)
            couplings = self._couplings(field, pairs, self.derivative)
        else:
            _validate.require(mask is None, "mask", "be None beside a cache", "a mask", "use key_mask")
            couplings, sites, contents = self._cached_couplings(field, key_mask, cache)
            initial = cache.start(field) if initial is None else initial
        field = at_least_single(field)
        m, answer, nothing = self._answer(couplings, pairs, field, sites, initial, cache, order, lost)
        self._remember(answer.report)
        if cache is not None and contents is not None:
            state = answer.state.masked_fill(~answer.magnetization.isfinite(), torch.nan)
            earlier = None if cache.held is None else cache.held.values
            contents = contents._replace(values=state if earlier is None else torch.cat([earlier, state], dim=-2))
            cache.commit(contents, answer.magnetization, answer.report.num_evals[..., None])
        output = self._output(m.to(x.dtype), nothing)
        results = [output]
        if return_state:
            results.append(answer.magnetization.detach())
        if return_answer:
            results.append(answer)
        return tuple(results) if len(results) > 1 else output

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    def new_cache(self, *, warm_start: bool = False) -> KeyValueCache:
        """An empty cache for decoding: the keys of the tokens so far, and their states.

        Calls with one token or some at a time answer as one call with all tokens, to the tolerance of the solves.

        Args:
            warm_start: start every token's solve at the magnetization of the token before.

        Raises:
            ValueError: for a layer that is not causal, whose couplings are not "softmax", or that makes `steps`.
        """
        _validate.require(self.causal, "causal", "be True for a cache", self.causal, "make the layer with causal=True")
        fits, received = isinstance(self.couplings, SoftmaxCouplings), type(self.couplings).__name__
        required = "be 'softmax' for a cache, which holds keys"
        _validate.require(fits, "couplings", required, received, "call the layer on all tokens")
        required = "be None for a cache, which holds the state that tokens settle in"
        _validate.require(self.steps is None, "steps", required, self.steps, "call the layer on all tokens")
        return KeyValueCache(self._identity, warm_start=warm_start)

    def system(self, x: Tensor, *, mask: Tensor | None = None, key_mask: Tensor | None = None) -> SpinSystem:
        """The spins that x makes, one sample per head, with couplings as a function of the field.

        Args:
            x: as in `forward`.
            mask: as in `forward`.
            key_mask: as in `forward`.

        Returns:
            A `SpinSystem` of batch (*batch, heads). Its `magnetization` is <s_i> plus the contribution of J(h).
        """
        self._check_tokens(x)
        x = self._live(x, key_mask)
        field, (pairs, sites) = self._field(x), self._pairs(x, mask, key_mask)
        return SpinSystem(self._couplings(field, pairs, "total"), at_least_single(field), self.beta(), mask=sites)

    # Parts of the forward.

    def _field(self, x: Tensor) -> Tensor:
        field = super()._field(x)
        return field if self.norm is None else self.norm(field.to(self.norm.weight.dtype))

    def _seen(self, field: Tensor) -> Tensor:
        """Return the tensor that couplings are computed from."""
        return field

    def _pairs(self, x: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Which site reads which, (*#batch, #heads, N, N), and which sites exist, (*#batch, 1, N)."""
        sites = None if key_mask is None else for_heads(key_mask)
        if not self.couplings.pairwise:
            required = f"be None for {type(self.couplings).__name__}, which have no number for each pair"
            _validate.require(mask is None, "mask", required, "a mask", "use key_mask, or couplings='symmetric'")
            return sites, sites
        symmetric = f"{type(self.method).__name__}, whose spins act on each other" if self.method.symmetric else ""
        remedy = "use method=KineticPlefka() or GaussianClosure()"
        # A function of the user's may couple a site to itself.
        own = isinstance(self.couplings, GivenCouplings)
        pairs = pairs_that_read(x, mask, sites, causal=self.causal, own=own, symmetric=symmetric, remedy=remedy)
        return pairs, sites

    def _couplings(self, field: Tensor, pairs: Tensor | None, derivative: str) -> Any:
        """J at this field, or the function for a derivative through it."""

        def coupled(wide: Tensor) -> Tensor | LowRank:
            # In the precision of the layer's weights.
            couplings: Tensor | LowRank = self.couplings(self._seen(wide.to(field.dtype)), pairs)
            return couplings if isinstance(couplings, LowRank) else at_least_single(couplings)

        return coupled if derivative == "total" else coupled(field)

    def _cached_couplings(
        self, field: Tensor, key_mask: Tensor | None, cache: KeyValueCache
    ) -> tuple[Tensor, Tensor | None, CachedKeys]:
        """Return the couplings of new tokens to all, (*batch, heads, N, M), which of them exist, and the contents."""
        seen = self._seen(field)
        contents = cache.with_new(self.couplings.keys(seen, cache.length), None, key_mask)  # type: ignore[operator]
        count, total = field.shape[-2], contents.keys.shape[-2]
        pairs = torch.ones(count, total, dtype=torch.bool, device=field.device).tril(total - count)
        sites = None
        if contents.key_mask is not None:
            exist = for_heads(contents.key_mask)
            sites = exist[..., -count:]
            pairs = pairs & sites[..., :, None] & exist[..., None, :]
        return at_least_single(self.couplings(seen, pairs, contents.keys)), sites, contents

    @uncompiled
    def _answer(
        self,
        couplings: Any,
        pairs: Tensor | None,
        field: Tensor,
        sites: Tensor | None,
        initial: Tensor | None,
        cache: KeyValueCache | None,
        order: TokenOrder | None,
        own: Tensor | None,
    ) -> Any:
        """The magnetizations, their `Answer`, and the tokens without one; `own` are those that are not finite."""
        lost: Lost | None = None
        before = 0 if cache is None else cache.length
        system = SpinSystem(couplings[..., before:] if before else couplings, field, self.beta(), mask=sites)
        if order is not None and own is not None:
            lost = lost_tokens(order, sites, own | nonfinite_sites(system)[0])
            # A number at a later token must not reach this one by the start either.
            initial = None if initial is None else without_nonfinite(initial)[0]
        if lost is not None:
            field = lost.fill(field)
            if cache is None and host_may_look(lost.tokens):
                # Computed again without them: also in gradients of couplings 0 * NaN is NaN.
                couplings = self._couplings(field, pairs, self.derivative)
            couplings = couplings.masked_fill(~couplings.detach().isfinite(), 0.0)
            system = system.at(field, couplings[..., before:] if before else couplings, system.beta)
        earlier = None if cache is None or cache.held is None else cache.held.values
        if earlier is not None and isinstance(self.method, DynamicalMethod):
            system = self.method.beside(system, couplings[..., :before], earlier)
        system.token_order = order
        on_failure: Any = self._on_failure(self.options)
        m, answer = magnetization(system, self.method, initial=initial, on_failure=on_failure, return_answer=True)
        m = without_gradient(on_failure, answer.report.failed, m)
        if lost is None:
            return m, answer, None
        report = lost.report(answer.report, on_failure, type(self).__name__)
        state = lost.fill(answer.magnetization, torch.nan)
        return m, answer._replace(magnetization=state, report=report), lost

    # Housekeeping.

    def _method(self, method: Any, symmetric: bool) -> Approximation:
        """The method of the spins with the options of the layer, or an error if it cannot answer their couplings."""
        if method is None:
            law: SphericalLaw = SignUnits() if self.head_dim == 1 else AmosResponse()
            method = (MeanField if symmetric else KineticPlefka)(response=law, rtol=1e-4)
        _validate.check_instance("method", method, Approximation, "be None or an Approximation", "for example AdaTAP()")
        name = type(method).__name__
        # A function of the user's shows at every call whether its couplings are symmetric.
        if method.symmetric and not symmetric and not isinstance(self.couplings, GivenCouplings):
            cause = "causal=True" if self.causal else f"couplings={type(self.couplings).__name__}"
            required = f"answer asymmetric couplings, which {cause} makes"
            remedy = "use KineticPlefka() or GaussianClosure(), or couplings='symmetric'"
            raise ValueError(_validate.message("method", required, f"{name}, which needs J_ij = J_ji", remedy))
        if self.derivative == "total":
            required = f"be 'explicit' for {name}, which has no free energy"
            remedy = "use derivative='explicit', or MeanField, TAP, AdaTAP or SaddlePoint"
            _validate.require(not isinstance(method, DynamicalMethod), "derivative", required, "'total'", remedy)
        if self.steps is not None:
            remedy = "use MeanField, KineticPlefka(order=1) or GaussianClosure"
            is_state = isinstance(method, MeanField | GaussianClosure) or getattr(method, "order", None) == 1
            _validate.require(is_state, "steps", f"be None for {name}, whose steps are not of m", self.steps, remedy)
            required, remedy = "be None for derivative='total'", "use derivative='explicit'"
            _validate.require(self.derivative == "explicit", "steps", required, self.steps, remedy)
            solver = Picard(rtol=0.0, atol=0.0, max_steps=self.steps)
            changes: dict[str, Any] = {"solver": solver, "adjoint": Unrolled(), "rtol": None}
        else:
            changes = {name: getattr(self.options, name) for name in ("solver", "adjoint")}
            changes = {name: value for name, value in changes.items() if value is not None}
            if changes and not isinstance(method, FixedPointApproximation):
                required = f"be None for {name}, which has no solver to replace"
                raise ValueError(_validate.message(next(iter(changes)), required, "one"))
            if "solver" in changes:
                changes["rtol"] = None
        answering: Approximation = dataclasses.replace(method, **changes) if changes else method
        return answering

    def extra_repr(self) -> str:
        derivative = [f"derivative={self.derivative!r}"] * (self.derivative != "explicit")
        return self._text(f"method={self.method!r}", *derivative)


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
