"""A system of coupled spins in fields, of which free energies are functions."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor, nn
from typing_extensions import Self

from .. import _validate
from .._torch import in_own_precision, is_batched, readable
from ..problem import Declared, TokenOrder, restricted
from . import low_rank
from .bonds import Bonds, Graph
from .low_rank import LowRank
from .methods import listed

#: Couplings as numbers, for all pairs or some.
Couplings: TypeAlias = "Tensor | LowRank | Bonds"
#: Couplings that depend on the field (*batch, N, D), with values (*batch, N, N), (N, N, D, D), a `LowRank` or `Bonds`,
#: and with `mask=` if they have that.
CouplingFunction: TypeAlias = Callable[..., Couplings]

#: Rows of couplings that are read at a time where a part of the matrix stays in the processor's cache.
TILE = 128

#: Up to so many sites couplings on bonds become a tensor where every pair is read: numbers are 32 MB in float64 then,
#: and a factorisation takes less than a second.
ALL_PAIRS = 2_048


class SpinSystem(Declared):
    r"""Spins s_i in R^D of length R with couplings J, in a field h, at inverse temperature beta.

    ```math
    E(s) = -\tfrac12 \sum_{ij} s_i^\top J_{ij}\, s_j - \sum_i h_i \cdot s_i, \qquad
    Z = \langle e^{-\beta E(s)} \rangle, \qquad F = -\frac1\beta \log Z
    ```

    Both orders of a pair are summed, hence the 1/2; a diagonal J_ii counts. D = 1 with radius 1 is the
    Ising model. A sequence of vectors is the field h; a free energy answers it with magnetizations m = -dF/dh.

    Args:
        couplings: J, (N, N) or (*batch, N, N), a number for each pair; (N, N, D, D), a matrix for each pair; the
            `Bonds` of a graph, which a sparse (N, N) becomes; a `LowRank`; or a function of the field, which is
            evaluated once, here. It gets a field that is zero where there is no site, and has to be finite there, with
            its derivatives. If it has an argument `mask`, it also gets which sites exist, boolean, (*batch, N); one
            that normalises over sites, such as a softmax, must use it: a field of zero has a weight, too. (Where N = D
            and the batch ends with (N, N), four axes are couplings per sample.)
        field: h, (*batch, N, D), in units of energy over length; (N,) for N spins of dimension 1.
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        radius: R: "sqrt_dim" is sqrt(D), at which a lone spin answers with beta h to first order whatever D is;
            "bessel" is sqrt(D/2 - 1); or a number > 0.
        measure: the base of partition functions: "uniform", of total weight 1 per site, or, for D = 1, "counting", of
            weight 2, which counts states: F is lower by N log(2)/beta then, and S higher by N log 2, all
            else is the same. The command `magnetize` counts Ising states unless `--measure` says otherwise.
        mask: which sites exist, boolean, broadcasts to (*batch, N). The others change nothing and have m = 0.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; beta <= 0; radius "bessel" with D <= 2;
            "counting" with D > 1.

    Gradients: with respect to field, couplings (through their function to the field as well) and beta.

    Not for dynamics of one trajectory or for clocks and Potts states: use a sampler, or `AdaTAP(prior=...)` for other
    laws.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SpinSystem
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> SpinSystem(couplings, field=torch.zeros(8, 2, 3), beta=0.8)
        SpinSystem(batch (8,), N = 2, D = 3, beta 0.8)
    """

    def __init__(
        self,
        couplings: Couplings | CouplingFunction,
        field: Float[Tensor, "*batch N D"] | Float[Tensor, " N"],
        beta: float | Float[Tensor, "*#batch"] = 1.0,
        *,
        radius: Literal["sqrt_dim", "bessel"] | float = "sqrt_dim",
        measure: Literal["uniform", "counting"] = "uniform",
        mask: Bool[Tensor, "*#batch N"] | None = None,
    ) -> None:
        field = _checked_field(field)
        remedy = "parametrise it, for example by exp"
        beta = _validate.check_per_batch("beta", beta, low=0.0, open_low=True, remedy=remedy)
        _validate.check_fits_batch("beta", beta, "field", field)
        _validate.check_choice("measure", measure, ("uniform", "counting"))
        dim = field.shape[-1]
        remedy = "the count of states is infinite for D > 1; use measure='uniform'"
        _validate.require(measure == "uniform" or dim == 1, "measure", "be 'uniform' for D > 1", measure, remedy)
        if mask is not None:
            check_sites("mask", mask, field, "True = the site exists")
        numbers: Any = couplings
        # Its parameters are not declared: they act through `couplings`, which were computed from them.
        self.coupling_function = None if isinstance(numbers, Tensor | LowRank | Bonds) else _Undeclared(numbers)
        if self.coupling_function is not None:
            numbers = self.coupling_function(field, mask)
        numbers = on_bonds(numbers)
        #: Whether `couplings` are the factors U, (*#batch, N, r), of a `LowRank`.
        self.low_rank = isinstance(numbers, LowRank)
        #: The graph of `Bonds`, whose values are `couplings` then.
        self.graph: Graph | None = numbers.graph if isinstance(numbers, Bonds) else None
        self.couplings = _checked_couplings(numbers, field)
        #: Set by `DynamicalMethod.beside`: couplings to sites whose state is known, (*batch, N, M), and that state.
        self.known_couplings: Tensor | None = None
        self.known_state: Tensor | None = None
        #: Set by causal layers: sites read none behind them, and each is solved for whatever stands there.
        self.token_order: TokenOrder | None = None
        #: Set by `without_nonfinite`, which needs them: sum_j |J_ij| of numbers per pair, (*#batch, N).
        self.row_sums: Tensor | None = None
        self.field = field
        self.beta = beta
        self.mask = mask
        self.radius = _radius(radius, dim)
        self.measure = measure

    @classmethod
    def from_full(
        cls, couplings: Couplings | CouplingFunction, field: Tensor, beta: float | Tensor = 1.0, **options: Any
    ) -> Self:
        """The system of E(s) = -sum_ij s_i^T J_ij s_j - sum_i h_i . s_i, both orders of a pair and no 1/2.

        Args:
            couplings: in that convention; the system has J + J^T.
            field: as in the class.
            beta: as in the class.
            options: radius, measure and mask, as in the class.
        """
        if callable(couplings) and not isinstance(couplings, Tensor):
            function = _Undeclared(couplings)
            return cls(lambda h, mask: _both_orders(function.ask(h, mask), h), field, beta, **options)
        field = _checked_field(field)
        return cls(_both_orders(couplings, field), field, beta, **options)

    def __repr__(self) -> str:
        beta = f"{self.beta:g}" if not isinstance(self.beta, Tensor) else f"of shape {tuple(self.beta.shape)}"
        states = ", states counted" if self.measure == "counting" else ""
        return f"SpinSystem(batch {tuple(self.batch)}, N = {self.num_sites}, D = {self.dim}, beta {beta}{states})"

    # What the methods read.

    @property
    def num_sites(self) -> int:
        return self.field.shape[-2]

    @property
    def dim(self) -> int:
        return self.field.shape[-1]

    @property
    def batch(self) -> torch.Size:
        return self.field.shape[:-2]

    @property
    def pair_axes(self) -> int:
        """The number of axes of `couplings` that belong to one sample: 4 for matrices, else 2; on bonds one less
        unless they are directed."""
        if self.graph is not None:
            return self.graph.value_axes
        return 4 if not self.low_rank and _is_block(self.couplings, self.field) else 2

    @property
    def block(self) -> bool:
        """Whether every pair is coupled by a matrix with more than one entry."""
        return self.dim > 1 and self.pair_axes > 2

    @property
    def live_field(self) -> Tensor:
        """h, zero where there is no site."""
        return self.field if self.mask is None else self.field.masked_fill(~self.mask[..., None], 0.0)

    @property
    def live_factors(self) -> Tensor:
        """U of low-rank couplings, zero where there is no site."""
        return self.couplings if self.mask is None else self.couplings.masked_fill(~self.mask[..., None], 0.0)

    @property
    def live_couplings(self) -> Tensor:
        """J, zero where there is no site; numbers, (*#batch, N, N), where D = 1."""
        self.check_dense("where every pair is read")
        if self.graph is not None:
            return self.graph.dense(self.live_numbers, 2 if self.block else 0)
        couplings = self.couplings[..., 0, 0] if self.dim == 1 and self.pair_axes == 4 else self.couplings
        if self.mask is None:
            return couplings
        absent = ~(self.mask[..., :, None] & self.mask[..., None, :])
        return couplings.masked_fill(absent[..., None, None] if self.block else absent, 0.0)

    @property
    def live_numbers(self) -> Tensor:
        """`live_couplings`, or the values of bonds, zero where an end is no site; numbers where D = 1."""
        if self.graph is None:
            return self.live_couplings
        values = self.couplings[..., 0, 0] if self.dim == 1 and self.graph.value_ndim else self.couplings
        if self.mask is None:
            return values
        ends = self.graph.at_ends(self.mask.expand(*self.mask.shape[:-1], self.num_sites))
        absent = ~ends.all(-2, keepdim=self.graph.directed)
        return values.masked_fill(absent[..., None, None] if self.block else absent, 0.0)

    @property
    def live_pairs(self) -> Tensor:
        """J_ij and J_ji of all pairs that are coupled: `live_couplings`, or, on bonds, `Graph.both` of their values."""
        return self.live_couplings if self.graph is None else self.graph.both(self.live_numbers, block=self.block)

    def check_dense(self, where: str, instead: str = "") -> None:
        """Raise unless there is a tensor of all pairs, or small enough a one of the bonds of a graph."""
        if self.low_rank:
            remedy = "use LowRank(...).dense()" + (f", or {instead}" if instead else "")
            _validate.refuse("couplings", f"be a tensor {where}", "a LowRank", remedy)
        if self.graph is not None and self.num_sites > ALL_PAIRS:
            size = self.couplings.element_size() * (self.num_sites * (self.dim if self.block else 1)) ** 2 / 1e9
            received = f"Bonds of {self.num_sites:,} sites, which are {size:.2g} GB as a tensor"
            required, remedy = f"have at most {ALL_PAIRS:,} sites {where}", f"use {instead or 'MeanField()'}"
            _validate.refuse("couplings", required, received, remedy)

    @property
    def flat_couplings(self) -> Tensor:
        """`live_couplings` as one matrix: matrices of pairs as (*#batch, N D, N D), numbers as they are."""
        couplings = self.live_couplings
        return couplings.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1) if self.block else couplings

    def beta_over(self, axes: int) -> float | Tensor:
        """Beta, shaped to multiply tensors with so many axes after the batch; NaN where a tensor has left its range."""
        if not isinstance(self.beta, Tensor):
            return self.beta
        beta = _validate.inside(self.beta, low=0.0, open_low=True)
        return beta[(..., *(None,) * axes)]

    def beta_tensor(self, axes: int = 0) -> Tensor:
        """`beta_over(axes)` as a tensor of the field's dtype and device."""
        return torch.as_tensor(self.beta_over(axes), dtype=self.field.dtype, device=self.field.device)

    def coupled(self, m: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """sum_j J_ij m_j, the field of the other sites."""
        if self.low_rank:
            return low_rank.product(self.live_factors, m)
        return couple(self.live_pairs, m, block=self.block, graph=self.graph)

    def coupled_squares(self, v: Float[Tensor, "*batch N 1"]) -> Float[Tensor, "*batch N 1"]:
        """sum_j J_ij^2 v_j, for a number per pair."""
        if self.low_rank:
            return low_rank.product_of_squares(self.live_factors, v)
        if self.graph is not None:
            return self.graph.pair_product(self.live_pairs, v, squares=True)
        # Rows by rows, whose squares stay in the processor's cache.
        return torch.cat([rows.square() @ v for rows in torch.split(self.live_couplings, TILE, -2)], -2)

    def base_measure(self) -> Tensor:
        """Log of the total weight of all states, (*batch)."""
        if self.mask is None:
            sites = self.field.new_full(self.batch, float(self.num_sites))
        else:
            sites = self.mask.expand(self.field.shape[:-1]).sum(-1).to(self.field.dtype)
        return sites * math.log(2.0) if self.measure == "counting" else torch.zeros_like(sites)

    def at(self, field: Tensor, couplings: Tensor, beta: float | Tensor) -> Self:
        """The same system with other numbers; couplings do not follow the field."""
        clone = copy.copy(self)
        clone.field, clone.couplings, clone.beta = field, couplings, beta
        clone.row_sums = None
        return clone

    def wide(self) -> Self:
        """The same numbers in float64, but on a device that has none."""
        return self.at(wide(self.field), wide(self.couplings), wide(self.beta_tensor()))

    def select(self, index: Tensor) -> Self:
        """The samples `index` (*batch[:-1], K) of the last axis of the batch; couplings do not follow the field."""
        axes = {"couplings": self.pair_axes, "beta": 0, "row_sums": 1, "known_couplings": 2, "known_state": 2}
        clone = restricted(self, index, field=2, mask=1, **axes)
        clone.graph = None if self.graph is None else self.graph.select(index)
        return clone

    def asymmetric(self) -> Bool[Tensor, "*batch"]:
        """Return the samples in which J_ij differs from J_ji^T beyond rounding."""
        if self.low_rank or self.couplings.numel() == 0:
            return torch.zeros(self.batch, dtype=torch.bool, device=self.field.device)
        return (self._asymmetry() > 0).expand(self.batch)

    def check_symmetric(self, method: str, *, wait: bool = False) -> None:
        """Raise unless J_ij = J_ji^T, where the host can look without waiting, or where it may wait.

        Directed bonds are refused whatever their numbers are.
        """
        if self.low_rank or not (self.graph is None or self.graph.directed):
            return
        numbers = readable(self.couplings, wait=wait)
        plain = self.pair_axes == 2 and not is_batched(self.couplings)
        if numbers is not None and plain and _equal_to_mirror(numbers):
            # One pass where they were symmetrised.
            return
        apart = None if numbers is None or self.graph is not None else readable(self._asymmetry(), wait=wait)
        if self.graph is not None or (apart is not None and bool((apart > 0).any())):
            required = f"be symmetric (J_ij = J_ji^T) for {method}"
            received = "directed Bonds" if apart is None else f"a difference of {float(apart.amax()):.1e}"
            others = listed(lambda kind: not kind.symmetric)
            remedy = f"symmetrise them, or use {others} for the dynamics of asymmetric couplings"
            raise ValueError(_validate.message("couplings", required, received, remedy))

    def _asymmetry(self) -> Tensor:
        """The largest |J_ij - J_ji^T| of every set of couplings; 0 where it is rounding, or no number."""
        couplings, axes = self.live_pairs.detach(), (-4, -3, -2, -1) if self.block else (-2, -1)
        twin = mirrored(couplings, block=self.block, graph=self.graph)
        apart = (couplings - twin).abs().nan_to_num(0.0, 0.0).amax(axes)
        rounding = 64 * torch.finfo(apart.dtype).eps * couplings.abs().nan_to_num().amax(axes)
        return torch.where(apart > rounding, apart, 0.0)


class _Undeclared:
    """A function that makes couplings. Its tensors are not declared, as `couplings` depend on them."""

    def __init__(self, function: CouplingFunction | nn.Module) -> None:
        if not callable(function):
            required = "be a tensor or a function of the field"
            graph = hasattr(function, "tocoo") or hasattr(function, "is_directed")
            remedy = "pass Bonds.of(couplings)" if graph else ""
            raise TypeError(_validate.message("couplings", required, type(function).__name__, remedy))
        self.function = function
        try:
            signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        except (TypeError, ValueError):  # a function that is not written in Python
            signature = inspect.Signature()
        named = signature.parameters.get("mask")
        self.masked = named is not None and named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY)

    @in_own_precision
    def __call__(self, field: Tensor, mask: Tensor | None) -> Couplings:
        """J of the field, which is zero where there is no site."""
        if mask is None:
            return self.ask(field, torch.ones_like(field[..., 0], dtype=torch.bool) if self.masked else None)
        return self.ask(field.masked_fill(~mask[..., None], 0.0), mask.expand(field.shape[:-1]))

    @in_own_precision
    def ask(self, field: Tensor, mask: Tensor | None) -> Couplings:
        """The function of the field, and of `mask` if it has that argument."""
        return on_bonds(self.function(field, mask=mask) if self.masked else self.function(field))


