"""Log-sum-exp of distances: attention to the nearest keys, whatever their norms."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._autograd import at_least_single, host_may_look, sum_to_shape
from ._shapes import Keys, PerBatch, ReadOut, States, Values, Weights
from .log_sum_exp import LogSumExp, OverLogSumExp
from .masked_keys import Masks

#: Scores beta |k|^2 beyond which weights in float32 lose their fifth digit.
LARGEST = 256.0


class DistanceLogSumExp(OverLogSumExp):
    r"""Log-sum-exp of distances.

    ```math
    \Phi(z) = \frac1\beta \log \sum_j e^{\beta \left( \langle k_j, z \rangle - |k_j|^2/2 \right) + \text{bias}_j}
    ```

    As <k, z> - |k|^2/2 = |z|^2/2 - |z - k|^2/2, its weights are p = softmax(-beta |z - k_j|^2/2 + bias): the nearest
    key has the largest, where `LogSumExp` prefers long keys. |z|^2/2 - Phi(z) = -(1/beta) log sum_j exp(-beta
    |z - k_j|^2/2 + bias_j), the negative log density of Gaussians of variance 1/beta around the keys.

    Args:
        keys: (*batch, M, D), as in `LogSumExp`.
        beta: inverse temperature, as in `LogSumExp`.
        **masks: `mask`, as in `LogSumExp`; a query whose keys are all masked has value 0 and mean 0; `bias`, added to
            the scaled scores, as in `LogSumExp`; the squares of the keys are not a part of it.

    Raises:
        TypeError, ValueError: as `LogSumExp`.

    Far from the origin, where beta |k_j|^2 > 256, distances are small differences of large products: float32 keys on a
    CPU are then read in float64 at every evaluation, which takes several times as long. On an accelerator, where nobody
    looks at their size, subtract a mean from keys and queries first: distances stay as they are. That also makes `rtol`
    what it is meant to be, which is relative to |z|, offset included.

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

    def __init__(self, keys: Keys, beta: PerBatch, **masks: Unpack[Masks]) -> None:
        super().__init__(LogSumExp(keys, beta, **masks))

    def whole(self) -> LogSumExp:
        """Log-sum-exp with the bias -beta |k_j|^2/2 of every key, made of the keys as they are now.

        So it is exact where a solve widens half precision, in which the squares have three digits.
        """
        made = copy.copy(self.parts[0])
        of_keys = -made._scale / 2 * self._squares()[..., None, :]
        # Far away is not masked.
        of_keys = of_keys.clamp(min=torch.finfo(made.keys.dtype).min).to(made.keys.dtype)
        bias = made.bias
        made.bias = of_keys if bias is None else (bias + of_keys).where(torch.ne(bias, -torch.inf), -torch.inf)
        return made

    def own_gradients(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (given,) = self.parts
        *found, by_whole = gradients
        assert found[0] is not None
        assert by_whole is not None
        # What is summed over the queries is all that the squares need.
        by_key = by_whole.sum(-2)
        shares = sum_to_shape(-given._row_scale * by_key, given.keys.shape[:-1])
        found[0] = found[0] + shares[..., None] * self._finite()
        if isinstance(given.beta, Tensor):
            assert found[1] is not None
            found[1] = found[1] - sum_to_shape((by_key * self._squares()).sum(-1) / 2, given.beta.shape)
        if given.bias is not None:
            summed = by_whole.shape[-2] == 1 < given.bias.ndim and given.bias.shape[-2] > 1
            found.append(None if summed else sum_to_shape(by_whole, given.bias.shape))
        return tuple(found)

    def _finite(self) -> Tensor:
        """The keys, zeros for numbers that are not finite: a key says so itself, to the queries that read it."""
        keys = self.parts[0].keys
        finite: Tensor = at_least_single(keys.where(torch.isfinite(keys), 0.0))
        return finite

    def _squares(self) -> Tensor:
        """|k_j|^2, (*batch, M)."""
        return self._finite().square().sum(-1)

    def probabilities(self, z: States) -> Weights:
        """softmax(-beta |z - k_j|^2/2 + bias), (*batch, N, M); zeros for a query that attends to no key."""
        whole, read = self._whole_at(z)
        return whole.probabilities(read).to(z.dtype)

    def readout(self, z: States, values: Values, *, dropout_p: float = 0.0) -> ReadOut:
        """probabilities(z) V; see `LogSumExp.readout`."""
        whole, read = self._whole_at(z)
        return whole.readout(read, values.to(read.dtype), dropout_p=dropout_p).to(z.dtype)

    def loses_digits(self) -> bool:
        given = self.parts[0]
        if given.keys.dtype != torch.float32 or not host_may_look(*given.tensors()):
            return False
        with torch.no_grad():
            return bool((given._row_scale * self._squares() > LARGEST).any())

    def _whole_at(self, z: Tensor) -> tuple[LogSumExp, Tensor]:
        if not self.loses_digits():
            return self.whole(), z
        wide = self.replace(*(t.double() if t.is_floating_point() else t for t in self.tensors()))
        return wide.whole(), z.double()
