"""The kernel potential, whose keys are summed up in one vector of features: linear attention and random features."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import HALF, at_least_single, check_graph, host_may_look, vjp
from ..problem import restricted
from ._attention import SMALL_PRODUCT
from ._read import check_masks, check_per_key, joined
from ._shapes import Bias, Keys, Mask, PerBatch, PerRow, ReadOut, States, Values, Weights
from .kernel_features import OWN, Features, running_logsumexp
from .masked_keys import KeyPotential

# Rows whose pairs are formed at once where a query reads the keys up to its own.
CHUNK = 32
# The remedy for masks and biases of pairs.
PER_QUERY = (
    "for causal attention use functools.partial(KernelPotential, features=..., causal=True) without a causal mask, "
    "for other pairs LogSumExp"
)


class KernelPotential(KeyPotential):
    r"""Attention by a kernel of features phi, whose sum over keys is formed once.

    ```math
    \Phi(z) = \frac1\beta \log \left\langle \phi(\sqrt\beta\, z), S \right\rangle, \qquad
    S = \sum_j e^{\text{bias}_j}\, \phi(\sqrt\beta\, k_j)
    ```

    The keys enter through the m numbers S, which are computed once: an evaluation costs O(N m D) whatever the number of
    keys, and there is no (N, M) tensor. With x = sqrt(beta) z and J = d phi/dx,
    mean(z) = J^T S/(sqrt(beta) <phi(x), S>); covariance_product(z, v) is its derivative along v.

    Not convex: from a plain step the energy may rise, and equilibria may be saddles. The mean is the gradient of Phi
    and not the output of linear attention, which is `readout`.

    Args:
        keys: stored patterns, (*batch, M, D).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch (one per head: shape (H,)).
        features: phi, a function of (..., D) with results (..., m) that are >= 0: `PositiveFeatures(D, m)`,
            `EluFeatures()`, `ReluFeatures()`, a module or any other. It may have a method `log(x)` that returns
            log phi(x), finite; then all sums are taken in log space, and nothing overflows.
        mask: boolean over keys, broadcasts to (*batch, 1, M); True = the key counts.
        bias: one for each key, broadcasts to (*batch, 1, M); -inf masks. Without `log`, exp(bias) must not overflow.
        causal: query n reads the keys 1 to n, of as many keys as there are queries.

    Where all keys are masked, and where the kernel of z with all keys is 0 (or underflows, without `log`), value and
    mean are 0, with zero gradients. With `ReluFeatures` these are the z without an entry that is positive in a key too:
    towards their border Phi falls without end, and beyond it is 0. A masked key, also one of NaN, reaches no query.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; a mask or bias per query; beta <= 0; features
            of another shape, or negative ones of keys where the host can look. Other negative ones become NaN.

    Gradients: with respect to z, keys, beta, bias and the features' own tensors, to any order that the features have.
    Those of the keys pass through S: `tensors()` holds both, and `replace` with other keys leaves S as it was.

    Reference: Katharopoulos et al. (2020), eq. 5 and 9, for S and the read-out; Choromanski et al. (2021) for random
    features. Phi is the logarithm of the denominator there, over beta.

    Not for few keys, or keys that are to be told apart sharply: use `LogSumExp`, which is convex.

    Examples:
        >>> import functools, torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.potentials import EluFeatures, KernelPotential
        >>> phi = KernelPotential(2 * torch.eye(3), 1.0, features=EluFeatures())
        >>> phi.readout(torch.tensor([[1.0, 0.0, -1.0]]), values=torch.eye(3)).round(decimals=3)
        tensor([[0.4380, 0.3190, 0.2440]])
        >>> linear = functools.partial(KernelPotential, features=EluFeatures())
        >>> ImplicitAttention(8, heads=2, potential=linear)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    @property
    def declares_all(self) -> bool:  # type: ignore[override]
        """Whether the features are the library's: a user's function may read tensors that it does not declare."""
        return type(self.features) in OWN

    def __init__(
        self,
        keys: Keys,
        beta: PerBatch,
        *,
        features: Callable[[Tensor], Tensor],
        mask: Mask = None,
        bias: Bias = None,
        causal: bool = False,
    ) -> None:
        super().__init__(keys, beta)
        phi: Any = features
        if isinstance(phi, type) and issubclass(phi, Features):
            _validate.check_instance("features", phi, Features)
        if not callable(phi):
            required = "be a function of (..., D) with results (..., m)"
            raise TypeError(_validate.message("features", required, repr(phi), "for example EluFeatures()"))
        check_masks(mask, bias, keys)
        for name, pairs in (("mask", mask), ("bias", bias)):
            if pairs is not None:
                lead = check_per_key(name, pairs, PER_QUERY)
                _validate.check_together(name, lead, keys.shape[:-2], "the leading axes of `keys`")
        # A solve requires one dtype and device of all tensors.
        if isinstance(phi, Features):
            phi = phi.replace(*(t.to(keys) for t in phi.tensors()))
        self.features: Any = phi
        self.mask = mask
        self.bias = bias
        self.causal = causal
        self.state = self._summed()

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        lead, rows = self.state.shape[:-2], self.state.shape[-2]
        _validate.check_broadcast("mask, bias and beta", lead, z.shape[:-2], f"the leading axes of `{argument}`")
        if self.causal and z.shape[-2] != rows:
            required = f"have one row for each of the {rows} keys, as query n reads the keys 1 to n"
            remedy = "for other queries, make a potential of the keys that they read, without causal=True"
            raise ValueError(_validate.message(argument, required, f"shape {tuple(z.shape)}", remedy))

    @property
    def row_block(self) -> int:  # type: ignore[override]
        # Torch multiplies smaller products by itself, with other bits.
        size = self.keys.shape[-1] * self.state.shape[-1]
        return -(-max(SMALL_PRODUCT // max(size, 1), 1) // 32) * 32

    def value(self, z: States) -> PerRow:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self._value(self._kernel(z)).to(z.dtype)

    def mean(self, z: States) -> States:
        """J^T S/(sqrt(beta) <phi(x), S>), (*batch, N, D) -> (*batch, N, D)."""
        return self._mean(self._kernel(z)).to(z.dtype)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        kernel = self._kernel(z)
        return self._value(kernel).to(z.dtype), self._mean(kernel).to(z.dtype)

    def bounded_below(self, scale: float) -> bool | None:
        """Yes with features of this library, with which Phi grows no faster than log |z|; unknown with others."""
        return True if type(self.features) in OWN else None

    def select(self, index: Tensor) -> Self | None:
        if not self._has_only("keys", "beta", "features", "mask", "bias", "causal", "state"):
            return None
        return self._without_keys(restricted(self, index, state=1).state) if self.causal else self

    def append(self, keys: Float[Tensor, "*batch n D"], *, mask: Mask = None, bias: Bias = None) -> Self:
        """The potential of more keys, S + sum_j exp(bias_j) phi(sqrt(beta) k_j), at a cost that does not depend on M.

        Args:
            keys: the additional keys, (*batch, n, D).
            mask: which of them count, as in the class.
            bias: one for each of them, as in the class.

        Returns:
            A new potential; this one does not change. The new one holds S but no keys, and has no weights and read-out.

        Raises:
            TypeError, ValueError: as the class; keys in half precision; causal=True, with which each query has its S.

        Gradients: with respect to the keys of both.
        """
        remedy = "make the potential without it: the next query reads all keys"
        _validate.require(not self.causal, "causal", "be False to append keys", True, remedy)
        _validate.check_float_tensor("keys", keys, min_ndim=2)
        required, remedy = "be in float32 or float64 to append to", "convert them: in half precision S stops growing"
        _validate.require(keys.dtype not in HALF, "keys", required, keys.dtype, remedy)
        required = f"have the dimension {self.keys.shape[-1]} of those before on its last axis"
        _validate.require(keys.shape[-1] == self.keys.shape[-1], "keys", required, f"shape {tuple(keys.shape)}")
        _validate.check_same_kind([("the keys before", self.keys), ("keys", keys)])
        added = KernelPotential(keys, self.beta, features=self.features, mask=mask, bias=bias).state
        _validate.check_together("keys", added.shape[:-2], self.state.shape[:-2], "the leading axes of those before")
        if not self._in_logs:
            return self._without_keys(self.state + added)
        nothing = self.state.isneginf() & added.isneginf()
        both = torch.stack([state.masked_fill(nothing, 0.0) for state in (self.state, added)])
        return self._without_keys(both.logsumexp(0).masked_fill(nothing, -torch.inf))

    def probabilities(self, z: States) -> Weights:
        """The weights exp(bias_j) <phi(x), phi(sqrt(beta) k_j)>/<phi(x), S>, (*batch, N, M).

        Zeros where value and mean are 0. An (N, M) tensor by definition: `readout` does without.
        """
        p = self._kernel(z).shares
        weights = self._weighed("probabilities")[0]
        if not self.causal:
            return (p @ self._share(weights, self.state).mT).to(z.dtype)
        places = torch.arange(p.shape[-2], device=p.device)
        rows = [self._pairs(p, slice(n, n + 1), weights, places[None] > n) for n in range(p.shape[-2])]
        return torch.cat(rows, -2).to(z.dtype)

    def readout(self, z: States, values: Values, *, dropout_p: float = 0.0) -> ReadOut:
        """Linear attention, <phi(x), sum_j exp(bias_j) phi(sqrt(beta) k_j) v_j^T>/<phi(x), S>: probabilities(z) V.

        Args:
            z: queries or states, (*batch, N, D).
            values: one for each key, (*batch, M, E); leading axes broadcast to those of z.
            dropout_p: 0; there are no weights that could be dropped.

        Returns:
            (*batch, N, E), without an (N, M) tensor; zeros where value and mean are 0, NaN for a query that reads a key
            or value which is not finite.

        Raises:
            TypeError, ValueError: shapes, dtypes or devices that do not fit; dropout_p > 0; a potential that holds no
                keys, as it was made by `append` or `select`.

        Gradients: as of the class, and with respect to values.
        """
        weights, counted, _ = self._weighed("readout")
        self._check_readout(z, values, dropout_p)
        remedy = "drop entries of the output instead, or use LogSumExp"
        _validate.require(dropout_p == 0, "dropout_p", "be 0 for KernelPotential, without weights", dropout_p, remedy)
        finite = values.isfinite().all(-1)
        values = at_least_single(values).where((finite & counted)[..., None], 0.0)
        p = self._kernel(z).shares
        whole = None if self.causal else self._share(weights, self.state).mT @ values
        out = self._streamed(p, weights, values) if whole is None else p @ whole
        return out.masked_fill(self._reached(~finite & counted)[..., None], torch.nan).to(z.dtype)

    # The sum over the keys.

    @property
    def _in_logs(self) -> bool:
        """Whether features, and sums of them, are kept as logarithms."""
        return getattr(self.features, "log", None) is not None

    @property
    def _root(self) -> float | Tensor:
        """sqrt(beta), shaped to multiply states."""
        scale = self._scale
        return at_least_single(scale).sqrt() if isinstance(scale, Tensor) else math.sqrt(scale)

    def _weighed(self, method: str = "") -> tuple[Tensor, Tensor, Tensor]:
        """Return exp(bias) phi of the keys (*#batch, M, m), which keys count, and which of these are not finite.

        The last two are (*#batch, M). Keys that do not count add nothing; those that are not finite are read as zeros.
        """
        if method and self.keys.shape[-2] == 0:
            required = "be asked of a potential that holds its keys"
            remedy = "make a KernelPotential of all keys"
            raise ValueError(_validate.message(method, required, "one that was made by append or select", remedy))
        pairs, counted = joined(*(t if t is None or t.ndim == 1 else t.squeeze(-2) for t in (self.mask, self.bias)))
        keys = at_least_single(self.keys)
        finite = keys.isfinite().all(-1)
        weights = torch.add(*self._described(self._root * keys.where(finite[..., None], 0.0)))
        if counted is None:
            return weights, torch.ones_like(finite), ~finite
        counted = counted.expand(*counted.shape[:-1], finite.shape[-1])
        if self.bias is not None:
            bias = at_least_single(pairs).where(counted, 0.0)[..., None]
            weights = weights + bias if self._in_logs else weights * bias.exp()
        # A sum of -inf alone has NaN gradients.
        nothing = torch.finfo(weights.dtype).min if self._in_logs else 0.0
        return weights.where(counted[..., None], nothing), counted, counted & ~finite

    def _summed(self) -> Tensor:
        """S (*#batch, 1, m), or one for each query (*#batch, N, m); its logarithm where features are logarithms."""
        weights, counted, bad = self._weighed()
        if self._in_logs:
            state = running_logsumexp(weights) if self.causal else weights.logsumexp(-2, keepdim=True)
            state = state.masked_fill(~self._reached(counted)[..., None], -torch.inf)
        else:
            state = weights.cumsum(-2) if self.causal else weights.sum(-2, keepdim=True)
        return state.masked_fill(self._reached(bad)[..., None], torch.nan).to(self.keys.dtype)

    def _reached(self, keys: Tensor) -> Tensor:
        """Which queries (*#batch, N or 1) read one of these keys (*#batch, M)."""
        return keys.cumsum(-1) > 0 if self.causal else keys.any(-1, keepdim=True)

    def _without_keys(self, state: Tensor) -> Self:
        clone = self.replace(*self.tensors())
        clone.keys = self.keys.new_empty(*self.keys.shape[:-2], 0, self.keys.shape[-1])
        clone.mask = clone.bias = None
        clone.state = state
        return clone

    # Evaluation at states.

    def _described(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of x, and a part (*, 1) that is to be added to all features of a row."""
        features, common = self.features, x.new_zeros(1)
        if getattr(features, "log_parts", None) is not None:
            phi, common = features.log_parts(x)
        else:
            phi = features.log(x) if self._in_logs else features(x)
        count = self.state.shape[-1] if "state" in vars(self) else None
        is_tensor = isinstance(phi, Tensor)
        if not is_tensor or phi.shape[:-1] != x.shape[:-1] or count not in (None, phi.shape[-1]):
            received = f"shape {tuple(phi.shape)}" if is_tensor else type(phi).__name__
            required = f"return a tensor (*, {'m' if count is None else count}) for (*, D) = {tuple(x.shape)}"
            raise ValueError(_validate.message("features", required, received))
        if self._in_logs:
            return phi, common
        if count is None and host_may_look(phi) and bool((phi < 0).any()):
            remedy = "take their exponential, elu + 1 or square"
            raise ValueError(_validate.message("features", "return numbers >= 0", phi.min().item(), remedy))
        return _validate.inside(phi, low=0.0), common

    def _kernel(self, z: Tensor) -> Kernel:
        x, state = self._root * at_least_single(z), at_least_single(self.state)
        phi, common = self._described(x)
        if self._in_logs:
            empty = state.isneginf().all(-1)
            logits = phi + state.masked_fill(empty[..., None], 0.0)
            # One exponential for the sum and the shares.
            top = logits.detach().amax(-1, keepdim=True)
            terms = (logits - top).exp()
            total = terms.sum(-1, keepdim=True)
            shares = terms * total.reciprocal().masked_fill(empty[..., None], 0.0)
            return Kernel(x, (total.log() + top + common).squeeze(-1), shares, shares, empty)
        terms = phi * state
        total = terms.sum(-1)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        cotangent = (state / total[..., None]).masked_fill(empty[..., None], 0.0)
        return Kernel(x, total.log(), terms / total[..., None], cotangent, empty)

    def _value(self, kernel: Kernel) -> Tensor:
        return kernel.log.masked_fill(kernel.empty, 0.0) / self._row_scale

    def _mean(self, kernel: Kernel) -> Tensor:
        if getattr(self.features, "pullback", None) is not None:
            by_features: Tensor = self.features.pullback(kernel.x, kernel.cotangent)
        else:
            by_features = vjp(self._with_graph, kernel.x)[1](kernel.cotangent)[0]
        return by_features / self._root

    def _with_graph(self, x: Tensor) -> Tensor:
        phi = torch.add(*self._described(x))
        check_graph("features", phi, lambda x: torch.add(*self._described(x)), x)
        return phi

    # Pairs of queries and keys.

    def _share(self, part: Tensor, whole: Tensor) -> Tensor:
        """Return the share of `part` in the sums `whole`, per feature; 0 where a sum is empty."""
        if not self._in_logs:
            nothing = whole == 0
            return (part / whole.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
        return (part - whole.masked_fill(whole.isneginf(), 0.0)).exp()

    def _pairs(self, p: Tensor, queries: slice, weights: Tensor, later: Tensor) -> Tensor:
        """Return the weights of some keys for some queries, 0 for `later` keys, from a number per pair and feature."""
        nothing = torch.finfo(weights.dtype).min if self._in_logs else 0.0
        read = weights[..., None, :, :].masked_fill(later[..., None], nothing)
        return (p[..., queries, None, :] * self._share(read, self.state[..., queries, None, :])).sum(-1)

    def _streamed(self, p: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        """Return the causal read-out, from averages of the values before a chunk of rows and pairs inside the chunk."""
        before = self.state.new_full((1, p.shape[-1]), -torch.inf if self._in_logs else 0.0)
        average = values.new_zeros(p.shape[-1], values.shape[-1])
        outputs = []
        for first in range(0, p.shape[-2], CHUNK):
            rows = slice(first, first + CHUNK)
            state = self.state[..., rows, :]
            last = state[..., -1:, :]
            later = torch.ones(state.shape[-2], state.shape[-2], dtype=torch.bool, device=p.device).triu(1)
            inside = self._pairs(p, rows, weights[..., rows, :], later) @ values[..., rows, :]
            outputs.append((p[..., rows, :] * self._share(before, state)) @ average + inside)
            kept, new = self._share(before, last), self._share(weights[..., rows, :], last)
            average, before = kept.mT * average + new.mT @ values[..., rows, :], last
        return torch.cat(outputs, -2)


class Kernel(NamedTuple):
    """log <phi(x), S> at states x, the shares of the features in the sum, and where the sum is 0 (`empty`).

    `cotangent` is S/<phi(x), S>, or the shares where features are logarithms: what the features' derivative is taken
    along.
    """

    x: Tensor
    log: Tensor
    shares: Tensor
    cotangent: Tensor
    empty: Tensor
