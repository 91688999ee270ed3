"""The problem of all operations, softmax attention at an equilibrium as plain tensors, and the results of a solve.

The steps are those of `solvers.Anderson(history=1)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from .. import _validate
from ..linear.base import FINEST_RTOL, HALF_RTOL
from ..solution import Record, Status

#: Relative tolerance of an adjoint solve that is within reach of the precision in which products are formed.
RTOL = {**FINEST_RTOL, torch.float16: HALF_RTOL, torch.bfloat16: HALF_RTOL}
#: Solves with products in half precision: the default rtol, the least, and to what part of |f(z)| residuals are known.
SOLVE_RTOL, FINEST, FLOOR = 1e-3, 1e-5, 2e-6
MAX_STEPS = 500
Impl: TypeAlias = Literal["auto", "reference", "native", "triton"]


def check_impl(argument: str, impl: Any) -> None:
    """Raise unless `impl` names an implementation."""
    remedy = "tiles of products were slower than the loop that answers where no kernel does: use impl='auto'"
    _validate.check_choice(argument, impl, get_args(Impl), remedy if impl == "tiled" else "")


class FusedRule(NamedTuple):
    """The rule of a fused solve: its tolerances |f(z) - z|_2 <= atol + rtol |f(z)|_2, budget, and first plain steps.

    From step `plain_steps` on, steps are those of `Anderson(history=1)` on an energy that plain steps lower;
    `plain_steps > max_steps` is Picard's iteration. With rtol = atol = 0 exactly `max_steps` steps are made.
    """

    rtol: float
    atol: float
    max_steps: int
    plain_steps: int

    @property
    def fixed_budget(self) -> bool:
        return self.rtol == 0 and self.atol == 0

    @property
    def exhausted(self) -> Status:
        """Return the status of a problem that has used up its budget."""
        if self.max_steps == 0:
            return Status.EXPLICIT
        return Status.BUDGET if self.fixed_budget else Status.MAX_STEPS


#: One evaluation, where the state is.
THERE = FusedRule(0.0, 0.0, max_steps=0, plain_steps=2)


class Attention(NamedTuple):
    """Softmax attention of queries over keys, and its equilibria: what kernels and the loop solve, and doors read out.

    E(z) = |z|^2/2 - anchor <x, z> - (1 - anchor)/beta log sum_j exp(beta <k_j, z> + bias_j), over the attended keys.

    query: x, (*batch, N, D).
    keys: (*#batch, M, D).
    beta, anchor: numbers or tensors (*#batch).
    mask: boolean, True = the query attends to the key, broadcasts to (*batch, N, M), or None.
    bias: added to the scaled scores, broadcasts to (*batch, N, M), or None; -inf masks.
    first: the index of the first query among the keys, where query i attends to keys up to first + i; None where every
        query attends to every key.
    values: what is read out at the equilibria, (*#batch, M, E), or None; no kernel reads it.
    dropout: the part of the weights that the read-out drops.

    Not for calls of attention, which make it: use `equilibrium_attention`. A problem of one's own returns it from
    `as_attention`, to be solved by kernels.

    Examples:
        >>> import torch
        >>> from implicit_attention.kernels import Attention
        >>> Attention(torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), beta=0.5, anchor=0.5).pairs is None
        True
    """

    query: Tensor
    keys: Tensor
    beta: float | Tensor
    anchor: float | Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    first: int | None = None
    values: Tensor | None = None
    dropout: float = 0.0

    @classmethod
    def of(
        cls,
        query: Tensor,
        keys: Tensor,
        beta: float | Tensor,
        anchor: float | Tensor,
        pairs: Tensor | None = None,
        first: int | None = None,
    ) -> Attention:
        """The record with a mask or a bias, whichever `pairs` is."""
        return cls(query, keys, beta, anchor, first=first).paired(pairs)

    @property
    def pairs(self) -> Tensor | None:
        """The mask or the bias, of which there is one at most once they are `joined`."""
        return self.mask if self.bias is None else self.bias

    def paired(self, pairs: Tensor | None) -> Attention:
        """Return the record with a mask or a bias in the place of its own, whichever `pairs` is."""
        masks = pairs is None or pairs.dtype == torch.bool
        return self._replace(mask=pairs if masks else None, bias=None if masks else pairs)

    def joined(self) -> Attention:
        """Return the record with a bias in the place of both, and with a row of either, which kernels read."""
        pairs = self.pairs
        if self.mask is not None and self.bias is not None:
            pairs = self.bias.where(self.mask, -torch.inf)
        elif pairs is None or pairs.ndim > 1:
            return self
        return self.paired(pairs if pairs.ndim > 1 else pairs[None])

    def to(self, dtype: torch.dtype) -> Attention:
        """Return the record in another precision."""
        return mapped(self, lambda t: t if t.dtype == torch.bool else t.to(dtype))

    def detached(self) -> Attention:
        return mapped(self, Tensor.detach)


def mapped(record: Attention, function: Callable[[Tensor], Tensor]) -> Attention:
    """The record with `function` applied to every tensor."""
    return Attention(*(function(t) if isinstance(t, Tensor) else t for t in record))  # type: ignore[arg-type]


class AdjointRule(NamedTuple):
    """Tolerance of |g - A u| <= rtol |g| and the largest number of products A p."""

    rtol: float
    max_steps: int


class Solved(NamedTuple):
    """The final state of every query, with the measurements at that very state.

    state z and mean = softmax(beta K z) K: (*batch, N, D). The others are (*batch, N): logsumexp of the scaled scores,
    codes of `Status` (int8), residual |f(z) - z|, the tolerance it had to reach, updates and evaluations of f (int32).

    Not for `solve`, which answers with a `Solution`.

    Examples:
        >>> import torch
        >>> from implicit_attention.kernels import hopfield_solve
        >>> found = hopfield_solve(torch.randn(2, 4), torch.randn(70, 4), beta=0.3)
        >>> found.mean.shape, found.record.status.tolist()
        (torch.Size([2, 4]), [0, 0])
    """

    state: Tensor
    mean: Tensor
    logsumexp: Tensor
    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    num_evals: Tensor

    @classmethod
    def allocated(cls, empty: Callable[..., Tensor], shape: torch.Size, dtype: torch.dtype) -> Solved:
        """Tensors made by `empty(size, dtype=)` for states of that shape and dtype."""
        kinds = dtype, torch.int8, dtype, dtype, torch.int32, torch.int32
        states = (empty(shape, dtype=dtype) for _ in range(2))
        return cls(*states, *(empty(shape[:-1], dtype=kind) for kind in kinds))

    @property
    def record(self) -> Record:
        """Return the report of the solve."""
        return Record(self.status, self.residual, self.tolerance, self.num_steps, self.num_evals)


class AdjointAnswer(NamedTuple):
    """u with A u = g for A = I - (1 - anchor) beta Cov(z), the Hessian of E at z, and the gradients that u carries.

    value: u, (*batch, N, D). The fields between it and `by_keys` are (*batch, N): codes of `Status` (int8), the
    residual |g - A u| recomputed at u, its tolerance, products (int32), whether a direction of negative curvature was
    met (a solution where it was is a saddle, whose status says so), and by_beta, <df/dbeta, u> of the query.
    by_keys: (df/dK)^T u, of the keys' shape.

    Not for choosing how `solve` differentiates: that is `adjoints.Adjoint`.

    Examples:
        >>> import torch
        >>> from implicit_attention.kernels import hopfield_adjoint
        >>> state, keys = torch.zeros(2, 4), torch.randn(70, 4)
        >>> found = hopfield_adjoint(state, keys, state, torch.ones(2, 4), beta=0.3)
        >>> found.negative_curvature.tolist(), found.by_beta.shape
        ([False, False], torch.Size([2]))
    """

    value: Tensor
    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    negative_curvature: Tensor
    by_beta: Tensor
    by_keys: Tensor

    @property
    def record(self) -> Record:
        """Return the report of the solve."""
        return Record(self.status, self.residual, self.tolerance, self.num_steps, self.num_steps)

    @classmethod
    def allocated(
        cls, empty: Callable[..., Tensor], shape: torch.Size, keys: torch.Size, dtype: torch.dtype
    ) -> AdjointAnswer:
        """Tensors made by `empty(size, dtype=)` for states and keys of these shapes."""
        kinds = torch.int8, dtype, dtype, torch.int32, torch.bool, dtype
        each = [(shape, dtype), *((shape[:-1], kind) for kind in kinds), (keys, dtype)]
        return cls(*(empty(size, dtype=kind) for size, kind in each))
