"""Couplings on the bonds of a graph, of which no N x N matrix is made: their numbers, and sums over bonds."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import is_differentiated, unobserved
from ..problem import Declared, restricted

#: Fewer bonds are gathered and scattered in less time than it takes to make a matrix.
SHORT = 4096


class Graph(Declared):
    """The bonds between sites, each once, as an operator on numbers of sites and of bonds.

    Numbers of a bond's two directions are (*lead, 2, E): the first is of what site i of a pair (i, j) has or gets.

    Args:
        ends: i and j of each bond, (*#batch, 2, E).
        num_sites: N.
        loops: whether a bond may join a site to itself.
        value_ndim: the number of axes of the value of one bond: 0, or 2 for a matrix.
    """

    def __init__(self, ends: Int[Tensor, "*batch 2 E"], num_sites: int, loops: bool, value_ndim: int = 0) -> None:
        self.ends = ends
        self.num_sites = num_sites
        self.loops = loops
        self.value_ndim = value_ndim
        self._rows: _Rows | None = None

    @property
    def num_bonds(self) -> int:
        return self.ends.shape[-1]

    def own(self) -> Tensor:
        """(*#batch, E), which bonds join a site to itself."""
        return self.ends[..., 0, :] == self.ends[..., 1, :]

    def at_ends(self, x: Tensor) -> Tensor:
        """Numbers of sites (*batch, N) at both ends of each bond, (*batch, 2, E)."""
        flat = self.ends.flatten(-2)
        # Where samples share the graph they share the index.
        if flat.ndim == 1:
            found = x.index_select(-1, flat)
        else:
            lead = _common(x.shape[:-1], flat.shape[:-1])
            found = x.expand(*lead, -1).gather(-1, flat.expand(*lead, -1))
        return found.unflatten(-1, self.ends.shape[-2:])  # type: ignore[no-any-return, no-untyped-call]

    def sums(self, y: Tensor) -> Tensor:
        """The sum of what each site gets from its bonds, (*batch, 2, E) -> (*batch, N)."""
        y, flat = y.flatten(-2), self.ends.flatten(-2)
        y = y.expand(*_common(y.shape[:-1], flat.shape[:-1]), -1)
        return y.new_zeros(*y.shape[:-1], self.num_sites).scatter_add(-1, flat.expand(y.shape), y)

    def product(self, values: Tensor, m: Float[Tensor, "*batch N D"], *, block: bool = False) -> Tensor:
        """sum_j J_ij m_j, (*batch, N, D), for numbers (*#batch, E) or matrices (*#batch, E, D, D) of bonds."""
        if not block and (by_rows := self._by_rows(values, m)) is not None:
            return by_rows
        if self.loops:
            # Both directions of a loop are the same.
            own = self.own()
            values = torch.where(own[..., None, None] if block else own, values / 2, values)
        vectors = self._of_components()
        here, there = vectors.at_ends(m.mT).unbind(-2)
        if block:
            got = [(j @ x.mT[..., None])[..., 0].mT for j, x in ((values, there), (values.mT, here))]
        else:
            got = [values[..., None, :] * x for x in (there, here)]
        return vectors.sums(torch.stack(got, -2)).mT

    def dense(self, values: Tensor, value_ndim: int = 0) -> Tensor:
        """The matrix of values of bonds, (*batch, N, N) or (*batch, N, N, D, D)."""
        n, (lead, of_one) = self.num_sites, _axes(self.ends, values, value_ndim)
        if self.loops:
            # Both directions of a loop are one entry.
            values = torch.where(_along(self.own(), of_one), values / 2, values)
        (i, j), axis = self.ends.unbind(-2), -1 - len(of_one)
        numbers = torch.cat([values, values.mT if of_one else values], axis).expand(*lead, -1, *of_one)
        places = _along(torch.cat([i * n + j, j * n + i], -1), of_one).expand(numbers.shape)
        flat = numbers.new_zeros(*lead, n * n, *of_one).scatter_add(axis, places, numbers)
        return flat.unflatten(axis, (n, n))  # type: ignore[no-any-return, no-untyped-call]

    def overlap(self, x: Tensor) -> Tensor:
        """x_i . x_j of the two ends of each bond, (*batch, N, D) -> (*batch, E)."""
        here, there = self._of_components().at_ends(x.mT).unbind(-2)
        return (here * there).sum(-2)

    def without_loops(self, values: Tensor) -> Tensor:
        """Numbers of bonds, 0 for those that join a site to itself."""
        return values.masked_fill(self.own(), 0.0) if self.loops else values

    def sums_of(self, values: Tensor) -> Tensor:
        """sum_j J_ij of numbers of bonds, (*#batch, E) -> (*#batch, N)."""
        return self.product(values, values.new_ones(*values.shape[:-1], self.num_sites, 1))[..., 0]

    def _by_rows(self, values: Tensor, m: Tensor) -> Tensor | None:
        """The product by `_Rows`; None where it may be differentiated, or is too short to pay."""
        pays = values.is_cuda or (values.is_cpu and torch._C.has_mkl)
        if not pays or values.numel() < SHORT or not unobserved() or is_differentiated(values, m):
            return None
        batch = _common(values.shape[:-1], self.ends.shape[:-2])
        if batch and batch != m.shape[:-2]:
            return None
        if self._rows is None or self._rows.batch != batch or not _same(self._rows.source, self.ends):
            self._rows = _Rows(self.ends, self.num_sites, batch)
        matrix = self._rows.matrix(values, self.own() if self.loops else None)
        if batch:
            return (matrix @ m.flatten(0, -2)).reshape(m.shape)
        return (matrix @ m.movedim(-2, 0).flatten(1)).reshape(-1, *m.shape[:-2], m.shape[-1]).movedim(0, -2)

    def _of_components(self) -> Graph:
        """The graph of (*batch, D, N), the numbers of all components."""
        return self if self.ends.ndim == 2 else Graph(self.ends[..., None, :, :], self.num_sites, self.loops)

    def select(self, index: Tensor) -> Self:
        return restricted(self, index, ends=2)


class _Rows:
    """The matrix of a graph by rows, all samples in one, for products without derivatives.

    It takes a fifth of the time of gathering and scattering, and is made once for all copies of a graph and, in turn,
    for all products with the same values. It is no tensor that a problem declares.
    """

    def __init__(self, ends: Tensor, num_sites: int, batch: torch.Size) -> None:
        self.source, self.batch = (ends.detach(), ends._version), batch
        self.sites, count = batch.numel() * num_sites, ends.shape[-1]
        kind = torch.int32 if max(self.sites, 2 * batch.numel() * count) < 2**31 else torch.int64
        first = torch.arange(0, self.sites, num_sites, dtype=kind, device=ends.device)[:, None, None]
        ends = ends.to(kind).expand(*batch, 2, -1).reshape(-1, 2, count) + first
        rows, order = ends.flatten().sort(stable=True)
        self.columns = ends.flip(-2).flatten()[order]
        # The bond of each entry: those of sample b are (b, 0, bond) and (b, 1, bond).
        self.bonds = order // (2 * count) * count + order % count
        self.begins = torch.searchsorted(rows, torch.arange(self.sites + 1, dtype=kind, device=ends.device)).to(kind)
        self.known: tuple[tuple[Tensor, int], Tensor] | None = None

    def matrix(self, values: Tensor, loops: Tensor | None) -> Tensor:
        """The matrix of numbers of bonds, (B N, B N), in which those of `loops` come twice."""
        if self.known is None or not _same(self.known[0], values):
            halves = values if loops is None else torch.where(loops, values / 2, values)
            numbers = halves.expand(*self.batch, -1).flatten()[self.bonds]
            with warnings.catch_warnings():
                # Torch calls the layout new.
                warnings.simplefilter("ignore")
                matrix = torch.sparse_csr_tensor(self.begins, self.columns, numbers, (self.sites, self.sites))
            self.known = (values.detach(), values._version), matrix
        return self.known[1]


def _same(known: tuple[Tensor, int], tensor: Tensor) -> bool:
    """Whether a tensor holds the very numbers of one that was seen at a version."""
    old, version = known
    same = (old.shape, old.stride(), version) == (tensor.shape, tensor.stride(), tensor._version)
    return same and old.data_ptr() == tensor.data_ptr() and old.dtype == tensor.dtype


class Bonds(Declared):
    """Couplings of the pairs of sites that a graph joins: memory and time are linear in the number of bonds.

    The numbers are those of the symmetric matrix J_ij = J_ji, each pair given once; where they are D x D matrices
    J_ji = J_ij^T. A pair (i, i) is the diagonal J_ii.

    Args:
        pairs: the sites i and j of each bond, integers in [0, N), (E, 2), or (*batch, E, 2) for graphs of their own:
            those with fewer bonds are padded by any pairs with values of 0. A pair that is given twice counts with the
            sum of its values.
        values: J of each bond, (*batch, E), or (*batch, E, D, D) for vectors. (Where E = D, values with one axis more
            than the pairs are matrices.)
        num_sites: N.

    Raises:
        TypeError, ValueError: pairs that are no integers, out of range, or given in both directions; other shapes.

    Gradients: with respect to values.

    Methods on a graph: `MeanField`, `TAP(order=2)` and `Bethe`, and for the `magnetization` of synchronous dynamics
    `KineticPlefka(order=1)` and `GaussianClosure`. Not for other methods, samplers, `stability` and `drive`, nor where
    most pairs are coupled: `dense()` gives the same couplings as a tensor.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Bethe, Bonds, SpinSystem, magnetization
        >>> sites = torch.arange(10_000)
        >>> ring = Bonds(torch.stack([sites, sites.roll(-1)], -1), torch.full((10_000,), 0.3), 10_000)
        >>> magnetization(SpinSystem(ring, torch.full((10_000, 1), 0.1)), Bethe())[:2, 0].round(decimals=3)
        tensor([0.1800, 0.1800])
    """

    def __init__(self, pairs: Int[Tensor, "*batch E 2"], values: Float[Tensor, "*batch E"], num_sites: int) -> None:
        num_sites = _validate.check_integer("num_sites", num_sites, low=1)
        _validate.check_float_tensor("values", values, min_ndim=1)
        remedy = "pass torch.as_tensor(pairs)"
        _validate.check_instance("pairs", pairs, Tensor, "be a tensor of integers", remedy)
        integers = not (pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool)
        _validate.require(integers, "pairs", "be a tensor of integers", pairs.dtype, "pass pairs.long()", TypeError)
        fits, received = pairs.ndim >= 2 and pairs.shape[-1] == 2, f"shape {tuple(pairs.shape)}"
        _validate.require(fits, "pairs", "have shape (E, 2) or (*batch, E, 2)", received)
        _validate.check_same_kind([("pairs", pairs), ("values", values)])
        _validate.check_numbers("pairs", pairs)
        beyond = pairs[(pairs < 0) | (pairs >= num_sites)]
        if beyond.numel():
            _validate.refuse("pairs", f"be in [0, {num_sites - 1}]", int(beyond[0]), "sites are counted from 0")
        ends, shape, count = pairs.long().mT.contiguous(), values.shape, pairs.shape[-2]
        matrices = len(shape) > 2 and shape[-3] == count and shape[-1] == shape[-2]
        matrices = matrices and (shape[-1] != count or values.ndim == ends.ndim + 1)
        if not matrices and shape[-1] != count:
            required = f"have the shape (*batch, E) or (*batch, E, D, D) with E = {count}, the number of pairs"
            _validate.refuse("values", required, f"shape {tuple(shape)}")
        lead = shape[: -3 if matrices else -1]
        _validate.check_together("values", lead, ends.shape[:-2], "the leading axes of `pairs`")
        self._keep(ends, values, num_sites, 2 if matrices else 0)

    def _keep(self, ends: Tensor, values: Tensor, num_sites: int, value_ndim: int) -> None:
        ends, self.values = _merged(ends, values, num_sites, value_ndim)
        loops = bool((ends[..., 0, :] == ends[..., 1, :]).any())
        self.graph = Graph(ends, num_sites, loops, value_ndim)

    @classmethod
    def of(cls, couplings: Any, *, weight: str = "weight", dtype: torch.dtype | None = None) -> Self:
        """The bonds of a symmetric matrix, dense or sparse, or of a graph.

        Args:
            couplings: a tensor (N, N), dense or sparse, or (*batch, N, N), dense, whose samples share the pairs that
                are coupled in any; a sparse matrix or array of SciPy; an undirected graph of networkx, whose nodes are
                numbered in their order.
            weight: the attribute of edges in which a graph keeps J; edges without it have 1.
            dtype: of the values from SciPy and networkx; None is torch's default.

        Raises:
            TypeError, ValueError: another object, or couplings that are not symmetric.

        Examples:
            >>> import torch
            >>> from implicit_attention.spins import Bonds
            >>> Bonds.of(torch.tensor([[0.0, 0.5], [0.5, 0.0]]).to_sparse())
            Bonds(N = 2, E = 1)
        """
        if hasattr(couplings, "is_directed"):
            required, remedy = "be undirected", "pass graph.to_undirected()"
            _validate.require(not couplings.is_directed(), "couplings", required, "a directed graph", remedy)
            _validate.require(len(couplings) > 0, "couplings", "have at least one site", "an empty graph")
            import networkx

            couplings = networkx.to_scipy_sparse_array(couplings, weight=weight)
        if hasattr(couplings, "tocoo"):
            found = couplings.tocoo()
            places = torch.stack([torch.as_tensor(x).long() for x in (found.row, found.col)])
            numbers = torch.as_tensor(found.data)
            if not numbers.is_complex():
                numbers = numbers.to(torch.get_default_dtype() if dtype is None else dtype)
            couplings = torch.sparse_coo_tensor(places, numbers, found.shape, check_invariants=True)
        remedy = "pass a tensor, a sparse matrix of SciPy or a graph of networkx"
        _validate.check_instance("couplings", couplings, Tensor, "be a matrix or a graph", remedy)
        symmetrise = "pass (J + J^T) / 2"
        square = couplings.ndim >= 2 and couplings.shape[-1] == couplings.shape[-2]
        received = f"shape {tuple(couplings.shape)}"
        _validate.require(square, "couplings", "have shape (N, N) or, dense, (*batch, N, N)", received)
        kind, remedy = couplings.dtype, "convert it with couplings.float()"
        required = "have a floating-point dtype"
        _validate.require(kind.is_floating_point, "couplings", required, kind, remedy, TypeError)
        if couplings.layout == torch.strided:
            anywhere = (couplings != 0).flatten(0, -3).any(0) if couplings.ndim > 2 else couplings != 0
            i, j = (anywhere | anywhere.mT).triu().nonzero().unbind(-1)
            upper, lower = couplings[..., i, j], couplings[..., j, i]
        else:
            required, remedy = "have two axes where it is sparse", "use Bonds(pairs, values, num_sites)"
            _validate.require(couplings.ndim == 2, "couplings", required, received, remedy)
            whole = couplings.to_sparse_coo().coalesce()
            twin = whole.mT.coalesce()
            if not torch.equal(whole.indices(), twin.indices()):
                _validate.refuse("couplings", "be symmetric", "other pairs than in its transpose", symmetrise)
            above = whole.indices()[0] <= whole.indices()[1]
            i, j = whole.indices()[:, above]
            upper, lower = whole.values()[above], twin.values()[above]
        apart, size = ((x.detach().abs().nan_to_num().amax() if upper.numel() else 0.0) for x in (upper - lower, upper))
        if apart > 64 * torch.finfo(upper.dtype).eps * size:
            _validate.refuse("couplings", "be symmetric", f"a difference of {float(apart):.1e}", symmetrise)
        bonds = cls.__new__(cls)
        bonds._keep(torch.stack([i, j]), (upper + lower) / 2, couplings.shape[-1], 0)
        return bonds

    @property
    def pairs(self) -> Int[Tensor, "*batch E 2"]:
        """The sites of each bond, to which `values` belong."""
        return self.graph.ends.mT

    @property
    def num_sites(self) -> int:
        return self.graph.num_sites

    def dense(self) -> Tensor:
        """J as a tensor, (*batch, N, N) or (*batch, N, N, D, D)."""
        return self.graph.dense(self.values, self.graph.value_ndim)

    def scaled(self, factor: float) -> Self:
        """The same bonds with other values."""
        clone = copy.copy(self)
        clone.values = factor * self.values
        return clone

    def __repr__(self) -> str:
        return f"Bonds(N = {self.num_sites}, E = {self.graph.num_bonds})"


def _axes(ends: Tensor, values: Tensor, value_ndim: int) -> tuple[torch.Size, torch.Size]:
    """The axes that number samples, and those of the value of one bond."""
    own = values.ndim - value_ndim
    return _common(ends.shape[:-2], values.shape[: own - 1]), values.shape[own:]


def _common(*shapes: torch.Size) -> torch.Size:
    """The shape that all broadcast to."""
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-any-return, no-untyped-call]


def _along(numbers: Tensor, of_one: torch.Size) -> Tensor:
    """Numbers of bonds, (*batch, E), with axes for the value of one."""
    return numbers.reshape(*numbers.shape, *(1,) * len(of_one))


def _merged(ends: Tensor, values: Tensor, num_sites: int, value_ndim: int) -> tuple[Tensor, Tensor]:
    """Ends and values of bonds that are each given once."""
    key, order = (ends.amin(-2) * num_sites + ends.amax(-2)).sort(dim=-1, stable=True)
    again = key.diff() == 0
    if not bool(again.any()):
        return ends, values
    turned = (ends[..., 0, :] > ends[..., 1, :]).gather(-1, order)
    both = again & (turned[..., 1:] != turned[..., :-1])
    if bool(both.any()):
        i, j = divmod(int(key[..., 1:][both][0]), num_sites)
        remedy = "list every bond once, or pass the symmetric matrix to Bonds.of"
        _validate.refuse("pairs", "give a bond in one direction", f"({i}, {j}) and ({j}, {i})", remedy)
    # The number of each bond among those that differ.
    number = torch.nn.functional.pad((~again).cumsum(-1), (1, 0))
    number = torch.empty_like(number).scatter(-1, order, number)
    count, (lead, of_one) = int(number.max()) + 1, _axes(ends, values, value_ndim)
    places = _along(number, of_one).expand(*lead, -1, *of_one)
    summed = values.new_zeros(*lead, count, *of_one).scatter_add(-1 - len(of_one), places, values.expand(places.shape))
    first = ends.new_zeros(*ends.shape[:-1], count)
    return first.scatter(-1, number[..., None, :].expand(ends.shape), ends), summed