def wide(tensor: Tensor) -> Tensor:
    """In float64, but on a device that has none."""
    return tensor if tensor.device.type == "mps" else tensor.double()


def couple(couplings: Tensor, m: Tensor, *, block: bool, graph: Graph | None = None) -> Tensor:
    """sum_j J_ij m_j, (*batch, N, D); of a graph couplings are those of both directions, `SpinSystem.live_pairs`."""
    if graph is not None:
        return graph.pair_product(couplings, m, block=block)
    if block:
        return einsum(couplings, m, "... i j a b, ... j b -> ... i a")
    if couplings.ndim == m.ndim:
        return couplings @ m
    # Couplings that samples share are one matrix for the columns of all.
    return einsum(couplings, m, "... i j, ... j d -> ... i d")


def mirrored(couplings: Tensor, *, block: bool, graph: Graph | None = None) -> Tensor:
    """J_ji^T in the place of J_ij; of a graph couplings are those of both directions, `SpinSystem.live_pairs`."""
    if graph is not None:
        return couplings.flip(-4).mT if block else couplings.flip(-2)
    return (couplings.transpose(-4, -3) if block else couplings).mT


def _equal_to_mirror(matrices: Tensor) -> bool:
    """Whether J_ij = J_ji to the bit, by one look at each pair."""
    starts = range(0, matrices.shape[-1], TILE)
    return all(torch.equal(matrices[..., i : i + TILE, i:], matrices[..., i:, i : i + TILE].mT) for i in starts)


