"""Restricted Boltzmann machines: two layers of units of any law, their exact log-likelihood, and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import _validate
from .._torch import HALF, host_may_look, in_own_precision, is_differentiated, transforms_active
from ._shapes import PerRow, States
from .hidden_units import HiddenUnits
from .laws import BernoulliUnits, ConstantUnits, DiscreteUnits, GaussianUnits
from .sphere import SignUnits
from .unit import Units, check_generator

#: The largest number of states that `log_partition` adds up.
LARGEST = 2**24
#: The largest number of tilts in one block of states.
BLOCK = 2**21

Visible: TypeAlias = States
#: Maps states of a layer, their log weights, W and a to the log of the sum of their weights in Z.
_Sums: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class RestrictedBoltzmannMachine:
    """p(v) = exp(-E(v))/Z, E(v) = -log w(v) - a.v - sum_mu K(t_mu), t = W^T v: hidden units h summed over.

    The joint weight is w(v) rho(h) exp(a.v + v^T W h), with the normalised law rho of the hidden units and the weight w
    of visible states: 1 for every state of `SignUnits()` and `BernoulliUnits(0.5)`, so that Z counts states; a discrete
    law times its number of states in general; exp(-|v - mean|^2/(2 variance)) for `GaussianUnits`.

    Special cases by the law of the hidden units:

        GaussianUnits()   the classical Hopfield model: K = t^2/2, pair couplings W W^T
        PoissonUnits(1)   the exponential interaction: K = e^t - 1, one exponential per hidden unit
        ConstantUnits(1)  frozen hidden units, which are a field W 1; with Gaussian visible units of variance 1/beta and
                          W = beta k this is N(k, I/beta), one component of the mixture behind `LogSumExp`

    Not for one of many patterns at a time: a hidden unit here does not exclude the others; use `LogSumExp`.

    Args:
        weights: W, (D, H).
        field: a, (D,), in units of 1/v.
        visible: the law of the visible units: `SignUnits()`, `BernoulliUnits(p)`, `DiscreteUnits(...)`, or
            `GaussianUnits(mean, variance)`, where a tuple of variances has one for each unit.
        hidden: the law of the hidden units, any `Units`.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; a visible law that is none of these; a machine
            that cannot be normalised: a K that is infinite at a state; with Gaussian visible units, a K that grows
            faster than any square (`PoissonUnits`), or a precision 1/variance - W K'' W^T that is not positive definite
            for the largest K''. Numbers on an accelerator are not checked: log Z is NaN or infinite there.

    Gradients: of `effective_energy`, `log_partition` and `log_prob` with respect to v, weights and field, to any order.

    Reference: Smolensky (1986), restricted Boltzmann machines; Welling et al. (2004), exponential family harmoniums.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import RestrictedBoltzmannMachine, SignUnits
        >>> weights = torch.tensor([[0.5], [-0.5]])
        >>> machine = RestrictedBoltzmannMachine(weights, torch.zeros(2), SignUnits(), SignUnits())
        >>> states = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> machine.log_prob(states).exp()
        tensor([0.1966, 0.3034])
    """

    def __init__(
        self, weights: Float[Tensor, "D H"], field: Float[Tensor, " D"], visible: Units, hidden: Units
    ) -> None:
        self.potential = HiddenUnits(weights, hidden)
        required = "have two axes, (D, H)"
        _validate.require(weights.ndim == 2, "weights", required, f"shape {tuple(weights.shape)}")
        _validate.require(weights.dtype not in HALF, "weights", "have at least 32 bits", weights.dtype, "use .float()")
        _validate.check_float_tensor("field", field)
        _validate.check_same_kind([("weights", weights), ("field", field)])
        required = f"have one entry for each visible unit, shape ({len(weights)},)"
        _validate.require(field.shape == weights.shape[:1], "field", required, f"shape {tuple(field.shape)}")
        self.weights, self.field, self.visible, self.hidden = weights, field, visible, hidden
        self._check_visible()
        if isinstance(visible, GaussianUnits):
            self._check_growth()
        elif host_may_look(weights):
            self._check_domain()

    @in_own_precision
    def effective_energy(self, v: Visible) -> PerRow:
        """E(v), (*batch, N, D) -> (*batch, N); infinite where a row is no state of the visible units."""
        self.potential.check_state("v", v)
        return -self._log_weight(v) - v @ self.field - self.potential.value(v)

    @in_own_precision
    def hidden_mean(self, v: Visible) -> Float[Tensor, "*batch N H"]:
        """<h|v> = K'(W^T v), (*batch, N, D) -> (*batch, N, H)."""
        self.potential.check_state("v", v)
        return self.hidden.mean(v @ self.weights)

    @in_own_precision
    def visible_mean(self, h: Float[Tensor, "*batch N H"]) -> Visible:
        """<v|h>, the mean of the visible law tilted by a + W h, (*batch, N, H) -> (*batch, N, D)."""
        _validate.check_float_tensor("h", h, min_ndim=2)
        _validate.check_same_kind([("weights", self.weights), ("h", h)])
        required = f"have one entry for each of the {self.weights.shape[1]} columns of `weights` on its last axis"
        _validate.require(h.shape[-1] == self.weights.shape[1], "h", required, f"shape {tuple(h.shape)}")
        return self.visible.mean(self.field + h @ self.weights.mT)

    def log_prob(self, v: Visible) -> PerRow:
        """log p(v) = -E(v) - log Z, of a state or, for Gaussian visible units, the density; -inf where v is no state.

        Raises as `log_partition` does.

        Not for many calls with the same parameters: log Z is computed in each; subtract it from -`effective_energy`.
        """
        return -self.effective_energy(v) - self.log_partition()

    @in_own_precision
    def log_partition(self) -> Float[Tensor, ""]:
        """log Z, exact: closed for two Gaussian layers, else a sum over the states of the smaller discrete layer.

        States are added up in blocks, which are computed again in a backward pass instead of being kept.

        Raises:
            ValueError: no layer is discrete with at most 2^24 states.
        """
        if isinstance(self.visible, GaussianUnits) and isinstance(self.hidden, GaussianUnits):
            return self._gaussian_log_partition(self.visible, self.hidden)
        layer, sums = self._enumerable()
        # torch.func refuses the hooks of a checkpoint: every block is kept there.
        again = is_differentiated(self.weights, self.field) and not transforms_active()
        parts = []
        for states, logs in _blocks(layer, self.weights):
            call = partial(checkpoint, sums, use_reentrant=False) if len(states) < layer.total and again else sums
            parts.append(call(states, logs, self.weights, self.field))
        return torch.stack(parts).logsumexp(0)

    @in_own_precision
    @torch.no_grad()
    def sample(
        self, chains: int, *, steps: int = 1000, generator: torch.Generator | None = None
    ) -> Float[Tensor, "chains D"]:
        """States v after steps of block Gibbs sampling, one for each independent chain, (chains, D).

        Chains begin with the visible units in their field alone. The necessary number of steps depends on the machine:
        compare averages over twice as many.

        Args:
            chains: how many, >= 0.
            steps: >= 0; in each all hidden units are drawn given the visible ones, and the other way round.
            generator: where randomness comes from, on the device of `weights`; None is torch's own.

        Gradients: none.

        Not for weights so large that chains stay in one pattern: average over hidden states exactly where these can be
        enumerated, or see the effective samples of `annealed_importance_sampling`.
        """
        chains = _validate.check_integer("chains", chains, low=0)
        check_generator(generator, "weights", self.weights)
        start = self.visible.sample(self.field.detach().expand(chains, -1), generator=generator)
        return self.gibbs(start, steps=steps, generator=generator)

    @in_own_precision
    @torch.no_grad()
    def gibbs(self, v: Visible, *, steps: int = 1, generator: torch.Generator | None = None) -> Visible:
        """v after steps of block Gibbs sampling from v: h given v, then v given h; shapes as in `hidden_mean`.

        Gradients: none.

        Not for a first sample: `sample` begins without data.
        """
        self.potential.check_state("v", v)
        return self._gibbs(v, steps, generator, 1.0)

    def _gibbs(self, v: Tensor, steps: int, generator: torch.Generator | None, share: float) -> Tensor:
        """Steps of the machine with the weights times a share."""
        weights = share * self.weights
        for _ in range(_validate.check_integer("steps", steps, low=0)):
            h = self.hidden.sample(v @ weights, generator=generator)
            v = self.visible.sample(self.field + h @ weights.mT, generator=generator)
        return v

    # The two layers.

    def _log_weight(self, v: Tensor) -> Tensor:
        """log w(v), (*batch, N)."""
        if isinstance(self.visible, GaussianUnits):
            return -((v - self.visible.center).square() / (2 * self._visible_variance())).sum(-1)
        values, logs = _counted(self.visible, v)
        same = v[..., None] == values
        # NaN in v is no state either, and stays NaN through a.v.
        return torch.where(same, logs, -torch.inf).logsumexp(-1).sum(-1)

    def _visible_variance(self) -> Tensor:
        assert isinstance(self.visible, GaussianUnits)
        return torch.ones_like(self.field.detach()) * self.visible.spread_of(self.field)

    def _enumerable(self) -> tuple[_Layer, _Sums]:
        """The smaller discrete layer, and a function that sums a block of its states."""
        dim, count = self.weights.shape
        layers: list[tuple[_Layer, _Sums]] = []
        if not isinstance(self.visible, GaussianUnits):
            layers.append((_Layer(*_counted(self.visible, self.field), dim), self._sum_of_visible))
        if isinstance(self.hidden, BernoulliUnits | ConstantUnits | DiscreteUnits | SignUnits):
            values, logs = _counted(self.hidden, self.field)
            layers.append((_Layer(values, logs - math.log(len(values)), count), self._sum_of_hidden))
        remedy = "use annealed_importance_sampling(machine), an estimate with an error bar"
        required = f"have a discrete layer of at most 2^{math.log2(LARGEST):.0f} states for an exact log Z"
        if not layers:
            received = f"visible {self.visible!r} and hidden {self.hidden!r}"
            raise ValueError(_validate.message("machine", required, received, remedy))
        layer, sums = min(layers, key=lambda pair: pair[0].total)
        received = f"{len(layer.values)}^{layer.units}"
        _validate.require(layer.total <= LARGEST, "machine", required, received, remedy)
        return layer, sums

    def _sum_of_visible(self, v: Tensor, logs: Tensor, weights: Tensor, field: Tensor) -> Tensor:
        return (logs + v @ field + self.hidden.cumulant(v @ weights).sum(-1)).logsumexp(-1)

    def _sum_of_hidden(self, h: Tensor, logs: Tensor, weights: Tensor, field: Tensor) -> Tensor:
        exponents = logs + self.visible.cumulant(field + h @ weights.mT).sum(-1)
        return exponents.logsumexp(-1) + self._log_mass()

    def _log_mass(self) -> Tensor | float:
        """Return the logarithm of the sum, or integral, of w over all visible states."""
        if isinstance(self.visible, GaussianUnits):
            return (2 * math.pi * self._visible_variance()).log().sum() / 2
        return len(self.field) * math.log(len(_counted(self.visible, self.field)[0]))

    def _gaussian_log_partition(self, visible: GaussianUnits, hidden: GaussianUnits) -> Tensor:
        prior = self._visible_variance().reciprocal()
        precision = self._precision(hidden.spread_of(self.weights))
        factor, failed = torch.linalg.cholesky_ex(precision)
        pull = self.field + prior * visible.center + hidden.center * self.weights.sum(-1)
        root = torch.linalg.solve_triangular(factor, pull[:, None], upper=False)
        value = root.square().sum() / 2 - factor.diagonal().log().sum() + len(prior) * math.log(2 * math.pi) / 2
        return torch.where(failed == 0, value - visible.center**2 * prior.sum() / 2, torch.nan)

    def _precision(self, spread: float | Tensor) -> Tensor:
        """1/variance - W spread W^T, (D, D)."""
        return self._visible_variance().reciprocal().diag_embed() - (self.weights * spread) @ self.weights.mT

    # Checks that the machine can be normalised.

    def _check_visible(self) -> None:
        remedy = "use SignUnits(), BernoulliUnits(p), DiscreteUnits(values) or GaussianUnits(mean, variance)"
        if not isinstance(self.visible, BernoulliUnits | DiscreteUnits | GaussianUnits | SignUnits):
            required = "be discrete or Gaussian units"
            raise TypeError(_validate.message("visible", required, repr(self.visible), remedy))
        for name, size in zip(("visible", "hidden"), self.weights.shape, strict=True):
            units = getattr(self, name)
            if isinstance(units, GaussianUnits) and isinstance(units.spread, tuple):
                required = f"have a variance for each of the {size} {name} units"
                _validate.require(len(units.spread) == size, name, required, len(units.spread))
        if isinstance(self.visible, GaussianUnits):
            spread = self.visible.spread
            smallest = min(spread) if isinstance(spread, tuple) else spread
            _validate.require(smallest > 0, "visible", "have variances > 0", repr(self.visible))

    def _check_growth(self) -> None:
        """Raise unless exp(-E) falls in all directions of Gaussian visible units."""
        if self.hidden.linear_growth:
            return
        largest = self.hidden.largest_variance
        required = "have a K that grows no faster than a square, which Gaussian visible units can be normalised against"
        remedy = "use BernoulliUnits or SignUnits, or a soft_barrier for ExponentialUnits and LaplaceUnits"
        _validate.require(math.isfinite(largest), "hidden", required, repr(self.hidden), remedy)
        if not host_may_look(self.weights):
            return
        spread = self.hidden.spread_of(self.weights) if isinstance(self.hidden, GaussianUnits) else largest
        precision = self._precision(spread).detach().double()
        smallest = float(torch.linalg.eigvalsh(precision)[0]) if bool(precision.isfinite().all()) else math.nan
        required = "leave the precision 1/variance - W K'' W^T of the visible units positive definite"
        remedy = "make them smaller, or the variance of a layer"
        # NaN is bad data, not a bad argument: it shows in log Z.
        _validate.require(not smallest <= 0, "weights", required, f"the eigenvalue {smallest:.6g}", remedy)

    def _check_domain(self) -> None:
        """Raise where K is infinite at a state: as K is convex, it is enough to look at the extreme tilts."""
        values, _ = _counted(self.visible, self.weights)
        ends = self.weights.detach()[..., None] * torch.stack([values.min(), values.max()])
        extreme = torch.stack([ends.amin(-1).sum(0), ends.amax(-1).sum(0)])
        bad = ~self.hidden.cumulant(extreme).isfinite() & extreme.isfinite()
        required = f"keep every tilt W^T v inside the domain of {self.hidden!r}"
        remedy = "make them smaller, or give the law a soft_barrier if it takes one"
        if bool(bad.any()):
            received = f"a tilt of {float(extreme[bad][0]):.6g}"
            raise ValueError(_validate.message("weights", required, received, remedy))


