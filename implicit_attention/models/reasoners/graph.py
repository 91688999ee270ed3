"""Message passing along given edges that repeats until every node has settled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ... import _validate
from ..._torch import host_may_look_at_constant
from ...layers.block import Equilibrium
from ...layers.calls import PlainCall, StepKeywords
from ...layers.token_window import only_existing
from ...problem import PerSample, Shared
from .existing import check_exists

_REDUCTIONS = {"max": "amax", "sum": "sum", "mean": "mean"}


class GraphBlock(nn.Module):
    """One step: each node gathers messages along its edges, and updates its state."""

    def __init__(self, dim: int, hidden: int, edge_features: int, aggregation: str) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden)
        self.edge = nn.Linear(edge_features, hidden, bias=False) if edge_features else None
        self.message = nn.Linear(hidden, hidden)
        self.update = nn.Sequential(nn.Linear(dim + hidden, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.norm = nn.LayerNorm(dim)
        self.reduction = _REDUCTIONS[aggregation]

    def forward(
        self,
        z: Tensor,
        x: Tensor,
        edges: Tensor,
        edge_features: Tensor | None = None,
        exists: Tensor | None = None,
    ) -> Tensor:
        h = only_existing(z + x, exists)
        lead, (count, dim) = h.shape[:-2], h.shape[-2:]
        nodes, graphs = h.reshape(-1, dim), lead.numel()
        pairs = edges.expand(*lead, *edges.shape[-2:]).reshape(graphs, *edges.shape[-2:])
        # Nodes of all graphs have numbers of their own: torch gathers whole rows much faster than entries.
        first = count * torch.arange(graphs, device=h.device)[:, None]
        source, target = ((pairs[..., i].clamp(min=0) + first).flatten() for i in (0, 1))
        used = (pairs >= 0).all(-1).flatten()
        if exists is not None:
            known = exists.expand(*lead, count).flatten()
            used = used & known[source] & known[target]
        inner = self.source(nodes).index_select(0, source) + self.target(nodes).index_select(0, target)
        if self.edge is not None and edge_features is not None:
            features = edge_features.expand(*lead, *edge_features.shape[-2:]).flatten(0, -2)
            inner = inner + self.edge(only_existing(features, used))
        messages = self.message(inner.relu())
        # Edges that fill up go to a node behind the last.
        to = target.where(used, len(nodes))[:, None].expand(messages.shape)
        gathered = messages.new_zeros(len(nodes) + 1, messages.shape[-1])
        gathered = gathered.scatter_reduce(0, to, messages, self.reduction, include_self=self.reduction == "sum")
        change = self.update(torch.cat([nodes, gathered[:-1]], -1))
        return only_existing(self.norm(nodes + change).reshape(h.shape), exists)


class GraphReasoner(Equilibrium):
    """Message passing along given edges, with one set of weights, until every node of a graph has settled.

    A step is h = z + x, messages m(j, i) = M relu(S h_j + T h_i + E e(j, i)) along the edges from j to i, and z_i <-
    norm(h_i + U [h_i; reduce over j of m(j, i)]) with a network U of one hidden layer. A step carries news along one
    edge: weights that were trained on small graphs serve for larger ones.

    Args:
        dim: width of x and of the state of a node.
        hidden: width of messages; None is `dim`.
        edge_features: numbers for each edge, such as its length; 0 for none.
        aggregation: "max", "sum" or "mean" of the messages to a node; 0 where there are none. With the maximum a
            message counts once however many paths carry it, as lengths of shortest paths and reachability need it.
        compiled: as of `Equilibrium`.
        **options: `start`, `solver`, `adjoint`, `steps` and `on_failure`, as of `Equilibrium`.

    Attributes:
        block: the module of one step.
        last_solve: the `SolveReport` of the last call, one entry a graph.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: to x, `edge_features` and the parameters.

    Examples:
        >>> import torch
        >>> from implicit_attention.models.reasoners import GraphReasoner
        >>> layer, x = GraphReasoner(8, steps=range(4, 9)), torch.randn(2, 4, 8)
        >>> ring, path = [[0, 1], [1, 2], [2, 3], [3, 0]], [[0, 1], [1, 2], [2, 3], [-1, -1]]
        >>> layer(x, torch.tensor([ring, path])).shape
        torch.Size([2, 4, 8])

    Not for graphs whose nodes all see each other: attention (`EquilibriumTransformer`) needs no list of edges.
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        edge_features: int = 0,
        aggregation: Literal["max", "sum", "mean"] = "max",
        compiled: bool = False,
        **options: Unpack[StepKeywords],
    ) -> None:
        hidden = dim if hidden is None else hidden
        for name, value, low in (("dim", dim, 1), ("hidden", hidden, 1), ("edge_features", edge_features, 0)):
            _validate.check_integer(name, value, low=low)
        _validate.check_choice("aggregation", aggregation, tuple(_REDUCTIONS))
        block = GraphBlock(dim, hidden, edge_features, aggregation)
        super().__init__(block, event_ndim=2, compiled=compiled, **options)
        self.dim, self.edge_features = dim, edge_features

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        edges: Tensor,
        edge_features: Tensor | None = None,
        exists: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The settled states of all nodes, or those after some steps.

        Args:
            x: (*batch, N, dim).
            edges: integers, (E, 2) for all graphs or (*batch, E, 2): the nodes from which and to which each edge leads;
                a pair that holds -1 is no edge. An edge in both directions is two.
            edge_features: (E, F) or (*batch, E, F), for a layer with `edge_features=F`.
            exists: which nodes exist, boolean, (*batch, N); None for all. The state of others is 0, and their edges do
                not count, so that a batch of padded graphs answers as each of them does alone.
            **options: `steps`, `solver`, `adjoint`, `start`, `on_failure`, `confirm` and `return_solution`, as of
                `Equilibrium`.

        Returns:
            (*batch, N, dim); with `return_solution` a tuple (state, `Solution`).
        """
        _validate.check_float_tensor("x", x, min_ndim=2)
        _validate.require(
            x.shape[-1] == self.dim, "x", f"have width {self.dim} on its last axis", f"shape {tuple(x.shape)}"
        )
        lead, count = tuple(x.shape[:-2]), x.shape[-2]
        _check_edges(edges, lead, count)
        given: list[Any] = [_of_graphs(edges.long(), lead), None, None]
        if self.edge_features or edge_features is not None:
            given[1] = self._checked_features(edge_features, (edges.shape[-2], self.edge_features), lead)
        if exists is not None:
            check_exists(exists, (*lead, count))
            given[2] = PerSample(exists)
        return super().forward(x, *given, **options)

    def _checked_features(self, given: Any, wanted: tuple[int, int], lead: tuple[int, ...]) -> PerSample | Shared:
        required, remedy = "be None for a layer with edge_features=0", "make the layer with edge_features=F"
        _validate.require(self.edge_features > 0, "edge_features", required, "a tensor", remedy)
        _validate.check_float_tensor("edge_features", given, min_ndim=2)
        required = f"have the shape {wanted} or {(*lead, *wanted)}"
        fits = tuple(given.shape) == wanted or tuple(given.shape) == (*lead, *wanted)
        _validate.require(fits, "edge_features", required, f"shape {tuple(given.shape)}")
        return _of_graphs(given, lead)

    if TYPE_CHECKING:
        __call__: PlainCall[...]

    def extra_repr(self) -> str:
        others = super().extra_repr().removeprefix("event_ndim=2").removeprefix(", ")
        return ", ".join(text for text in (f"{self.dim}", others) if text)


def _of_graphs(tensor: Tensor, lead: tuple[int, ...]) -> PerSample | Shared:
    return PerSample(tensor) if lead and tensor.ndim == len(lead) + 2 else Shared(tensor)


def _check_edges(edges: Any, lead: tuple[int, ...], count: int) -> None:
    """Raise unless these are pairs of nodes of graphs of `count` nodes."""
    if not isinstance(edges, Tensor) or edges.is_floating_point() or edges.dtype == torch.bool:
        received = edges.dtype if isinstance(edges, Tensor) else type(edges).__name__
        remedy = "for an adjacency matrix adjacency.nonzero() has the edges of one graph"
        raise TypeError(_validate.message("edges", "be a tensor of integers, pairs of nodes", received, remedy))
    fits = edges.ndim > 1 and edges.shape[-1] == 2 and (edges.ndim == 2 or tuple(edges.shape[:-2]) == lead)
    if not fits:
        remedy = "transpose a list (2, E)" if edges.shape[-2:-1] == (2,) else ""
        own = f" or ({', '.join(map(str, (*lead, 'E', 2)))})" if lead else ""
        raise ValueError(
            _validate.message("edges", f"have the shape (E, 2){own}", f"shape {tuple(edges.shape)}", remedy)
        )
    if edges.numel() and host_may_look_at_constant(edges):
        low, high = int(edges.min()), int(edges.max())
        _validate.require(
            low >= -1 and high < count, "edges", f"hold numbers of nodes below {count}, or -1", (low, high)
        )