def check_sites(argument: str, value: Any, field: Tensor, meaning: str) -> None:
    """Raise unless `value` is a boolean tensor that broadcasts to the sites of `field`."""
    _validate.check_boolean(argument, value, f"be boolean, {meaning}")
    _validate.check_same_kind([("field", field), (argument, value)])
    _validate.check_broadcast(argument, value.shape, field.shape[:-1], "(*batch, N)")


def _is_block(couplings: Tensor, field: Tensor) -> bool:
    """Whether couplings are (N, N, D, D); where N = D that could also be (*batch, N, N), which then goes first."""
    n, d = field.shape[-2:]
    per_sample = n == d and field.shape[:-2][-2:] == (n, n)
    return couplings.shape[-4:] == (n, n, d, d) and not per_sample


def _checked_field(field: Tensor) -> Tensor:
    """The field (*batch, N, D); numbers alone, (N,), are those of spins of dimension 1."""
    _validate.check_float_tensor("field", field, min_ndim=1)
    _validate.check_numbers("field", field)
    sites = field[:, None] if field.ndim == 1 else field
    fits = min(sites.shape[-2:]) > 0
    _validate.require(fits, "field", "have at least one site and one dimension", f"shape {tuple(field.shape)}")
    return sites


def on_bonds(couplings: Any) -> Couplings:
    """The couplings, of which a sparse tensor becomes `Bonds`."""
    sparse = isinstance(couplings, Tensor) and couplings.layout != torch.strided and not couplings.is_nested
    found: Couplings = Bonds.of(couplings) if sparse else couplings
    return found


