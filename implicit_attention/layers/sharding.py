"""Heads spread over processes: `parallelize_module` with column-wise query, key and value, and row-wise output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .. import _validate
from .projections import is_called_plainly

_LINEAR = nn.Linear.forward

T = TypeVar("T", float, Tensor, Tensor | None, float | Tensor)


@dataclasses.dataclass(frozen=True)
class HeadShard:
    """Which heads this process has: part `index` of `count` equal ones, over the processes of `mesh`."""

    mesh: Any
    index: int
    count: int

    def own(self, given: T, axis: int = -1) -> T:
        """Return the part of `given` for this process's heads, along `axis`; one for all heads stays whole."""
        if not isinstance(given, Tensor) or given.ndim < -axis or given.shape[axis] == 1:
            return given
        if _validate.is_distributed(given) and given.placements[0].is_shard():  # type: ignore[attr-defined]
            # A parameter that is sharded by heads has its gradient on this process alone.
            return given.to_local()  # type: ignore[attr-defined, no-any-return]
        here = given.shape[axis] // self.count
        return self.shared(given).narrow(axis, self.index * here, here)

    def shared(self, given: Tensor) -> Tensor:
        """Return a tensor that all processes have; its gradient is the sum of theirs."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if isinstance(given, DTensor):
            # Without this step the gradient of a parameter would stay a partial sum.
            return given.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        if not given.requires_grad:
            return given
        everywhere = DTensor.from_local(given, self.mesh, [Replicate()], run_check=False)
        return everywhere.to_local(grad_placements=[Partial()])


def called(projection: nn.Module | None, x: Tensor, *, eager: bool) -> Tensor:
    """projection(x), or x where there is none; `eager` is `attention.function.eager()`.

    A call of a plain linear module is one operation of torch, and `nn.Module` adds half of its time for few tokens.
    """
    if projection is None:
        return x
    if eager and type(projection) is nn.Linear and nn.Linear.forward is _LINEAR and is_called_plainly(projection):
        parameters = projection._parameters
        if "weight" in parameters and "bias" in parameters:
            return F.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]
    made: Tensor = projection(x)
    return made


def projected(
    projection: nn.Module | None, norm: nn.Module | None, x: Tensor, head_dim: int, heads: int, *, eager: bool
) -> Tensor:
    """The heads that a projection makes of x on this process, normalised, (*batch, heads or fewer, N, head_dim)."""
    flat = called(projection, x, eager=eager)
    if type(flat) is not Tensor:
        _validate.check_local("a projection of x", flat)
    (*lead, width), (*wanted, _) = flat.shape, x.shape
    if lead != wanted or width % head_dim:
        raise ValueError(_refusal(f"shape {tuple(flat.shape)} from x of shape {tuple(x.shape)}", heads))
    made = flat.view(*lead, width // head_dim, head_dim).transpose(-3, -2)
    if norm is None:
        return made
    if made.shape[-3] == heads and not _validate.is_distributed(norm.weight):
        whole: Tensor = norm(made)
        return whole
    shard = _shard_of([projection], heads)
    part: Tensor = functional_call(norm, {name: shard.shared(p) for name, p in norm.named_parameters()}, (made,))
    return part


def check_whole(argument: str, flat: Tensor, width: int) -> Tensor:
    """Return a projection's output, or raise where a part of it is on another process."""
    _validate.check_local(argument, flat)
    required = f"make width {width}, as its heads cannot be spread over processes"
    received, remedy = f"width {flat.shape[-1]}", "leave the layer out of the plan of parallelize_module"
    _validate.require(flat.shape[-1] == width, argument, required, received, remedy)
    return flat


def head_shard(
    parts: tuple[Tensor, Tensor, Tensor | None], projections: Sequence[nn.Module | None], heads: int, kv_heads: int
) -> HeadShard | None:
    """The shard of the heads in `parts` (queries, keys, values), or None if these are all heads.

    Args:
        parts: (*batch, heads of this process, N or M, head_dim).
        projections: of queries, keys, values and the output; None where there is none.
        heads: of queries, over all processes.
        kv_heads: of keys and values, over all processes.
    """
    queries, keys, values = parts
    # On a mesh of one process, too, the parameters are DTensors.
    whole = type(weight_of(projections[-1])) is nn.Parameter or _placed(projections[-1]) == (None, None)
    read = keys if values is None else values
    if whole and queries.shape[-3] == heads and keys.shape[-3] == read.shape[-3] == kv_heads:
        return None
    here = [queries.shape[-3], keys.shape[-3], read.shape[-3]]
    *inward, outward = projections
    shard = _shard_of([p for p in inward if p is not None], heads, kv_heads)
    if [n * shard.count for n in here] != [heads, kv_heads, kv_heads] or _placed(outward) != (shard.mesh, 1):
        raise ValueError(_refusal(f"{here[0]} heads of queries, {here[1]} of keys, {here[2]} of values", heads))
    return shard


def _shard_of(inward: Sequence[nn.Module | None], *heads: int) -> HeadShard:
    placed = [_placed(projection) for projection in inward]
    mesh, axis = placed[0]
    if axis != 0 or any(other != placed[0] for other in placed) or any(n % mesh.size() for n in heads):
        axes = ", ".join("not sharded" if axis is None else f"sharded on axis {axis}" for _, axis in placed)
        raise ValueError(_refusal(f"weights that are {axes}", *heads))
    return HeadShard(mesh, mesh.get_local_rank(), mesh.size())


def weight_of(projection: nn.Module | None) -> Any:
    """Return the weight, without the search of `nn.Module` for an attribute; None where there is none."""
    parameters = {} if projection is None else projection._parameters
    return parameters["weight"] if "weight" in parameters else getattr(projection, "weight", None)


def _placed(projection: nn.Module | None) -> tuple[Any, int | None]:
    """(mesh, axis on which the weight is sharded) on a mesh of one dimension, else (None, None)."""
    weight = weight_of(projection)
    if type(weight) is nn.Parameter:
        return None, None
    if not _validate.is_distributed(weight) or weight.device_mesh.ndim != 1 or not weight.placements[0].is_shard():
        return None, None
    return weight.device_mesh, weight.placements[0].dim


def _refusal(received: str, *heads: int) -> str:
    required = (
        "be sharded alike by ColwiseParallel(), and `out_proj` by RowwiseParallel(), over a number of processes that "
        f"divides the heads ({' and '.join(map(str, heads))}), each of which sees all tokens"
    )
    remedy = "use layer.parallel_plan(), leave the layer out of the plan, or gather x before it (PrepareModuleInput)"
    return _validate.message("q_proj`, `k_proj` and `v_proj", required, received, remedy)