class _Layer(NamedTuple):
    """A discrete layer: the states of one unit, their log weights, and how many units there are."""

    values: Tensor
    logs: Tensor
    units: int

    @property
    def total(self) -> int:
        return int(len(self.values) ** self.units)


def _blocks(layer: _Layer, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all states of a layer in blocks, (S, units), with their log weights, (S,).

    The tilts of the other layer are at most BLOCK numbers for each block.
    """
    base, device = len(layer.values), weights.device
    size = max(1, BLOCK // max(weights.shape))
    place = base ** torch.arange(layer.units, device=device)
    for start in range(0, layer.total, size):
        number = torch.arange(start, min(start + size, layer.total), device=device)[:, None]
        digits = (number // place) % base
        yield layer.values[digits], layer.logs[digits].sum(-1)


def _counted(units: Units, like: Tensor) -> tuple[Tensor, Tensor]:
    """The values of one discrete unit and the logarithms of their weights, whose mean is 1, (K,) each."""
    values: tuple[float, ...]
    chances: tuple[float, ...]
    if isinstance(units, SignUnits):
        values, chances = (-1.0, 1.0), (0.5, 0.5)
    elif isinstance(units, BernoulliUnits):
        values, chances = (0.0, 1.0), (1 - units.p, units.p)
    elif isinstance(units, ConstantUnits):
        values, chances = (units.value,), (1.0,)
    else:
        assert isinstance(units, DiscreteUnits)
        values = units.values
        total = units.weights or (1.0,) * len(values)
        chances = tuple(w / sum(total) for w in total)
    # `new_tensor` fails for a tensor whose negation torch has postponed.
    tensor = partial(torch.tensor, dtype=like.dtype, device=like.device)
    return tensor(values), tensor([math.log(len(values) * p) for p in chances])
