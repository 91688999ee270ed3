"""The exact log-partition function of small Ising systems, by adding up all states."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .. import _validate
from ._request import closed_form
from .approximation import Approximation, LogPartition, require_ising
from .system import SpinSystem

LARGEST = 20
# Number of states in memory at a time, for every sample.
BLOCK = 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Enumeration(Approximation):
    r"""The sum over all 2^N states: exact, for D = 1 and N <= 20.

    ```math
    \log Z = \log \left( \operatorname{mean}_s\, e^{-\beta E(s)} \right)
    ```

    Not for more than 20 sites or for vectors: use `AdaTAP()`, on lattices
    `SaddlePoint(one_loop=True)`, `TransferMatrix()` for chains, or samples.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Enumeration, SpinSystem, magnetization
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> magnetization(system, Enumeration())[:, 0].round(decimals=3)
        tensor([0.2910, 0.1350])
    """

    exact = True

    def check(self, system: SpinSystem) -> None:
        require_ising(self, system)
        remedy = "use AdaTAP, on lattices SaddlePoint(one_loop=True), or sample"
        required, n = f"have at most {LARGEST} sites", system.num_sites
        _validate.require(n <= LARGEST, "system", required, n, remedy)
        super().check(system)

    def log_partition(self, system: SpinSystem) -> LogPartition:
        count, dtype = 2**system.num_sites, system.field.dtype
        # Energies in strong fields differ by less than they round to in float32.
        system = system.wide()
        couplings, field = system.live_couplings, system.live_field[..., 0]
        parts = []
        for start in range(0, count, BLOCK):
            spins = system.radius * states(start, min(start + BLOCK, count), system.num_sites, field)
            pair = ((spins @ couplings) * spins).sum(-1) / 2
            weight = pair + torch.einsum("si,...i->...s", spins, field)
            # The largest weight is taken out before beta is multiplied in, or derivatives by beta lose digits.
            top = weight.detach().amax(-1, keepdim=True)
            beta = system.beta_over(1)
            parts.append(log_mean_exp(beta * (weight - top)) + (beta * top)[..., 0])
        value = log_mean_exp(torch.stack(parts, dim=-1)).to(dtype)
        return LogPartition(value, closed_form(value))


def log_mean_exp(x: Tensor, dim: int = -1, log_weights: Tensor | None = None) -> Tensor:
    """L = log sum w exp(x) for weights that sum to 1, all equal if None: it loses no digit where x is small."""
    if log_weights is None:
        log_weights = x.new_full((), -math.log(x.shape[dim]))
        value = x.logsumexp(dim) + log_weights
    else:
        value = (x + log_weights).logsumexp(dim)
    with torch.no_grad():
        # sum w (exp(x - L) - 1) is 0 but for the rounding of L.
        rest = (log_weights.exp() * torch.expm1(x - value.unsqueeze(dim))).sum(dim)
        rest = torch.where(rest.abs() < 1e-6, rest, 0.0)
    return value + rest


def states(start: int, stop: int, sites: int, like: Tensor) -> Tensor:
    """Rows of +-1, the states number start to stop."""
    number = torch.arange(start, stop, device=like.device)[:, None]
    bits = (number >> torch.arange(sites, device=like.device)) & 1
    return (2 * bits - 1).to(like.dtype)
