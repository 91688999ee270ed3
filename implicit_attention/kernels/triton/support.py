"""Whether the Triton kernels can do a problem; asking this imports no Triton."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ..problem import Hopfield
from .layout import AXES, KernelLayout, interpreted, largest_dim

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: The least rtol of a solve whose products are formed in half precision.
FINEST = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
# Tensor cores with bfloat16 and the asynchronous copies that the kernels count on.
LEAST_CAPABILITY = (8, 0)


def unsupported(problem: Hopfield) -> str | None:
    """Why the Triton kernels cannot do `problem`, as "what is unsupported; what to use"; None if they can."""
    device, dim = problem.field.device, problem.field.shape[-1]
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it (`pip install triton`) or use impl='auto'"
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"Triton kernels do not run on the device {str(device)!r}; use a CUDA device or impl='auto'"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"Triton kernels need compute capability 8.0 or more, this device has {capability}; use impl='auto'"
    for name, tensor in (("field", problem.field), ("keys", problem.keys)):
        if tensor.dtype not in DTYPES:
            return f"Triton kernels do not compute in {tensor.dtype} ({name}); use float32, or impl='auto'"
    if not 1 <= dim <= largest_dim(problem.keys.dtype):
        most = f"{largest_dim(problem.keys.dtype)} with keys in {problem.keys.dtype}"
        return f"Triton kernels do not take a head dimension of {dim}; use at most {most}, or impl='auto'"
    if _is_double(problem.mask) or _is_double(problem.beta) or _is_double(problem.anchor):
        return "Triton kernels do not read float64 masks, betas or anchors; use float32, or impl='auto'"
    if KernelLayout.of(problem) is None:
        return (
            f"Triton kernels take at most {AXES} leading axes along which the strides are irregular; "
            "make the tensors contiguous, or use impl='auto'"
        )
    return None


def hidden(keys: Tensor, rule: FusedRule) -> float:
    """The error of residuals by the rounding of products with keys in half precision, in units of |f(z)|, at most.

    Against float64 it was .15 eps in most solves and .4 eps at most.
    """
    told = rule.max_steps > 0 and not rule.fixed_budget
    return 0.4 * torch.finfo(keys.dtype).eps if told and keys.dtype in FINEST else 0.0


def too_fine(keys: Tensor, rule: FusedRule) -> str | None:
    """Why a solve by Triton cannot tell whether it has reached a tolerance, atol apart; None if it can."""
    if not hidden(keys, rule) or rule.rtol >= FINEST[keys.dtype]:
        return None
    reason = f"products in {keys.dtype} are rounded, which may hide {hidden(keys, rule):.1g} |f(z)| of residuals"
    return f"{reason}; use rtol >= {FINEST[keys.dtype]:g}, got {rule.rtol:g}, float32 keys, or impl='auto'"


def _is_double(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float64
