"""The log-sum-exp potential whose keys are spread over processes."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, distributed
from typing_extensions import Self

from .. import _validate
from .._torch import HALF, at_least_single, exact_precision, is_differentiated, is_plain, transforms_active, uncompiled
from ..adjoints import Adjoint, Reversible, Unrolled
from ..failure import UnsupportedImplementation
from ..potentials import CovarianceMap, LogSumExp, Potential
from ..potentials._attention import row_block
from ..problem import pick
from ..solvers import Solver
from .derivatives import Attend, by_beta, by_tensors, undifferentiated
from .local_keys import LocalWeights, read_local
from .lock_step import LockStep, described

# Sums of weights outside exp(-RANGE) .. exp(RANGE) lose digits or overflow.
RANGE = {torch.float32: 60.0, torch.float64: 600.0}


class ShardedLogSumExp(Potential):
    """Phi(z) = (1/beta) log sum_j exp(beta <k_j, z> + bias_j) over the keys of all processes of a group.

    Every process holds some of the keys, (*batch, M_r, D) with any M_r >= 0, and the same queries. It is `LogSumExp`
    over all keys one after the other: values, means, states and numbers of evaluations are those of one process up to
    rounding, and bit for bit the same in all processes.

    An evaluation is one sum over the processes of D + 2 numbers a query and 4 more: exp(l - s) mean and exp(l - s) of
    the local keys with their log-sum-exp l, for a shift s that is the last known log-sum-exp of all. The first
    evaluation of a solve needs the largest l of each query before, and one whose l has moved by more than 60 (float32)
    or 600 (float64) a second sum, to the scale that is known from the first; by thousands, both. A product with the
    covariance is one sum of D numbers a query. Making the potential, and starting a solve, compare 4 numbers each.

    Args:
        keys: the local keys, (*batch, M_r, D); a process without keys passes M_r = 0.
        beta: inverse temperature > 0, the same in all processes, a float or a tensor that broadcasts to *batch.
        group: a group of torch.distributed that holds this process; None is the default group.
        mask: boolean, of the local keys, broadcasts to (*batch, N, M_r); True = the query attends to the key.
        bias: added to the scores of the local keys, broadcasts to (*batch, N, M_r); -inf masks.

    A query that attends to no key of any process has value 0 and mean 0. A NaN in a key makes NaN of the queries that
    attend to it, in all processes.

    Every call is one of all processes of the group together, in the same order: construction, evaluations, `solve`, and
    backward passes. What differs between them where it must not (shapes, dtypes, beta, queries, solver, on_failure)
    raises in all.

    Raises:
        TypeError, ValueError: as `LogSumExp`. LockStepError: the processes differ, or one of them has ended.
        UnsupportedImplementation: derivatives beyond the first, forward mode, torch.func, dropout, and the adjoints
            `Unrolled` and `Reversible`.

    Gradients: with respect to z, keys, values that are read out, beta and bias, of first order (`Implicit`, `OneStep`
    and `Phantom` in solves). They are those of a loss that every process computes from what it has in common with the
    others, not of the sum of these losses: the backward of the sum over processes is the identity. Each process gets
    the gradient of its own keys, values and bias, for which nothing is sent, and all get the whole gradient of z and
    beta: do not average these over processes again.

    Not for keys that fit into one process: use `LogSumExp`. Not for keys of the same query in each process (data or
    heads that are spread): each process solves for its own there, without this. Not for keys that a layer projects from
    local tokens, unless the gradients of its weights are then summed over the processes. Not for causal attention,
    which counts tokens: use `sequence_parallel`.

    Examples:
        >>> import tempfile, torch
        >>> from torch import distributed
        >>> from implicit_attention import AnchoredEnergy, solve
        >>> from implicit_attention.distributed import ShardedLogSumExp
        >>> meeting = f"file://{tempfile.mkdtemp()}/meeting"
        >>> distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        >>> phi = ShardedLogSumExp(torch.eye(3), beta=4.0, group=None)
        >>> query = torch.tensor([[1.0, 0.2, 0.0]])
        >>> solve(AnchoredEnergy(phi, query, anchor=0.5), query).value.round(decimals=2)
        tensor([[0.9700, 0.1200, 0.0100]])
        >>> distributed.destroy_process_group()
    """

    convex = True
    declares_all = True
    #: Its keys are not all keys, in the order of the tokens: attention refuses to be causal over them.
    keys_are_spread = True

    def __init__(
        self,
        keys: Float[Tensor, "*batch M D"],
        beta: float | Float[Tensor, "*#batch"],
        *,
        group: distributed.ProcessGroup | None,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        self._steps = LockStep(group)
        # The log-sum-exp of the last evaluation over all keys, equal in all processes; shared by shallow copies.
        self._last = SimpleNamespace(logsumexp=None)
        # Whether the start of a solve was compared, and whether this object is evaluated inside of one.
        self._compared = self._solving = False
        self._empty = isinstance(keys, Tensor) and keys.ndim >= 2 and keys.shape[-2] == 0
        device = keys.device if isinstance(keys, Tensor) else torch.device("cpu")
        try:
            make = _with_a_key if self._empty else LogSumExp
            self.local = make(keys, beta, mask=mask, bias=bias)
        except (TypeError, ValueError) as error:
            self._steps.compare({"arguments": f"{type(error).__name__}: {error}"}, device)
            raise
        keys = self.local.keys
        text = f"leading axes {tuple(keys.shape[:-2])}, dimension {keys.shape[-1]}, {keys.dtype}"
        self._steps.compare({"arguments": "fit", "keys": text, "beta": described(self.local.beta)}, device)

    @property
    def keys(self) -> Tensor:
        """The local keys, (*batch, M_r, D)."""
        return self.local.keys[..., :0, :] if self._empty else self.local.keys

    @property
    def beta(self) -> float | Tensor:
        """The inverse temperature."""
        return self.local.beta

    @property
    def row_block(self) -> int:  # type: ignore[override]
        # The same in all processes, however many keys each holds.
        keys = self.local.keys
        return row_block(keys.shape[-1], 1, keys.dtype)

    def value(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self.evaluate(z)[0]

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """Softmax attention of z over the keys of all processes, (*batch, N, D) -> (*batch, N, D)."""
        return self._attended(z, None)[0]

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        mean, logsumexp = self._attended(z, None)
        return logsumexp.where(logsumexp != -torch.inf, 0.0) / self.local._row_scale, mean

    def readout(
        self, z: Float[Tensor, "*batch N D"], values: Float[Tensor, "*#batch M E"], *, dropout_p: float = 0.0
    ) -> Float[Tensor, "*batch N E"]:
        """Attention of z over the keys of all processes, read out in values that lie beside the keys.

        Args:
            z: queries or states, (*batch, N, D).
            values: one for each local key, (*batch, M_r, E); leading axes broadcast to those of z, as the keys' do.
            dropout_p: 0; each process would drop weights of its own.
        """
        if dropout_p != 0:
            required = "be 0 where keys are spread over processes, each of which would drop weights of its own"
            raise UnsupportedImplementation(_validate.message("dropout_p", required, dropout_p))
        return self._attended(z, values)[0]

    def readout_with_logsumexp(
        self, z: Float[Tensor, "*batch N D"], values: Float[Tensor, "*#batch M E"]
    ) -> tuple[Float[Tensor, "*batch N E"], Float[Tensor, "*batch N"]]:
        """`readout`, and log sum_j exp(s_j + bias_j) over all keys, -inf for a query that attends to no key."""
        return self._attended(z, values)

    def probabilities(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N M"]:
        """The attention weights of the local keys, (*batch, N, M_r), which sum to 1 over all processes; no gradient."""
        single, wide = self._single(), at_least_single(z)
        with torch.no_grad(), exact_precision(z):
            weights = single._weights(wide)[0].probabilities()
        weights = weights[..., :0] if self._empty else weights
        return undifferentiated(weights.to(z.dtype), "`probabilities`", z, *self.tensors())

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess Phi(z) v, per row; without a derivative."""
        single, wide, along = self._single(), at_least_single(z), at_least_single(v)
        with exact_precision(z):
            product = single.linearize(wide.detach()).product(along.detach())
        return undifferentiated(product.to(z.dtype), "`covariance_product`", z, v, *self.tensors())

    @torch.no_grad()
    def linearize(self, z: Tensor) -> CovarianceMap:
        weights, mean = self._weights(z)
        local = weights.local

        def summed(v: Tensor) -> Tensor:
            return self._steps.sum("product with the covariance", v, weights.spread(mean, v))[0]

        def product(v: Tensor) -> Tensor:
            return local._scale * summed(v)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            _, by_keys, _, by_bias = weights.gradients(mean, u, None, by_states=False)
            by_temperature = by_beta(summed(u), z, local.beta) if isinstance(local.beta, Tensor) else None
            return by_tensors(local, by_keys, by_temperature, by_bias)

        return CovarianceMap(product, pullback)

    def bounded_below(self, scale: float) -> bool:
        """Always: Phi grows no faster than |z| times the length of the longest key."""
        return True

    def select(self, index: Tensor) -> Self | None:
        local = self.local.select(index)
        if local is None or type(self) is not ShardedLogSumExp:
            return None
        clone = copy.copy(self)
        clone.local = local
        last = self._last.logsumexp
        clone._last = SimpleNamespace(logsumexp=None if last is None or last.ndim != index.ndim else pick(last, index))
        return clone

    def check_state(self, argument: str, z: Tensor) -> None:
        try:
            self.local.check_state(argument, z)
        except (TypeError, ValueError) as error:
            # The others, whose state may fit, compare something else next, and learn of it.
            self._compare({argument: _shape(z) + f", {type(error).__name__}"})
            raise

    def check_start(self, given: dict[str, Any], solver: Solver, adjoint: Adjoint) -> None:
        _refuse_transforms()
        tensors = [t for t in given.values() if isinstance(t, Tensor)]
        recorded = is_differentiated(*tensors, *self.tensors())
        arguments = {**given, "solver": solver, "adjoint": adjoint, "requires_grad of any tensor": recorded}
        self._compare({name: described(value) for name, value in arguments.items()})
        if recorded and isinstance(adjoint, Unrolled | Reversible):
            required = f"not be {type(adjoint).__name__}() where keys are spread over processes"
            remedy = "use Implicit() with a tolerance, Phantom() or OneStep(), or solve under torch.no_grad()"
            raise UnsupportedImplementation(_validate.message("adjoint", required, repr(adjoint), remedy))
        self._compared = True

    # Parts.

    def _mapped(self, *args: Any) -> Self:
        clone = super()._mapped(*args)
        clone._last = SimpleNamespace(logsumexp=None)
        # A solve evaluates such copies of the potential that was compared at its start.
        clone._solving = self._compared
        return clone

    def _single(self) -> Self:
        """This potential, in float32 where its tensors are in half precision."""
        half = self.local.keys.dtype in HALF
        return self.replace(*map(at_least_single, self.tensors())) if half else self

    def _compare(self, values: dict[str, str]) -> None:
        self._steps.compare(values, self.local.keys.device)

    @uncompiled
    def _attended(self, z: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """The read-out of the values (None: keys) over all processes, and the log-sum-exp, -inf without any key."""
        _refuse_transforms()
        if not self._solving:
            named = (("z", z), ("beta", self.local.beta))
            grads = ", ".join(name for name, t in named if isinstance(t, Tensor) and is_differentiated(t)) or "none"
            read = f"read out in {'keys' if values is None else f'values of width {values.shape[-1]}, {values.dtype}'}"
            call = {"operation": f"attention, {read}", "z": _shape(z), "tensors that require grad": grads}
            self._compare(call)
        if values is not None and self._empty:
            values = F.pad(values[..., :0, :], (0, 0, 0, 1))
        self.local.check_state("z", z)
        if values is not None:
            self.local._check_readout(z, values, 0.0)
        single, wide, values = self._single(), at_least_single(z), at_least_single(values)
        with exact_precision(z):
            if is_plain(wide, *single.tensors(), *(() if values is None else (values,))):
                out, logsumexp = single._merged(wide, values)
            else:
                out, logsumexp = Attend.apply(single, wide, values, *single.tensors())  # type: ignore[no-untyped-call]
        return out.to(z.dtype), logsumexp.to(z.dtype)

    def _merged(self, z: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_attended` in the precision of the sums, without graph."""
        out, own = read_local(self.local, z, values)
        # Scores that overflow have no weights.
        own = own.where(own != torch.inf, torch.nan)
        last, limit = self._last.logsumexp, RANGE[z.dtype]
        if last is None or last.shape != own.shape:
            last = self._largest(own)
        shift = last.nan_to_num(0.0, 0.0, 0.0)
        # So flat that the largest of all l is known to RANGE from the sum of these exponentials.
        flatness = limit / (2 * math.log(max(self._steps.size, 2)))
        total, weight, coarse = self._sum(z, out, own, shift, flatness)
        moved = weight.log()
        lost = ~(moved.abs() <= limit)
        if bool(lost.any()):
            lost &= ~(moved.isnan() | ((last == -torch.inf) & (weight == 0)))
            if bool(lost.any()):
                coarse = shift + flatness * coarse.log()
                known = bool((coarse.isfinite() | ~lost).all())
                shift = coarse.where(lost, shift) if known else self._largest(own).nan_to_num(0.0, 0.0, 0.0)
                total, weight, _ = self._sum(z, out, own, shift, flatness)
                moved = weight.log()
            weight = weight.where(weight != 0, 1.0)
        self._last.logsumexp = logsumexp = shift + moved
        return total / weight[..., None], logsumexp

    def _largest(self, own: Tensor) -> Tensor:
        return self._steps.maximum(own.nan_to_num(-torch.inf, torch.inf, -torch.inf))

    def _sum(self, z: Tensor, out: Tensor, own: Tensor, shift: Tensor, flatness: float) -> list[Tensor]:
        """Over all processes: the read-out times its weight, the weight exp(own - shift), and a flat weight."""
        above = own - shift
        weight = above.exp()
        return self._steps.sum("evaluation", z, out * weight[..., None], weight, (above / flatness).exp())

    def _weights(self, z: Tensor) -> tuple[LocalWeights, Tensor]:
        """The weights of the local keys at z, and the mean over all."""
        self._compare({"operation": "linearisation", "z": _shape(z)})
        mean, logsumexp = self._attended(z, None)
        return LocalWeights(self.local, z, None, logsumexp), mean


def _refuse_transforms() -> None:
    if transforms_active():
        raise UnsupportedImplementation(
            "ShardedLogSumExp cannot be evaluated inside torch.func (grad, vjp, jvp, vmap), in forward mode, or for "
            "second derivatives (create_graph=True): keys that are spread over processes have gradients of first order "
            "by backward() alone; use LogSumExp in one process"
        )


def _with_a_key(keys: Tensor, beta: float | Tensor, *, mask: Tensor | None, bias: Tensor | None) -> LogSumExp:
    """Return for no keys the potential of one key that no query attends to."""
    if mask is not None:
        mask = F.pad(mask[..., :0], (0, 1), value=False)
    if bias is not None:
        bias = F.pad(bias[..., :0], (0, 1), value=-torch.inf)
    if mask is None and bias is None:
        mask = torch.zeros(1, dtype=torch.bool, device=keys.device)
    return LogSumExp(F.pad(keys, (0, 0, 0, 1)), beta, mask=mask, bias=bias)


def _shape(z: Any) -> str:
    return f"shape {tuple(z.shape)}, {z.dtype}" if isinstance(z, Tensor) else type(z).__name__
