"""The plan by which `parallelize_module` spreads the heads of an `ImplicitAttention` over processes."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from .. import _validate
from .projections import Fixed


class Placed(ParallelStyle):
    """Distributes the parameters of a module, and leaves its forward alone.

    Parameters that are alike on all processes are distributed, too: optimisers and the clipping of gradients do not
    take DTensors together with plain tensors.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._place)

    def _place(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter, mesh, [self.placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.placement})"


def head_plan(layer: nn.Module, **counts: int) -> dict[str, ParallelStyle]:
    """The styles of the parts of an `ImplicitAttention`, by name; `counts` of its heads by the names of arguments."""
    remedy = "leave the layer out of the plan, so that every process computes all of it"
    for name, count in counts.items():
        _validate.require(count > 1, name, "be > 1 to be spread over processes", count, remedy)
    styles: dict[str, ParallelStyle] = {
        "anchor": Placed(Shard(0)),
        "beta": Placed(Shard(0)),
        "q_norm": Placed(Replicate()),
        "k_norm": Placed(Replicate()),
        "q_proj": ColwiseParallel(),
        "k_proj": ColwiseParallel(),
        "v_proj": ColwiseParallel(),
        "out_proj": RowwiseParallel(),
    }
    parts = dict(layer.named_children())
    return {name: style for name, style in styles.items() if name in parts and not isinstance(parts[name], Fixed)}
