"""`MeanFieldAttention`: sites that answer the mean of the others linearly, less a correction for their own effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from .._solve import solve
from .._torch import at_least_single, host_may_look, transforms_active, uncompiled
from ..adjoints import Unrolled
from ..problem import FixedPointMap, PerSample, Shared, TokenOrder
from ..solution import SolveReport
from ..solvers import Anderson, Picard
from .calls import plain
from .causal_tokens import Lost, lost_tokens, without_nonfinite
from .couplings import FreeCouplings, SoftmaxCouplings
from .mean_field_map import (
    BlockCouplings,
    Perceptron,
    as_matrix,
    certain,
    check_choices,
    next_state,
    squared,
    watch,
    within,
)
from .token_mixing import TokenMixing, TokenOptions, for_heads, pairs_that_read

Mixing: TypeAlias = Literal["softmax", "free", "blocks", "mixer"] | Callable[[Tensor], Tensor]
Correction: TypeAlias = Literal["exact", "learned"] | Callable[[Tensor], Tensor] | None

#: The default solver. Measured on 64 tokens of 4 heads: with softmax couplings, whose uniform part decays by
#: `contraction` a step, it takes 6 evaluations in the place of 63 plain ones; with others as many or fewer. For the
#: same reason the adjoint is the default one: GMRES takes a fifth of the Neumann series' time.
DEFAULT_SOLVER = Anderson(history=2, rtol=1e-5)
#: The same for causal layers, whose tokens move and stop each on its own.
CAUSAL_SOLVER = Anderson(history=1, rtol=1e-5, plain_steps=8)


class MeanFieldAttention(TokenMixing):
    r"""A fixed point as a layer: token mixing, self-correction, residual.

    ```math
    z_i = \sum_j J_{ij}\, z_j - f(z_i) + x_i
    ```

    Per head, x being the tokens projected. Without a correction it is (I - J)^{-1} x, for symmetric J the exact mean of
    Gaussian spins (variance 1, beta = 1, field x): their Onsager term V_i z_i cancels against their own answer, so that
    f = 0 whatever V. Other spins answer a field by z = g(theta), and feel the reaction r_i of the others to their own
    mean: z_i = g(x_i + sum_j J_ij z_j - r_i), this fixed point with f(z_i) = g^{-1}(z_i) - z_i + r_i. A correction
    stands for that f, with which the layer returns the magnetizations of the spins.

    "exact" is f for spins of length sqrt(D) in many dimensions, D = head_dim, with TAP's reaction, r of second order:

        f(z_i) = z_i [rho_i/(1 - rho_i) + sum_j J_ij^2 (1 - rho_j)],    rho_i = |z_i|^2/D,

    (|J_ij|_F^2/D for J_ij^2 of matrices). The answer is off from `SaddlePoint()` by O(J^3), and from `TAP()` by O(1/D).

    Guarantee: the map has a Lipschitz constant of at most `contraction` for all weights, inputs and masks, so
    that there is one fixed point and plain steps reach it. Couplings are scaled down where they have to be:

    - "softmax": J is A times the limit, in the norm max_i |z_i|_2, where |A| = 1 (its Euclidean norm may be sqrt(N));
    - "free", "blocks", "mixer": in the Euclidean norm of all sites of a head, by a bound of the spectral norm;
    - with "learned" or a function for a correction, mixing and f have half of `contraction` each; with "exact" the norm
      of J plus 3 max_i sum_j J_ij^2, which bounds the slope of r (g has slopes up to 1), is at most `contraction`.

    For a function of the user's there is no bound: the first call estimates the spectral radius of the map at its
    solution, and warns where it is above `contraction`.

    Args:
        dim: width of input and output.
        heads: number of heads.
        mixing: "softmax": attention over the other sites, fixed by the input; "free": a number for each pair of
            `sites`; "blocks": a (D, D) matrix for each pair; "mixer": in the place of J z a perceptron over `sites`; or
            a function or module z -> z', (*batch, heads, N, head_dim) both.
        correction: None, "exact", "learned" (a feed-forward net per head, zero at the start), or a function or
            module z -> f(z) of these shapes.
        contraction: largest Lipschitz constant, in (0, 1).
        symmetric: make J_ij = J_ji^T by the mean of both orders. None: where correction="exact", which needs it.
        sites: number of tokens, for mixings that have weights for each.
        expansion: hidden width of perceptrons over their outer width, default 4.
        **options: `head_dim`, the width D of a head, default dim / heads. `causal`: a token reads itself and the tokens
            before it, and no bit of it depends on later ones. (Without it, it does not read itself.) `steps`: None
            solves; a number makes as many plain steps from x, differentiated through. `bare`: no projections and one
            head, over raw inputs. `solver`, default `Anderson(history=2, rtol=1e-5)`. `adjoint`, default `Implicit()`.
            `on_failure`, for samples without an answer: "raise", "warn" or "ignore". `device` and `dtype` of the
            parameters.

    Attributes:
        mixing, correction: their modules or functions ("exact" and None as they are).
        last_solve: the `SolveReport` of the last call, one problem per sample.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to inputs and parameters, to second order; none with respect to `initial`.

    Not for magnetizations by the other methods, or strong couplings: use `SpinAttention`, which bounds no slope.

    Examples:
        >>> import torch
        >>> from implicit_attention import Anderson
        >>> from implicit_attention.layers import MeanFieldAttention
        >>> layer, x = MeanFieldAttention(16, heads=4), torch.randn(2, 5, 16)
        >>> layer(x).shape, bool(layer.last_solve.converged.all())
        (torch.Size([2, 5, 16]), True)
        >>> linear = MeanFieldAttention(3, heads=1, mixing="free", sites=5, bare=True, solver=Anderson(rtol=1e-6))
        >>> x, couplings = torch.randn(5, 3), linear.couplings(torch.zeros(5, 3))[0]
        >>> torch.allclose(linear(x), torch.linalg.solve(torch.eye(5) - couplings, x), atol=1e-4)
        True
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mixing: Mixing = "softmax",
        correction: Correction = None,
        contraction: float = 0.9,
        symmetric: bool | None = None,
        sites: int | None = None,
        expansion: int | None = None,
        **options: Unpack[TokenOptions],
    ) -> None:
        super().__init__(dim, heads, **options)
        self.contraction = _validate.check_number("contraction", contraction, low=0.0, high=1.0, open_low=True)
        _validate.require(self.contraction < 1, "contraction", "be < 1", contraction, "at 1 there may be no solution")
        self.symmetric = correction == "exact" if symmetric is None else bool(symmetric)
        #: The limits of the slopes of mixing and f; that of "exact" depends on the couplings.
        self.limit: float = self.contraction if correction in (None, "exact") else self.contraction / 2
        place: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        check_choices(mixing, correction, symmetric, self.symmetric, self.causal, sites, expansion)
        expansion = 4 if expansion is None else _validate.check_integer("expansion", expansion, low=1)
        self.sites = None if sites is None else _validate.check_integer("sites", sites, low=1)
        self.kind = {"softmax": "numbers", "free": "numbers"}.get(mixing, mixing) if isinstance(mixing, str) else None
        self.mixing: Any = self._mixing(mixing, expansion, place)
        self.correction: Any = correction
        if correction == "learned":
            hidden = expansion * self.head_dim
            self.correction = Perceptron(heads, self.head_dim, hidden, limit=self.limit, zero=True, **place)
        self._watched = False
        self._make_projections(place)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        initial: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        """The fixed point that the tokens of x make.

        Args:
            x: (*batch, N, dim).
            mask: which tokens a token may read, boolean, (N, N) or (*batch, N, N): True = i may read j. Symmetric, for
                symmetric couplings. Not for a mixer or a function, which a mask cannot limit.
            key_mask: which tokens exist, boolean, (*batch, N). The others are 0 in z, change nothing, and their output
                is 0.
            initial: where the solve starts, (*batch, heads, N, head_dim), such as a state of the call before; else x.
            return_state: return (output, z), with z (*batch, heads, N, head_dim), detached.

        Returns:
            (*batch, N, dim).
        """
        field, live, lost = self._read(x, key_mask)
        order = None
        if self.causal:
            order = TokenOrder(None if mask is None else self._pairs(field, mask, key_mask))
        weights = self._weights(field, mask, key_mask)
        if lost is not None and isinstance(self.mixing, SoftmaxCouplings):
            # Scores may overflow. Computed again without such tokens: also in gradients of couplings 0 * NaN is NaN.
            strong = ~weights[1].value.detach().sum(-1).isfinite()
            if host_may_look(strong) and bool(strong.any()):
                field, lost = field.masked_fill(strong[..., None], 0.0), lost | strong
                weights = self._weights(field, mask, key_mask)
        value, report, nothing = self._solved(field, live, *weights, initial, order, lost)
        self._remember(report)
        output = self._output(value.to(field.dtype), nothing)
        value = value if nothing is None else nothing.fill(value, torch.nan)
        return (output, value.detach()) if return_state else output

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    def couplings(self, x: Tensor, *, mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """J as it is in the map: scaled, and 0 for pairs that are masked.

        Args:
            x: (*batch, N, dim).
            mask: as in a call.
            key_mask: as in a call. Couplings to missing sites are left in where the input does not change them.

        Returns:
            (*#batch, heads, N, N), or (*#batch, heads, N, N, head_dim, head_dim) for blocks.

        Raises:
            ValueError: for a mixer or a function, which is no J.
        """
        required, remedy = "be 'softmax', 'free' or 'blocks' to have couplings", "make the layer with one of these"
        _validate.require(self.kind in ("numbers", "blocks"), "mixing", required, self._mixing_name(), remedy)
        return self._couplings(self._read(x, key_mask)[0], mask, key_mask)

    @torch.no_grad()
    def contraction_bound(self) -> Tensor:
        """A Lipschitz constant of the map, (heads), for every input without `mask`, in the norm that the class names.

        It is at most `contraction`, also under a mask; inf for a function of the user's.
        """
        unknown = self.kind is None or (callable(self.correction) and not isinstance(self.correction, Perceptron))
        like: Tensor = at_least_single(next(self.parameters(), torch.zeros(())))
        if unknown:
            return like.new_full((self.heads,), torch.inf)
        reaction = self.correction == "exact"
        if isinstance(self.mixing, SoftmaxCouplings):
            bound = like.new_full((self.heads,), self.limit)
        elif isinstance(self.mixing, Perceptron):
            bound = self.mixing.lipschitz()
        else:
            assert self.sites is not None
            nothing = like.new_zeros(self.heads, self.sites, self.head_dim)
            bound = certain(self._couplings(nothing, None, None), block=self._block, rows=False, reaction=reaction)
        if isinstance(self.correction, Perceptron):
            bound = bound + self.correction.lipschitz()
        return bound

    # Parts of the forward.

    def _read(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x projected, which sites exist, (*batch, 1, N, 1), and of a causal layer which tokens are not finite."""
        self._check_tokens(x)
        required = f"have as many tokens as sites={self.sites}, which have weights of their own"
        remedy = "make the layer for that length, or use mixing='softmax'"
        fits = self.sites in (None, x.shape[-2])
        _validate.require(fits, "x", required, f"{x.shape[-2]} tokens", remedy)
        field, lost = self._finite_field(self._live(x, key_mask))
        live = None if key_mask is None else key_mask.expand(x.shape[:-1])[..., None, :, None]
        return field, live, lost

    @property
    def _block(self) -> bool:
        return self.kind == "blocks"

    def _pairs(self, field: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        # Other couplings may stay as they are: the state of a missing site is 0.
        softmax = isinstance(self.mixing, SoftmaxCouplings)
        sites = for_heads(key_mask) if key_mask is not None and softmax else None
        symmetric = "symmetric couplings" if self.symmetric else ""
        return pairs_that_read(field[..., 0, :, :], mask, sites, causal=self.causal, symmetric=symmetric)

    def _couplings(self, field: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        softmax, pairs = isinstance(self.mixing, SoftmaxCouplings), self._pairs(field, mask, key_mask)
        couplings: Tensor = at_least_single(self.mixing(field, pairs))
        if softmax and not self.symmetric:
            return couplings * self.limit
        if self.symmetric and not softmax:
            # The other order of sites, and of the entries of each block.
            couplings = (couplings + (couplings.transpose(-4, -3) if self._block else couplings).mT) / 2
        return within(couplings, self.limit, block=self._block, rows=softmax, reaction=self.correction == "exact")

    def _weights(self, field: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> tuple[Any, Any, Any, Any]:
        """The inputs of the map beside state and field: mixing, its tensors, correction, its tensors."""
        mixing: Any = self.kind or self.mixing
        correction: Any = self.correction
        mixed_by = corrected_by = None
        if self.kind in ("numbers", "blocks"):
            couplings = self._couplings(field, mask, key_mask)
            batch = field.shape[:-3] if couplings.ndim > (5 if self._block else 3) else ()
            kind = PerSample if batch else Shared
            if batch:
                couplings = couplings.expand(*batch, *couplings.shape[len(batch) :])
            mixed_by = kind(as_matrix(couplings) if self._block else couplings)
            if correction == "exact":
                corrected_by = kind(squared(couplings, block=self._block))
        else:
            remedy = "build it into the function" if self.kind is None else "use mixing='softmax', 'free' or 'blocks'"
            required = f"be None for {self._mixing_name()}, which is no matrix of pairs"
            _validate.require(mask is None, "mask", required, "a tensor", remedy)
            mixed_by = Shared(self.mixing.weights()) if isinstance(self.mixing, Perceptron) else None
        if isinstance(correction, Perceptron):
            correction, corrected_by = "learned", Shared(correction.weights())
        return mixing, mixed_by, correction, corrected_by

    @uncompiled
    def _solved(
        self,
        field: Tensor,
        live: Tensor | None,
        mixing: Any,
        mixed_by: Any,
        correction: Any,
        corrected_by: Any,
        initial: Tensor | None,
        order: TokenOrder | None,
        own: Tensor | None,
    ) -> tuple[Tensor, SolveReport, Lost | None]:
        """The fixed point, its report, and the tokens without an answer; `own` are those that are not finite."""
        start = field = at_least_single(field)
        if initial is not None:
            _validate.check_float_tensor("initial", initial)
            required = f"have the shape (*batch, heads, N, head_dim) = {tuple(field.shape)}"
            _validate.require(initial.shape == field.shape, "initial", required, f"shape {tuple(initial.shape)}")
            start = initial.to(field)
            start = start if live is None else start.masked_fill(~live, 0.0)
            start = start if order is None else without_nonfinite(start)[0]
        sites = None if live is None else PerSample(live)
        problem = FixedPointMap(
            next_state, PerSample(field), sites, mixing, mixed_by, correction, corrected_by, event_ndim=3
        )
        problem.token_order = order
        solver, adjoint, on_failure = self.options.solver, self.options.adjoint, self._on_failure(self.options)
        if self.steps is not None:
            solver, adjoint = Picard(rtol=0.0, atol=0.0, max_steps=self.steps), Unrolled()
        elif solver is None:
            solver = DEFAULT_SOLVER if order is None else CAUSAL_SOLVER
        solution = solve(problem, start.detach(), solver=solver, adjoint=adjoint, on_failure=on_failure)
        if (callable(mixing) or callable(correction)) and not self._watched and not transforms_active():
            self._watched = True
            watch(problem, solution.value.detach(), self.contraction)
        if order is None or own is None:
            return solution.value, solution.report, None
        lost = lost_tokens(order, None if live is None else live[..., 0], own.any(-2, keepdim=True))
        report = solution.report if lost is None else lost.report(solution.report, on_failure, type(self).__name__, 1)
        return solution.value, report, lost

    # Housekeeping.

    def _mixing(self, mixing: Any, expansion: int, place: dict[str, Any]) -> Any:
        # Random couplings start at half of the limit.
        scale, sites = self.limit / 4, self.sites or 0
        if mixing == "softmax":
            return SoftmaxCouplings(self.heads, self.head_dim, mean_of_orders=self.symmetric, **place)
        if mixing == "free":
            return FreeCouplings(self.heads, sites, scale=scale * sites**-0.5, **place)
        if mixing == "blocks":
            scale = scale * (sites * self.head_dim) ** -0.5
            return BlockCouplings(self.heads, sites, self.head_dim, scale=scale, **place)
        if mixing == "mixer":
            return Perceptron(self.heads, sites, expansion * sites, limit=self.limit, zero=False, **place)
        return mixing

    def _mixing_name(self) -> str:
        return "mixing='mixer'" if self.kind == "mixer" else "a function of one's own"

    def extra_repr(self) -> str:
        parts = [f"correction={self.correction!r}"] * (not isinstance(self.correction, nn.Module))
        where = "max_i |z_i|" if isinstance(self.mixing, SoftmaxCouplings) else "|z|"
        known = (Perceptron, SoftmaxCouplings, FreeCouplings, BlockCouplings)
        own = [n for n in ("mixing", "correction") if callable(m := getattr(self, n)) and not isinstance(m, known)]
        unknown = f"Lipschitz constant unknown, for the given {' and '.join(own)}"
        return self._text(*parts, unknown if own else f"Lipschitz constant <= {self.contraction:g} in {where}")
