"""Log-sum-exp of distances: attention to the nearest keys, whatever their norms."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .._autograd import at_least_single
from .log_sum_exp import LogSumExp, OverLogSumExp


class DistanceLogSumExp(OverLogSumExp):
    """Phi(z) = (1/beta) log sum_j exp(beta (<k_j, z> - |k_j|^2/2) + bias_j): log-sum-exp of distances.

    As <k, z> - |k|^2/2 = |z|^2/2 - |z - k|^2/2, its weights are p = softmax(-beta |z - k_j|^2/2 + bias): the nearest
    key has the largest, where `LogSumExp` prefers long keys. |z|^2/2 - Phi(z) = -(1/beta) log sum_j exp(-beta
    |z - k_j|^2/2 + bias_j), the negative log density of Gaussians of variance 1/beta around the keys.

    Args:
        keys: (*batch, M, D), as in `LogSumExp`.
        beta: inverse temperature, as in `LogSumExp`.
        mask: as in `LogSumExp`; a query whose keys are all masked has value 0 and mean 0.
        bias: added to the scaled scores, as in `LogSumExp`; the squares of the keys are not a part of it.

    Raises:
        TypeError, ValueError: as `LogSumExp`.

    Gradients: with respect to z, keys, beta and bias, to any order, those of the squares among them.

    Reference: Saha et al. (2023); in energy-based models the kernel density of the keys.

    Not for pretrained attention, whose weights are those of dot products: use `LogSumExp`. Where all keys have one
    length both are the same.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import DistanceLogSumExp
        >>> keys, z = torch.tensor([[1.0, 0.0], [9.0, 9.0]]), torch.tensor([[1.0, 0.0]])
        >>> LogSumExp(keys, beta=1.0).mean(z).round(decimals=2)
        tensor([[9., 9.]])
        >>> DistanceLogSumExp(keys, beta=1.0).mean(z).round(decimals=2)
        tensor([[1., 0.]])
    """

    declares_all = True

    def __init__(
        self,
        keys: Float[Tensor, "*batch M D"],
        beta: float | Float[Tensor, "*#batch"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        # Arguments are judged, and errors told, as they came.
        given = LogSumExp(keys, beta, mask=mask, bias=bias)
        # A key that is not finite says so itself, to the queries that read it; its square would to all.
        finite = at_least_single(keys.where(torch.isfinite(keys), 0.0))
        of_keys = -given._scale / 2 * finite.square().sum(-1)[..., None, :]
        # Far away is not masked.
        of_keys = of_keys.clamp(min=torch.finfo(keys.dtype).min).to(keys.dtype)
        bias = of_keys if bias is None else (bias + of_keys).where(torch.ne(bias, -torch.inf), -torch.inf)
        super().__init__(LogSumExp(keys, given.beta, mask=mask, bias=bias))

    def probabilities(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N M"]:
        """softmax(-beta |z - k_j|^2/2 + bias), (*batch, N, M); zeros for a query that attends to no key."""
        return self.parts[0].probabilities(z)

    def readout(
        self, z: Float[Tensor, "*batch N D"], values: Float[Tensor, "*#batch M E"], *, dropout_p: float = 0.0
    ) -> Float[Tensor, "*batch N E"]:
        """probabilities(z) V; see `LogSumExp.readout`."""
        return self.parts[0].readout(z, values, dropout_p=dropout_p)