def kept(couplings: Couplings) -> Tensor:
    """The tensor that a system keeps of couplings."""
    if isinstance(couplings, Bonds):
        return couplings.values
    return couplings.factors if isinstance(couplings, LowRank) else couplings


def _checked_couplings(couplings: Couplings, field: Tensor) -> Tensor:
    n, d = field.shape[-2:]
    if isinstance(couplings, Bonds):
        values, sites = couplings.values, couplings.num_sites
        _validate.check_same_kind([("field", field), ("couplings", values)])
        _validate.require(sites == n, "couplings", f"be between N = {n} sites, those of `field`", f"N = {sites}")
        graph = couplings.graph
        lead, of_one = values.shape[: -graph.value_axes], values.shape[values.ndim - graph.value_ndim :]
        required = f"have a number or a ({d}, {d}) matrix for each bond"
        received = f"values of shape {tuple(values.shape)}"
        remedy = "for numbers of samples expand the pairs to (*batch, E, 2)" if of_one and d != of_one[0] else ""
        _validate.require(of_one in ((), (d, d)), "couplings", required, received, remedy)
        for axes in (lead, graph.ends.shape[:-2]):
            _validate.check_broadcast("couplings", axes, field.shape[:-2], "the leading axes of `field`")
        return values
    if isinstance(couplings, LowRank):
        factors = kept(couplings)
        _validate.check_same_kind([("field", field), ("couplings", factors)])
        required = f"have factors of shape (N, r) with N = {n}, or (*batch, N, r)"
        _validate.require(factors.shape[-2] == n, "couplings", required, f"shape {tuple(factors.shape)}")
        _validate.check_broadcast("couplings", factors.shape[:-2], field.shape[:-2], "the leading axes of `field`")
        return factors
    _validate.check_float_tensor("couplings", couplings, min_ndim=2)
    _validate.check_same_kind([("field", field), ("couplings", couplings)])
    if not _is_block(couplings, field):
        required = f"have shape (N, N) = {(n, n)}, (*batch, N, N) or (N, N, D, D) = {(n, n, d, d)}"
        received = f"shape {tuple(couplings.shape)}"
        _validate.require(couplings.shape[-2:] == (n, n), "couplings", required, received)
        _validate.check_broadcast("couplings", couplings.shape[:-2], field.shape[:-2], "the leading axes of `field`")
    return couplings


def _both_orders(couplings: Any, field: Tensor) -> Couplings:
    couplings = on_bonds(couplings)
    if isinstance(couplings, Bonds):
        return couplings.both_orders()
    if isinstance(couplings, LowRank):
        return LowRank(math.sqrt(2.0) * couplings.factors)
    numbers = _checked_couplings(couplings, field)
    return numbers + mirrored(numbers, block=_is_block(numbers, field))


def _radius(radius: str | float, dim: int) -> float:
    if isinstance(radius, str):
        _validate.check_choice("radius", radius, ("sqrt_dim", "bessel"))
        if radius == "sqrt_dim":
            return math.sqrt(dim)
        remedy = "use radius='sqrt_dim' or a number"
        _validate.require(dim > 2, "radius", "be 'sqrt_dim' or a number for D <= 2", f"'bessel' with D = {dim}", remedy)
        return math.sqrt(dim / 2 - 1)
    return float(_validate.check_number("radius", radius, low=0.0, open_low=True))
