"""The causal Energy Transformer: tokens that are pulled as queries alone, so that none reads a later one."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import is_batched
from ..potentials import Potential
from ..potentials._query_side import QuerySide
from ..potentials._read import check_masks_fit
from ..potentials._shapes import States
from ..potentials.layer_norm import LayerNormPotential
from ..potentials.token_attention import TokenAttention
from ..problem import Linearization, Problem, TokenOrder, pullback
from .anchored import Fielded
from .base import Dynamics


class _Causal(Problem, general=True):
    """A problem whose tokens x act through g = grad L(x) and are pulled by a memory and, as queries, by earlier tokens.

    pull(g)_C = sum_h (sum_{B <= C} P_hCB k_hB) W_query_h + memory.mean(g_C).
    """

    event_ndim = 2

    def __init__(self, lagrangian: LayerNormPotential, attention: TokenAttention, memory: Potential | None) -> None:
        _validate.check_instance("lagrangian", lagrangian, LayerNormPotential)
        _validate.check_instance("attention", attention, TokenAttention)
        if memory is not None:
            _validate.check_instance("memory", memory, Potential)
            required, remedy = "have one problem per row (event_ndim 1)", "pass what `TokenMemory` is made of"
            received = f"event_ndim {memory.event_ndim}"
            _validate.require(memory.event_ndim == 1, "memory", required, received, remedy)
        self.lagrangian, self.attention, self.memory = lagrangian, attention, memory

    def _check(self, argument: str, z: Tensor, keys: Tensor | None) -> None:
        """Raise unless states of z's shape fit the potentials and these earlier keys."""
        self.lagrangian.check_state(argument, z)
        heads, width, _ = self.attention.w_query.shape
        self.attention._check_width(argument, z)
        before = 0
        if keys is not None:
            _validate.check_float_tensor("keys", keys, min_ndim=3)
            expected = (*z.shape[:-2], heads, keys.shape[-2], width)
            required = f"have the shape (*batch, H, M, Y) = {expected} beside `{argument}`"
            remedy = "make them by attention.keys_of(lagrangian.mean(x))"
            _validate.require(keys.shape == expected, "keys", required, tuple(keys.shape), remedy)
            _validate.check_same_kind([(argument, z), ("keys", keys)])
            before = keys.shape[-2]
        check_masks_fit(self.attention.mask, None, argument, z, before + z.shape[-2], "(*batch, N, M + N)")
        if self.memory is not None:
            self.memory.check_state(argument, z)

    def activation(self, z: States) -> States:
        """g = grad L(x), the normalised tokens."""
        return self.lagrangian.mean(z)

    def pull(self, z: States, keys: Tensor | None = None) -> States:
        """Return the pull of attention and memory on each token of x, at g = LN(x)."""
        g = self.activation(z)
        pull = self.attention.query_pull(g, keys)
        return pull if self.memory is None else pull + self.memory.mean(g)


