"""Nodes of graphs as tokens that descend one energy together, in which attention follows the edges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from .. import _validate
from .._torch import host_may_look_at_constant
from ..layers import EnergyTransformer
from ..layers.calls import plain
from ..options import SolveKeywords


class NodeClassifier(nn.Module):
    """Logits of nodes of graphs: features -> linear encoder -> `EnergyTransformer` -> its layer norm -> linear head.

    A node attends to its neighbours: entry (i, j) of the adjacency that is True, or not 0, lets node i read node j. The
    adjacency alone determines the edges, whatever the scores: a score of exactly 0 between neighbours counts (public
    code takes it for a missing edge). An edge from a node to itself is one like any other, and needs its entry in the
    adjacency. A node without neighbours keeps the pull of the memory. The weights of edges are not used otherwise.

    Args:
        features: numbers per node.
        classes: number of labels.
        dim: width of a token.
        heads: number of heads.
        head_dim: width of queries and keys.
        memories: number of stored patterns.
        positions: number of Laplacian eigenvectors that are read beside the features, k; see `laplacian_positions`.
            In training their signs, which mean nothing, are drawn anew in each call from torch's own generator.
        **block: the other arguments of `EnergyTransformer`: mode, steps, solver, ...; `device` and `dtype` are those of
            all parameters.

    Attributes:
        encoder, position_encoder (k > 0), block, head: the parts; the block has `last_solve`.

    Permuting the nodes permutes the logits, with eigenvectors where their eigenvalues are simple and their sign is
    fixed, see `laplacian_positions`.

    Raises:
        TypeError, ValueError: sizes, shapes and dtypes that do not fit.

    Gradients: with respect to features, positions and all parameters, to second order; none to the adjacency.

    Examples:
        >>> import torch
        >>> from implicit_attention.models import NodeClassifier
        >>> model = NodeClassifier(features=5, classes=3, dim=12, heads=2, head_dim=6, memories=16, positions=2)
        >>> path = torch.diag(torch.ones(6), 1)
        >>> model(torch.randn(4, 7, 5), path + path.mT).shape
        torch.Size([4, 7, 3])

    Not for graphs with many thousands of nodes: scores are dense, (N, N) for each head.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        dim: int,
        heads: int,
        head_dim: int,
        memories: int,
        *,
        positions: int = 0,
        **block: Any,
    ) -> None:
        super().__init__()
        self.features: int = _validate.check_integer("features", features, low=1)
        _validate.check_integer("classes", classes, low=1)
        self.positions: int = _validate.check_integer("positions", positions, low=0)
        place: dict[str, Any] = {name: block.get(name) for name in ("device", "dtype")}
        self.block = EnergyTransformer(dim, heads, head_dim, memories, **block)
        self.encoder = nn.Linear(self.features, dim, **place)
        self.position_encoder = nn.Linear(self.positions, dim, bias=False, **place) if positions else None
        self.head = nn.Linear(dim, classes, **place)

    def forward(
        self,
        features: Tensor,
        adjacency: Tensor,
        node_mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        return_solution: bool = False,
        **options: Unpack[SolveKeywords],
    ) -> Any:
        """The logits of all nodes.

        Args:
            features: (*batch, N, features).
            adjacency: boolean or weighted, (N, N) or (*batch, N, N): an entry that is not 0 is an edge, along which the
                node of the row reads that of the column.
            node_mask: which nodes exist, boolean, (*batch, N), where graphs were padded to one size. The others change
                nothing, and their logits are 0.
            positions: those by `laplacian_positions` for this adjacency, (*batch, N, k); None computes them, in a time
                of order N^3.
            return_solution: return (logits, solution), with the `Solution` of the tokens.
            **options: replace the block's for this call, see `SolveOptions`.

        Returns:
            (*batch, N, classes).
        """
        _validate.check_float_tensor("features", features, min_ndim=2)
        required, shape = f"have {self.features} entries on its last axis", f"shape {tuple(features.shape)}"
        _validate.require(features.shape[-1] == self.features, "features", required, shape)
        *batch, count, _ = features.shape
        edges = _edges(adjacency)
        _validate.check_broadcast("adjacency", edges.shape, (*batch, count, count), "(*batch, N, N)")
        if node_mask is not None:
            _check_nodes(node_mask, (*batch, count))
            features = features.masked_fill(~node_mask[..., None], 0.0)  # 0 * NaN is NaN in the encoder's gradient
        tokens = self.encoder(features)
        encoded = self._encoded_positions(positions, edges, node_mask, tokens)
        tokens = tokens if encoded is None else tokens + encoded
        result = self.block(tokens, edges, key_mask=node_mask, return_solution=return_solution, **options)
        settled, *evidence = result if return_solution else (result,)
        logits = self.head(self.block.norm(settled))
        if node_mask is not None:
            logits = logits.masked_fill(~node_mask[..., None], 0.0)
        return (logits, *evidence) if evidence else logits

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    def _encoded_positions(
        self, positions: Tensor | None, edges: Tensor, node_mask: Tensor | None, tokens: Tensor
    ) -> Tensor | None:
        if self.position_encoder is None:
            remedy = "make the model with positions=k"
            _validate.require(positions is None, "positions", "be None for a model without", "a tensor", remedy)
            return None
        if positions is None:
            positions = laplacian_positions(edges, self.positions, node_mask)
        else:
            _validate.check_float_tensor("positions", positions, min_ndim=2)
            wanted = (*tokens.shape[:-1], self.positions)
            _validate.check_broadcast("positions", positions.shape, wanted, "(*batch, N, k)")
            fits = positions.shape[-2:] == wanted[-2:]
            _validate.require(fits, "positions", f"end in {wanted[-2:]}", f"shape {tuple(positions.shape)}")
            if node_mask is not None:
                positions = positions.masked_fill(~node_mask[..., None], 0.0)
        if self.training:
            heads = torch.randint(2, (*tokens.shape[:-2], 1, self.positions), device=positions.device)
            positions = positions * (2 * heads - 1)
        return self.position_encoder(positions.to(self.position_encoder.weight))  # type: ignore[no-any-return]


