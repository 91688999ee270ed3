"""What potentials over a set of keys share: checks of keys, beta and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from ..ops.problem import common
from .base import Potential


class KeyPotential(Potential):
    """Base of potentials that are sums over keys (*batch, M, D) at inverse temperature beta.

    `beta` is a float or a tensor that broadcasts to *batch.
    """

    keys: Tensor
    beta: float | Tensor

    def __init__(self, keys: Tensor, beta: float | Tensor) -> None:
        _validate.check_float_tensor("keys", keys, min_ndim=2)
        if keys.shape[-2] == 0:
            received = f"shape {tuple(keys.shape)}"
            raise ValueError(_validate.message("keys", "hold at least one key", received, "mask keys out instead"))
        self.keys = keys
        if isinstance(beta, Tensor):
            _validate.check_float_tensor("beta", beta)
            _validate.check_same_kind([("keys", keys), ("beta", beta)])
            _validate.check_together("beta", beta.shape, keys.shape[:-2], "the leading axes of `keys`")
            _validate.check_range(
                "beta", beta, low=0.0, open_low=True, remedy="parametrise it, for example as an exponential"
            )
        else:
            beta = _validate.check_number("beta", beta, low=0.0, open_low=True)
        self.beta = beta

    @property
    def _row_scale(self) -> float | Tensor:
        """Beta, shaped to multiply one number per row."""
        if not isinstance(self.beta, Tensor):
            return self.beta
        return _validate.inside(self.beta, low=0.0, open_low=True)[..., None]

    @property
    def _scale(self) -> float | Tensor:
        """Beta, shaped to multiply scores or states."""
        scale = self._row_scale
        return scale[..., None] if isinstance(scale, Tensor) else scale

    def check_state(self, argument: str, z: Tensor) -> None:
        _validate.check_float_tensor(argument, z, min_ndim=2)
        if z.shape[-1] != self.keys.shape[-1]:
            required = f"have the keys' dimension {self.keys.shape[-1]} on its last axis"
            raise ValueError(_validate.message(argument, required, f"shape {tuple(z.shape)}"))
        _validate.check_same_kind([("keys", self.keys), (argument, z)])
        _validate.check_broadcast("keys", self.keys.shape[:-2], z.shape[:-2], f"the leading axes of `{argument}`")
        if isinstance(self.beta, Tensor):
            _validate.check_broadcast("beta", self.beta.shape, z.shape[:-2], f"the leading axes of `{argument}`")

    def diameter(self) -> Tensor:
        """The largest distance between two keys of a set, (*batch), or slightly more; blocks, no (M, M, D) tensor."""
        keys = in_double(self.keys)
        # Matrix products tell no distance that is small beside the keys themselves.
        keys = keys - common(keys)
        blocks = [torch.cdist(part, keys).amax(dim=(-1, -2)) for part in torch.split(keys, 512, dim=-2)]
        largest = torch.stack(blocks).amax(0) * (1 + 8 * keys.shape[-1] * torch.finfo(keys.dtype).eps)
        return (largest * (1 + 2 * torch.finfo(self.keys.dtype).eps)).to(self.keys)


def in_double(tensor: Tensor) -> Tensor:
    """The same numbers in float64, where the device has it."""
    return tensor.detach().to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)


def check_pairs(argument: str, pairs: Tensor, keys: Tensor) -> None:
    count = keys.shape[-2]
    if pairs.ndim < 1 or (pairs.shape[-1] != 1 and pairs.shape[-1] != count):
        required = f"broadcast to (*batch, N, M) with M = {count} keys"
        raise ValueError(_validate.message(argument, required, f"shape {tuple(pairs.shape)}"))


def check_mask(mask: Tensor, keys: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(
            _validate.message(
                "mask",
                "be a boolean tensor (True = attend)",
                getattr(mask, "dtype", type(mask).__name__),
                "pass additive masks as `bias`",
            )
        )
    _validate.check_dense("mask", mask)
    _validate.check_same_kind([("keys", keys), ("mask", mask)])
    check_pairs("mask", mask, keys)