class CausalTokens(_Causal, Fielded):
    """x_C = b_C + pull(LN(x))_C: the equilibrium of tokens of which none reads a later one.

    pull(g)_C = sum_h (sum_{B <= C} P_hCB k_hB) W_query_h + memory.mean(g_C), with k_hB = W_key_h g_B and P_hC the
    softmax of beta_h <q_hC, k_hB> over the tokens B up to C (with `exclude_self` before C): the query side of
    `TokenAttention` alone. Its key side would pull a token by those after it. So this map is the gradient of no
    function: there is no energy.

    `solve` stops each token on its own, once its residual and those of all tokens before it are within the tolerance:
    changing the last token changes earlier ones by no bit.

    Nothing guards the way to a fixed point, as no energy does. With large weights `Anderson` may end at none where
    `Picard` finds one.

    Args:
        lagrangian: L, a `LayerNormPotential`; LN is its gradient.
        attention: a `TokenAttention`; its mask is of the pairs (*batch, N, M + N) and allows no later token either.
        memory: a potential with one problem per row, such as `Polynomial(xi, 1.0)`, or None.
        field: the input tokens b, (*batch, N, D), 0 where a token is missing.
        keys: (*batch, H, M, Y), of M earlier tokens that are solved and stay as they are:
            attention.keys_of(lagrangian.mean(x)). All of the new tokens may read them.

    A first token with `exclude_self` has no attention pull. A NaN in a token leaves it and those behind it without an
    answer, and its sample without a gradient; it reaches no token before it, and no other sample.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; in `solve`, a solver that cannot stop each
            token on its own, such as `Broyden`.

    Gradients: with respect to field, keys and the tensors of attention, memory and L, to any order.

    Not for tokens that may read later ones: use `LegendreEnergy`, which has an energy and so solves more safely.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.energies import CausalTokens
        >>> from implicit_attention.potentials import LayerNormPotential, Polynomial, TokenAttention
        >>> from implicit_attention.solvers import Picard
        >>> weights = 0.3 * torch.cos(torch.arange(24.0)).view(2, 3, 4)
        >>> attention, memory = TokenAttention(weights, weights, beta=1.0), Polynomial(0.3 * torch.eye(4), 1.0)
        >>> tokens, tight = torch.sin(torch.arange(20.0)).view(5, 4), Picard(rtol=1e-6)
        >>> first = solve(CausalTokens(LayerNormPotential(), attention, memory, tokens), tokens, solver=tight).value
        >>> tokens = torch.cat([tokens[:-1], -tokens[-1:]])
        >>> second = solve(CausalTokens(LayerNormPotential(), attention, memory, tokens), tokens, solver=tight).value
        >>> (first - second).abs().amax(dim=-1) > 1e-4
        tensor([False, False, False, False,  True])
    """

    declares_all = True
    #: The attributes of the class: closed forms do not hold for a subclass with more.
    _attributes: ClassVar[tuple[str, ...]] = ("lagrangian", "attention", "memory", "field", "keys", "token_order")

    def __init__(
        self,
        lagrangian: LayerNormPotential,
        attention: TokenAttention,
        memory: Potential | None,
        field: States,
        *,
        keys: Float[Tensor, "*batch H M Y"] | None = None,
    ) -> None:
        _Causal.__init__(self, lagrangian, attention, memory)
        Fielded.__init__(self, field)
        self.keys = keys
        self._check("field", field, keys)
        # A mask that vmap maps over does not outlive it: a token then waits for all tokens before it.
        pairs = None if attention.mask is None or is_batched(attention.mask) else attention.mask
        if pairs is not None:
            count, before = field.shape[-2], 0 if keys is None else keys.shape[-2]
            pairs = pairs.broadcast_to(*pairs.shape[:-2], count, before + count)[..., before:].tril()
        self.token_order = TokenOrder(pairs)

    def fixed_point_map(self, z: States) -> States:
        """f(x) = b + pull(LN(x))."""
        return self.field + self.pull(z, self.keys)

    def linearize(self, z: Tensor) -> Linearization:
        attention, memory = self.attention, self.memory
        if not self._has_only(*self._attributes) or type(attention) is not TokenAttention:
            return super().linearize(z)
        norm, g = self.lagrangian.linearize(z), self.activation(z)
        side = QuerySide(attention, g, self.keys)
        cov = None if memory is None else memory.linearize(g)

        def by_memory(v: Tensor) -> Tensor | float:
            if memory is None:
                return 0.0
            return memory.covariance_product(g, v) if cov is None else cov.product(v)

        def product(v: Tensor) -> Tensor:
            moved = norm.product(v)
            return side.jvp(moved) + by_memory(moved)

        def transposed(u: Tensor) -> Tensor:
            return norm.product(side.vjp(u) + by_memory(u))

        def by_tensors(u: Tensor) -> tuple[Tensor | None, ...]:
            if memory is not None and cov is None:
                return pullback(self, z, u)
            by = side.vjp_tensors(u)
            own = [getattr(by, name, None) for name, _ in attention.named_tensors()]
            of_memory = () if cov is None else cov.vjp_tensors(u)
            earlier = () if self.keys is None else (by.earlier,)
            return *norm.vjp_tensors(by.z + by_memory(u)), *own, *of_memory, u, *earlier

        return Linearization(product, transposed, by_tensors)

    def without(self, left_out: Tensor) -> Self:
        clone = super().without(left_out)
        if self.keys is not None:
            clone.keys = self.keys.masked_fill(left_out[..., None, None, None], 0.0)
        return clone


class CausalDynamics(_Causal, Dynamics):
    """x -> x + pull(LN(x)) with the pull of `CausalTokens`: the published steps of tokens of which none reads a later.

    It has no fixed point in x, which grows without bound, and no energy. A step of size a <= 1 is
    `Picard(damping=1 - a)`. Changing a token changes no earlier one by a bit, whatever the number of steps.

    Args:
        lagrangian: L, a `LayerNormPotential`; LN is its gradient.
        attention: a `TokenAttention`; its mask allows no later token either.
        memory: a potential with one problem per row, or None.

    Raises:
        TypeError: an argument of another class. ValueError: in `solve`, a solver that waits for convergence.

    Gradients: with respect to the initial state and the tensors of attention, memory and L, by `Unrolled()`.

    Not for tokens one after the other: in these dynamics a token reads the states that earlier ones pass through at
    each step, not where they end. Use `CausalTokens`.

    Examples:
        >>> import torch
        >>> from implicit_attention import Unrolled, solve
        >>> from implicit_attention.energies import CausalDynamics
        >>> from implicit_attention.potentials import LayerNormPotential, TokenAttention
        >>> from implicit_attention.solvers import Picard
        >>> weights = 0.3 * torch.cos(torch.arange(24.0)).view(2, 3, 4)
        >>> problem = CausalDynamics(LayerNormPotential(), TokenAttention(weights, weights, beta=1.0), None)
        >>> steps = Picard(damping=0.9, max_steps=12, rtol=0, atol=0)
        >>> tokens = torch.sin(torch.arange(20.0)).view(5, 4)
        >>> solve(problem, tokens, solver=steps, adjoint=Unrolled()).value.shape
        torch.Size([5, 4])
    """

    declares_all = True
    _instead = "use Picard(damping=0.9, max_steps=12, rtol=0, atol=0), or CausalTokens, which has fixed points"

    def check_state(self, z: Tensor) -> None:
        super().check_state(z)
        self._check("initial", z, None)

    def fixed_point_map(self, z: States) -> States:
        """x + pull(LN(x))."""
        return z + self.pull(z)