@torch.no_grad()
def laplacian_positions(adjacency: Tensor, k: int, node_mask: Tensor | None = None) -> Tensor:
    """The eigenvectors of the normalised Laplacian of a graph to its smallest eigenvalues but the first.

    L = I - D^(-1/2) A D^(-1/2), with 1 in A between nodes that an edge joins in either direction, 0 elsewhere and on
    the diagonal, and the degrees D. A node without neighbours has the eigenvalue 1. The sign of an eigenvector v, which
    means nothing, is that with sum v^3 > 0: the same for every order of the nodes, unless the sum is 0 by a symmetry of
    the graph. Eigenvectors of an eigenvalue that occurs several times are any basis of their space.

    Args:
        adjacency: boolean or weighted, (*batch, N, N); entries that are not 0 are edges.
        k: number of eigenvectors, >= 0.
        node_mask: which nodes exist, boolean, (*batch, N). The eigenvectors are those of the graph of these nodes.

    Returns:
        (*batch, N, k), of length 1 each, float64 on the device of `adjacency`; 0 for missing nodes, and for the
        eigenvectors that a graph with k nodes or fewer does not have.

    Raises:
        TypeError, ValueError: shapes and dtypes that do not fit.

    Gradients: none.

    Examples:
        >>> import torch
        >>> from implicit_attention.models import laplacian_positions
        >>> star = torch.zeros(3, 3)
        >>> star[0, 1:] = 1
        >>> laplacian_positions(star, 2).round(decimals=3)[:, 1].abs()
        tensor([0.7070, 0.5000, 0.5000], dtype=torch.float64)

    Not for graphs with many thousands of nodes: all eigenvectors are computed, in a time of order N^3.
    """
    edges = _edges(adjacency)
    k = _validate.check_integer("k", k, low=0)
    count = edges.shape[-1]
    if node_mask is None:
        node_mask = torch.ones(count, dtype=torch.bool, device=edges.device)
    _check_nodes(node_mask, (*node_mask.shape[:-1], count))
    _validate.check_same_kind([("adjacency", edges), ("node_mask", node_mask)])
    _validate.check_together("node_mask", node_mask.shape[:-1], edges.shape[:-2], "the leading axes of `adjacency`")
    diagonal = torch.eye(count, dtype=torch.bool, device=edges.device)
    joined = (edges | edges.mT) & ~diagonal & node_mask[..., :, None] & node_mask[..., None, :]
    joined = joined.double()
    scale = joined.sum(-1).clamp(min=1).rsqrt()
    laplacian = diagonal.double() - scale[..., :, None] * joined * scale[..., None, :]
    # Eigenvalues are at most 2: missing nodes, each an eigenvector of its own, come last.
    laplacian = laplacian + torch.diag_embed(2.0 * ~node_mask)
    vectors = torch.linalg.eigh(laplacian)[1][..., 1 : k + 1]
    number = torch.arange(1, vectors.shape[-1] + 1, device=edges.device)
    present = (number < node_mask.sum(-1, keepdim=True))[..., None, :] & node_mask[..., None]
    vectors = torch.where(present, vectors, 0.0)
    vectors = torch.where(vectors.pow(3).sum(-2, keepdim=True) < 0, -vectors, vectors)
    return F.pad(vectors, (0, k - vectors.shape[-1]))


def _check_nodes(node_mask: Any, shape: tuple[int, ...]) -> None:
    """Raise unless a boolean mask broadcasts to (*batch, N), with all N nodes."""
    _validate.check_boolean("node_mask", node_mask, "be boolean, True = the node exists")
    fits, received = node_mask.shape[-1:] == shape[-1:], f"shape {tuple(node_mask.shape)}"
    _validate.require(fits, "node_mask", f"have one entry for each of the {shape[-1]} nodes", received)
    _validate.check_broadcast("node_mask", node_mask.shape, shape, "(*batch, N)")


def _edges(adjacency: Any) -> Tensor:
    """The edges that exist, boolean (*batch, N, N)."""
    if not isinstance(adjacency, Tensor):
        remedy = "convert it with torch.as_tensor, or scipy's sparse matrices with .toarray() before"
        raise TypeError(_validate.message("adjacency", "be a torch.Tensor", type(adjacency).__name__, remedy))
    _validate.check_dense("adjacency", adjacency)
    shape = f"shape {tuple(adjacency.shape)}"
    remedy = "make one of a list of edges: adjacency[sources, targets] = 1"
    square = adjacency.ndim >= 2 and adjacency.shape[-1] == adjacency.shape[-2]
    _validate.require(square, "adjacency", "have shape (*batch, N, N)", shape, remedy)
    if adjacency.dtype == torch.bool:
        return adjacency
    if adjacency.is_floating_point() and host_may_look_at_constant(adjacency):
        remedy = "write 0 where there is no edge"
        _validate.require(not bool(adjacency.isnan().any()), "adjacency", "hold numbers", "NaN", remedy)
    return adjacency != 0
