"""Softmax with a null key: attention that may attend to nothing."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from .base import Composite
from .log_sum_exp import LogSumExp


class Softmax1(Composite):
    """Phi(z) = (1/beta) log(1 + sum_j exp(beta <k_j, z> + bias_j)): log-sum-exp with one more key, 0, of score 0.

    mean(z) = sum_j p_j k_j with p_j = exp(s_j)/(1 + sum_i exp(s_i)), whose sum is below 1: the rest attends to nothing.
    With l the log-sum-exp of the scores it is sigmoid(l) times the softmax mean.

    Args:
        keys: (*batch, M, D), as in `LogSumExp`.
        beta: inverse temperature, as in `LogSumExp`.
        mask: as in `LogSumExp`; a query whose keys are all masked has value 0 and mean 0.
        bias: as in `LogSumExp`.

    Raises:
        TypeError, ValueError: as `LogSumExp`.

    Gradients: with respect to z, keys, beta and bias, to any order.

    Reference: Miller (2023), Attention is off by one; Xiao et al. (2024), section 3.2, where it is a zero sink.

    Not for pretrained softmax attention, whose outputs it makes smaller: use `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.potentials import Softmax1
        >>> phi = Softmax1(keys=10 * torch.eye(2), beta=1.0)
        >>> phi.probabilities(torch.tensor([[1.0, 0.0], [-1.0, -1.0]])).sum(-1).round(decimals=2)
        tensor([1., 0.])
        >>> ImplicitAttention(8, heads=2, potential=Softmax1)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    declares_all = True
    parts: tuple[LogSumExp]

    def __init__(
        self,
        keys: Float[Tensor, "*batch M D"],
        beta: float | Float[Tensor, "*#batch"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        super().__init__(LogSumExp(keys, beta, mask=mask, bias=bias))

    def value(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """Phi(z), (*batch, N, D) -> (*batch, N)."""
        return self._evaluated(z)[0]

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """sum_j p_j k_j, (*batch, N, D) -> (*batch, N, D)."""
        return self._evaluated(z)[1]

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._evaluated(z)

    def covariance_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess Phi(z) v: the covariance of the keys that are attended to, and of attending to one at all."""
        (softmax,) = self.parts
        mean, weight, rest = self._attended(z)
        between = softmax._scale * rest * mean * (mean * v).sum(-1, keepdim=True)
        return weight * (softmax.covariance_product(z, v) + between)

    def probabilities(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N M"]:
        """p, (*batch, N, M), whose rows sum to less than 1."""
        return self._attended(z)[1] * self.parts[0].probabilities(z)

    def readout(
        self, z: Float[Tensor, "*batch N D"], values: Float[Tensor, "*#batch M E"], *, dropout_p: float = 0.0
    ) -> Float[Tensor, "*batch N E"]:
        """probabilities(z) V; see `LogSumExp.readout`."""
        return self._attended(z)[1] * self.parts[0].readout(z, values, dropout_p=dropout_p)

    def bounded_below(self, scale: float) -> bool:
        return self.parts[0].bounded_below(scale)

    def lipschitz(self) -> Tensor:
        """That of `LogSumExp` over the keys and 0."""
        (softmax,) = self.parts
        return LogSumExp(F.pad(softmax.keys, (0, 0, 0, 1)), softmax.beta).lipschitz()

    def _evaluated(self, z: Tensor) -> tuple[Tensor, Tensor]:
        (softmax,) = self.parts
        mean, logsumexp = softmax.readout_with_logsumexp(z, softmax.keys)
        return -F.logsigmoid(-logsumexp) / softmax._row_scale, logsumexp.sigmoid()[..., None] * mean

    def _attended(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The softmax mean, how much of the attention goes to keys, and how much to nothing."""
        (softmax,) = self.parts
        mean, logsumexp = softmax.readout_with_logsumexp(z, softmax.keys)
        return mean, logsumexp.sigmoid()[..., None], (-logsumexp).sigmoid()[..., None]
