"""Couplings on the bonds of a graph, of which no N x N matrix is made: their numbers, and sums over bonds."""

from __future__ import annotations

import copy
import warnings
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import HALF, is_batched, is_differentiated, transforms_active, unobserved, unwrapped
from ..problem import Declared, restricted

#: Fewer bonds are gathered and scattered in less time than it takes to make a matrix.
SHORT = 1024


class Graph(Declared):
    """The bonds between sites, each once, as an operator on numbers of sites and of bonds.

    Numbers of a bond's two directions are (*lead, 2, E), or (*lead, 1, E) where they are equal: the first is of what
    site i of a pair (i, j) has or gets, J_ij among them. Both directions of a loop are the same.

    Args:
        ends: i and j of each bond, (*#batch, 2, E).
        num_sites: N.
        loops: whether a bond may join a site to itself.
        value_ndim: the number of axes of the value of one bond: 0, or 2 for a matrix.
        directed: whether J_ij and J_ji are kept of each bond, (*batch, 2, E), and not J_ij = J_ji^T once, (*batch, E).
    """

    def __init__(
        self, ends: Int[Tensor, "*batch 2 E"], num_sites: int, loops: bool, value_ndim: int = 0, directed: bool = False
    ) -> None:
        self.ends = ends
        self.num_sites, self.num_bonds = num_sites, ends.shape[-1]
        self.loops = loops
        self.value_ndim = value_ndim
        self.directed = directed
        #: The number of axes of the values of all bonds of a sample.
        self.value_axes = 1 + directed + value_ndim
        self._found = _Found()

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

    def others(self, y: Tensor) -> Tensor:
        """The sum of what each end of a bond gets from its other bonds, (*batch, 2, E) -> (*batch, 2, E)."""
        return self.at_ends(self.sums(y)) - y

    def both(self, values: Tensor, *, block: bool = False) -> Tensor:
        """J_ij and J_ji of each bond, numbers (*#batch, 2, E) or matrices (*#batch, 2, E, D, D), from the values."""
        if self.directed or not block:
            return values if self.directed else values[..., None, :]
        both = torch.stack([values, values.mT], -4)
        # Of the matrix of a loop the symmetric part counts.
        own = _along(self.own()[..., None, :], 2)
        return torch.where(own, both.mean(-4, keepdim=True), both) if self.loops else both

    def once(self, both: Tensor, *, block: bool = False) -> Tensor:
        """Numbers of both directions, half of them for loops: a sum over directions counts these once."""
        return torch.where(_along(self.own()[..., None, :], 2 * block), both / 2, both) if self.loops else both

    def product(
        self, values: Tensor, m: Float[Tensor, "*batch N D"], *, block: bool = False, squares: bool = False
    ) -> Tensor:
        """sum_j J_ij m_j, (*batch, N, D), for values that are numbers or matrices; sum_j J_ij^2 m_j with `squares`."""
        return self.pair_product(self.both(values, block=block), m, block=block, squares=squares)

    def pair_product(
        self, both: Tensor, m: Float[Tensor, "*batch N D"], *, block: bool = False, squares: bool = False
    ) -> Tensor:
        """The product for numbers (*#batch, 2, E) or matrices (*#batch, 2, E, D, D)."""
        if not block and (by_rows := self._by_rows(both, m, squares)) is not None:
            return by_rows
        both, vectors = self.once(both.square() if squares else both, block=block), self.of_components()
        there = vectors.at_ends(m.mT).flip(-2)
        if block:
            got = (both @ there.movedim(-3, -1)[..., None])[..., 0].movedim(-1, -3)
        else:
            got = both[..., None, :, :] * there
        return vectors.sums(got).mT

    def dense(self, values: Tensor, value_ndim: int = 0) -> Tensor:
        """The matrix of values of bonds, (*batch, N, N) or (*batch, N, N, D, D)."""
        n, block, axis = self.num_sites, value_ndim > 0, -1 - value_ndim
        both = self.once(self.both(values, block=block), block=block)
        lead, (i, j) = _common(self.ends.shape[:-2], both.shape[: axis - 1]), self.ends.unbind(-2)
        numbers = both.expand(*lead, 2, *both.shape[axis:]).flatten(axis - 1, axis)
        places = _along(torch.cat([i * n + j, j * n + i], -1), value_ndim).expand(numbers.shape)
        flat = numbers.new_zeros(*lead, n * n, *both.shape[both.ndim - value_ndim :]).scatter_add(axis, places, numbers)
        return flat.unflatten(axis, (n, n))  # type: ignore[no-any-return, no-untyped-call]

    def overlap(self, x: Tensor) -> Tensor:
        """x_i . x_j of the two ends of each bond, (*batch, N, D) -> (*batch, E)."""
        here, there = self.of_components().at_ends(x.mT).unbind(-2)
        return (here * there).sum(-2)

    def without_loops(self, values: Tensor) -> Tensor:
        """Numbers of bonds, 0 for those that join a site to itself."""
        return values.masked_fill(self.own(), 0.0) if self.loops else values

    def sums_of(self, values: Tensor) -> Tensor:
        """sum_j J_ij of values that are numbers, (*#batch, N)."""
        both = self.both(values)
        return self.pair_product(both, both.new_ones(*both.shape[:-2], self.num_sites, 1))[..., 0]

    def _by_rows(self, both: Tensor, m: Tensor, squares: bool) -> Tensor | None:
        """The product by `_Found.matrix`; None where it may be differentiated, or is too short to pay."""
        pays = both.numel() >= SHORT and m.numel() > 0 and (both.is_cuda or (both.is_cpu and torch._C.has_mkl))
        plain = both.dtype == m.dtype and both.dtype not in HALF
        if not (pays and plain and unobserved()) or is_differentiated(both, m):
            return None
        batch = _common(both.shape[:-2], self.ends.shape[:-2])
        lead, dim = m.shape[: m.ndim - 2 - len(batch)], m.shape[-1]
        if m.shape[len(lead) : -2] != batch:
            return None
        columns = m.reshape(lead.numel(), -1, dim).movedim(0, 1).flatten(1)
        # A matrix of one column takes half again the time of a vector.
        product = self._found.matrix(self, both, batch, squares) @ (columns[:, 0] if columns.shape[1] == 1 else columns)
        return product.reshape(-1, lead.numel(), dim).movedim(1, 0).reshape(m.shape)

    def triangles(self) -> tuple[Graph, Graph]:
        """Triangles as bonds with three ends: between their corners, and between the bonds opposite to these.

        Corners are counted from 1: of triangles that only other samples have they are 0. What is found within a
        transform of torch.func does not outlive it, so that only calls outside of these keep it.
        """
        if (known := self._found.triangles) is not None and _same(known[0], self.ends):
            return known[1]
        lead, count = self.ends.shape[:-2], self.num_bonds
        samples = list(self.ends.reshape(lead.numel(), 2, count)) or [self.ends.new_empty(2, 0)]
        with torch.inference_mode(False):
            parts = [_triangles(ends, self.num_sites) for ends in samples]
            padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).mT
        corners, sides = padded.reshape(*lead, 6, padded.shape[-1]).chunk(2, -2)
        triangles = Graph(corners, self.num_sites + 1, False), Graph(sides, count, False)
        if not transforms_active():
            self._found.triangles = _seen(self.ends), triangles
        return triangles

    def of_components(self) -> Graph:
        """The graph of (*batch, D, N), the numbers of all components."""
        return self if self.ends.ndim == 2 else Graph(self.ends[..., None, :, :], self.num_sites, self.loops)

    def select(self, index: Tensor) -> Graph:
        return self.at(restricted(self, index, ends=2).ends)

    def at(self, ends: Tensor) -> Graph:
        """The graph of other bonds between the sites."""
        return Graph(ends, self.num_sites, self.loops, self.value_ndim, self.directed)


