"""`hopfield_cg` as an operation of torch: known to the compiler and to vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._reporting import report_failures
from ...solution import Record
from ..problem import Hopfield
from ..registration import PROBLEM, batched
from .api import dispatch, may_look

hopfield_cg_op = torch.library.custom_op(
    "implicit_attention::hopfield_cg",
    lambda *args: _solve(*args),
    mutates_args=(),
    schema=f"({PROBLEM}, Tensor state, Tensor cotangent, float? rtol, int max_steps, str impl, str on_failure) -> "
    f"({', '.join(['Tensor'] * 8)})",
)


def _solve(*args: Any) -> tuple[Tensor, ...]:
    *given, on_failure = args[6:]
    found = dispatch(Hopfield(*args[:6]), *given)
    if may_look(found.status):
        # Here, because this runs where a compiled graph does: nobody else sees what a backward pass did in there.
        what = "the adjoint solve of `hopfield_solve`, whose gradient is therefore wrong,"
        report_failures(on_failure, what, Record(*found[1:5], num_evals=found.num_steps))
    # Results of an operation share no memory.
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in found)


@hopfield_cg_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    keys, state = args[1], args[6]
    row = state.new_empty(state.shape[:-1])
    return (
        torch.empty_like(state, memory_format=torch.contiguous_format),
        torch.empty_like(row, dtype=torch.int8),
        torch.empty_like(row),
        torch.empty_like(row),
        torch.empty_like(row, dtype=torch.int32),
        torch.empty_like(row, dtype=torch.bool),
        torch.empty_like(row),
        state.new_empty(keys.shape),
    )


hopfield_cg_op.register_vmap(batched(hopfield_cg_op, states=(0, 6, 7), outputs=8, keys=True))