class _Found:
    """Results for a graph and its copies that are found once; none of them is a tensor that a problem declares.

    A product without derivatives takes a fifth of the time by a matrix with rows, all samples in one. Its layout is
    found once, and the matrix anew for other numbers than in the last product.
    """

    def __init__(self) -> None:
        self.triangles: tuple[_Seen, tuple[Graph, Graph]] | None = None
        #: In one, as threads share it: the bonds and the batch that were sorted, with the layout of their matrix, and
        #: the numbers of the last products, with their matrix: themselves, and, True, their squares.
        self.rows: tuple[tuple[_Seen, torch.Size, tuple[Tensor, ...]], dict[bool, tuple[_Seen, Tensor]]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Files and deep copies find it again.
        return type(self), ()

    def matrix(self, graph: Graph, both: Tensor, batch: torch.Size, squares: bool) -> Tensor:
        """The matrix of numbers of bonds, (B N, B N), or of their squares."""
        layout, known = (None, {}) if self.rows is None else self.rows
        if layout is None or layout[1] != batch or not _same(layout[0], graph.ends):
            layout, known = (_seen(graph.ends), batch, _by_row(graph, batch)), {}
        last = known.get(squares)
        if last is None or not _same(last[0], both):
            begins, columns, order = layout[2]
            numbers = graph.once(both.square() if squares else both).expand(*batch, 2, -1).flatten()[order]
            with warnings.catch_warnings():
                # Torch calls the layout new.
                warnings.simplefilter("ignore")
                size = (batch.numel() * graph.num_sites,) * 2
                last = _seen(both), torch.sparse_csr_tensor(begins, columns, numbers, size)
        self.rows = layout, {**known, squares: last}
        return last[1]


def _by_row(graph: Graph, batch: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Layout of the matrix of all samples: where rows begin, columns, and where in both numbers each entry is."""
    sites, count = batch.numel() * graph.num_sites, graph.num_bonds
    kind = torch.int32 if max(sites, 2 * batch.numel() * count) < 2**31 else torch.int64
    first = torch.arange(0, sites, graph.num_sites, dtype=kind, device=graph.ends.device)[:, None, None]
    ends = graph.ends.to(kind).expand(*batch, 2, -1).reshape(-1, 2, count) + first
    rows, order = ends.flatten().sort(stable=True)
    begins = torch.searchsorted(rows, torch.arange(sites + 1, dtype=kind, device=rows.device)).to(kind)
    return begins, ends.flip(-2).flatten()[order], order


#: A tensor, and its version when it was read; None where that cannot be known: in inference mode, and in torch.vmap.
_Seen: TypeAlias = "tuple[Tensor, int | None]"


def _seen(tensor: Tensor) -> _Seen:
    plain = unwrapped(tensor)[-1]
    # What a transform detaches it wraps.
    kept = unwrapped(plain.detach())[-1]
    return kept, None if plain.is_inference() or is_batched(tensor) else plain._version


def _same(seen: _Seen, tensor: Tensor) -> bool:
    """Whether a tensor certainly holds the very numbers that were seen."""
    old, version = _seen(tensor)
    known, before = seen
    same = version is not None and (version, old.shape, old.stride()) == (before, known.shape, known.stride())
    return same and old.dtype == known.dtype and old.data_ptr() == known.data_ptr()


class Bonds(Declared):
    """Couplings of the pairs of sites that a graph joins: memory and time are linear in the number of bonds.

    The numbers are those of the symmetric matrix J_ij = J_ji, each pair given once; where they are D x D matrices
    J_ji = J_ij^T. A pair (i, i) is the diagonal J_ii. With directed=True the value of a pair (i, j) is J_ij alone, by
    which spin i reads spin j, and J_ji is that of the pair (j, i), 0 where there is none: couplings of dynamics.

    Args:
        pairs: the sites i and j of each bond, integers in [0, N), (E, 2), or (*batch, E, 2) for graphs of their own:
            those with fewer bonds are padded by any pairs with values of 0. A pair that is given twice counts with the
            sum of its values.
        values: J of each bond, (*batch, E), or (*batch, E, D, D) for vectors. (Where E = D, values with one axis more
            than the pairs are matrices.)
        num_sites: N.
        directed: whether J_ij and J_ji are two numbers, of the pairs (i, j) and (j, i).

    Attributes:
        pairs: of sites that are coupled, each once, (*#batch, E, 2); i <= j where directed.
        values: J of each bond as above, with repeated pairs summed; where directed (*batch, 2, E) or (*batch, 2, E, D,
            D): index 0 is J_ij of the pair (i, j), and index 1 J_ji. A loop has J_ii in both places.

    Raises:
        TypeError, ValueError: pairs that are no integers, out of range, or, unless directed, given in both directions;
            other shapes.

    Gradients: with respect to values.

    `MeanField`, `TAP` and `Bethe` go by the bonds alone, as do their `stability`, the samplers, and the dynamics of
    `KineticPlefka` and `GaussianClosure`, directed or not, also in `drive`. What reads every pair makes a tensor of the
    bonds of at most 2,048 sites, and refuses more.

    Not for couplings of most pairs: `dense()` gives the same as a tensor.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Bethe, Bonds, SpinSystem, magnetization
        >>> sites = torch.arange(10_000)
        >>> ring = Bonds(torch.stack([sites, sites.roll(-1)], -1), torch.full((10_000,), 0.3), 10_000)
        >>> magnetization(SpinSystem(ring, torch.full((10_000, 1), 0.1)), Bethe())[:2, 0].round(decimals=3)
        tensor([0.1800, 0.1800])
        >>> Bonds(torch.tensor([[0, 1], [1, 0], [2, 1]]), torch.tensor([0.4, 0.2, 0.3]), 3, directed=True).values
        tensor([[0.4000, 0.0000],
                [0.2000, 0.3000]])
    """

    def __init__(
        self, pairs: Int[Tensor, "... E 2"], values: Float[Tensor, "... E"], num_sites: int, *, directed: bool = False
    ) -> None:
        _validate.check_flag("directed", directed)
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
        value_ndim = 2 if matrices and (shape[-1] != count or values.ndim == ends.ndim + 1) else 0
        if not value_ndim and shape[-1] != count:
            required = f"have the shape (*batch, E) or (*batch, E, D, D) with E = {count}, the number of pairs"
            _validate.refuse("values", required, f"shape {tuple(shape)}")
        _validate.check_together("values", shape[: -1 - value_ndim], ends.shape[:-2], "the leading axes of `pairs`")
        if directed:
            i, j = ends.unbind(-2)
            # J_ij and J_ji are behind the number of the bond, as its value: (*batch, E, 2) or (*batch, E, 2, D, D).
            both = [values.masked_fill(_along(other, value_ndim), 0.0) for other in (i > j, i < j)]
            ends, values = ends.sort(-2).values, torch.stack(both, -1 - value_ndim)
        ends, values = _merged(ends, values, num_sites, value_ndim + directed)
        self.values = values.movedim(-1 - value_ndim, -2 - value_ndim).contiguous() if directed else values
        self.graph = Graph(ends, num_sites, bool((ends[..., 0, :] == ends[..., 1, :]).any()), value_ndim, directed)

    @classmethod
    def of(
        cls, couplings: Any, *, weight: str = "weight", dtype: torch.dtype | None = None, directed: bool = False
    ) -> Self:
        """The bonds of a matrix, symmetric or not, dense or sparse, or of a graph.

        Args:
            couplings: a tensor (N, N), dense or sparse, or (*batch, N, N), dense, whose samples share the pairs that
                are coupled in any; a sparse matrix or array of SciPy; a graph of networkx, whose nodes are numbered in
                their order.
            weight: the attribute of edges in which a graph keeps J; edges without it have 1.
            dtype: of the values from SciPy and networkx; None is torch's default.
            directed: as in the class; the edge from i to j of a directed graph is J_ij, by which i reads j. Without it
                couplings have to be symmetric.

        Raises:
            TypeError, ValueError: another object, or couplings that are not symmetric.

        Examples:
            >>> import torch
            >>> from implicit_attention.spins import Bonds
            >>> Bonds.of(torch.tensor([[0.0, 0.5], [0.5, 0.0]]).to_sparse())
            Bonds(N = 2, E = 1)
        """
        _validate.check_flag("directed", directed)
        if hasattr(couplings, "is_directed"):
            required, remedy = "be undirected", "pass graph.to_undirected(), or directed=True"
            fits = directed or not couplings.is_directed()
            _validate.require(fits, "couplings", required, "a directed graph", remedy)
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
        square = couplings.ndim >= 2 and couplings.shape[-1] == couplings.shape[-2]
        received = f"shape {tuple(couplings.shape)}"
        _validate.require(square, "couplings", "have shape (N, N) or, dense, (*batch, N, N)", received)
        kind, required, remedy = couplings.dtype, "have a floating-point dtype", "convert it with couplings.float()"
        _validate.require(kind.is_floating_point, "couplings", required, kind, remedy, TypeError)
        if couplings.layout == torch.strided:
            pairs = ((couplings != 0).flatten(0, -3).any(0) if couplings.ndim > 2 else couplings != 0).nonzero()
            numbers = couplings[..., pairs[:, 0], pairs[:, 1]]
        else:
            required, remedy = "have two axes where it is sparse", "use Bonds(pairs, values, num_sites)"
            _validate.require(couplings.ndim == 2, "couplings", required, received, remedy)
            whole = couplings.to_sparse_coo().coalesce()
            pairs, numbers = whole.indices().mT, whole.values()
        bonds = cls(pairs, numbers, couplings.shape[-1], directed=True)
        if not directed:
            upper, lower = bonds.values.unbind(-2)
            apart, size = ((x.detach().abs().nan_to_num().amax() if x.numel() else 0.0) for x in (upper - lower, upper))
            if apart > 64 * torch.finfo(upper.dtype).eps * size:
                remedy = "pass (J + J^T) / 2, or, for dynamics of asymmetric couplings, Bonds.of(..., directed=True)"
                _validate.refuse("couplings", "be symmetric", f"a difference of {float(apart):.1e}", remedy)
            bonds = bonds.both_orders()
            bonds.values = bonds.values / 2
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

    def both_orders(self) -> Self:
        """The bonds of J + J^T, which have no directions."""
        clone, matrices = copy.copy(self), self.graph.value_ndim
        both = self.graph.both(self.values, block=matrices > 0)
        here, there = (both.select(-2 - matrices, place) for place in (0, -1))
        clone.values = here + (there.mT if matrices else there)
        clone.graph = Graph(self.graph.ends, self.num_sites, self.graph.loops, matrices)
        return clone

    def __repr__(self) -> str:
        return f"Bonds(N = {self.num_sites}, E = {self.graph.num_bonds}{', directed' if self.graph.directed else ''})"


def _common(*shapes: torch.Size) -> torch.Size:
    """The shape that all broadcast to."""
    if len(set(shapes)) == 1:
        # Torch takes long to find that.
        return shapes[0]
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-any-return, no-untyped-call]


def _along(numbers: Tensor, value_ndim: int) -> Tensor:
    """Numbers of bonds, (*batch, E), with axes for the value of one."""
    return numbers.reshape(*numbers.shape, *(1,) * value_ndim)


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
        remedy = "list every bond once, pass the symmetric matrix to Bonds.of, or use directed=True for J_ij and J_ji"
        _validate.refuse("pairs", "give a bond in one direction", f"({i}, {j}) and ({j}, {i})", remedy)
    # The number of each bond among those that differ.
    number = torch.nn.functional.pad((~again).cumsum(-1), (1, 0))
    number = torch.empty_like(number).scatter(-1, order, number)
    count, of_one = int(number.max()) + 1, values.shape[values.ndim - value_ndim :]
    lead = _common(ends.shape[:-2], values.shape[: -1 - value_ndim])
    places = _along(number, value_ndim).expand(*lead, -1, *of_one)
    summed = values.new_zeros(*lead, count, *of_one).scatter_add(-1 - value_ndim, places, values.expand(places.shape))
    first = ends.new_zeros(*ends.shape[:-1], count)
    return first.scatter(-1, number[..., None, :].expand(ends.shape), ends), summed


def _triangles(ends: Tensor, num_sites: int) -> Tensor:
    """Corners of the triangles of one graph, counted from 1, and the bonds opposite to them, (T, 6).

    Each bond leads from the end with fewer bonds to the other, so that no site has more than sqrt(2 E) that lead from
    it. A triangle is two bonds from one site whose far ends are joined.
    """
    bond = (ends[0] != ends[1]).nonzero()[:, 0]
    by_rank = torch.bincount(ends.flatten(), minlength=num_sites).argsort()
    rank = by_rank.argsort()[ends[:, bond]]
    key, order = (rank.amin(0) * num_sites + rank.amax(0)).sort()
    bond, low, high = bond[order], key // num_sites, key % num_sites
    # Each bond with those after it that lead from the same site.
    number = torch.arange(len(key), device=key.device)
    later = torch.searchsorted(low, low, right=True) - number - 1
    first = number.repeat_interleave(later)
    second = first + 1 + torch.arange(len(first), device=key.device) - (later.cumsum(0) - later)[first]
    wanted = high[first] * num_sites + high[second]
    third = torch.searchsorted(key, wanted).clamp(max=len(key) - 1)
    closed = key[third] == wanted
    corners = by_rank[torch.stack([low[first], high[first], high[second]], -1)]
    return torch.cat([corners + 1, bond[torch.stack([third, second, first], -1)]], -1)[closed]
