"""Log-sum-exp of distances: attention to the nearest keys, whatever their norms."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from .. import _validate
from .._torch import HALF, at_least_single, host_may_look, sum_to_shape
from ._read import joined
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
    CPU are then read in float64 at every evaluation, which takes several times as long. Where the mean of the keys
    (but zeros) is as far, and always where the host cannot look (accelerators, torch.func), `solve` subtracts it from
    keys and states, so that an offset neither costs digits nor loosens `rtol`, which is relative to |z|. In sums,
    subclasses, exported programs and half precision subtract it yourself: distances stay the same.

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
        if "query_offset" in masks:
            required, remedy = "be left out of DistanceLogSumExp", "put the triangle into the mask"
            raise TypeError(_validate.message("query_offset", required, "one", remedy))
        super().__init__(LogSumExp(keys, beta, **masks))

    def whole(self) -> LogSumExp:
        """Log-sum-exp with the bias -beta |k_j|^2/2 of every key, computed from the present keys.

        So it is exact where a solve widens half precision, in which the squares have three digits.
        """
        whole = copy.copy(self.parts[0])
        squares = -whole._scale / 2 * self._squares()[..., None, :]
        # A key that is far away is not masked.
        squares = squares.clamp(min=torch.finfo(whole.keys.dtype).min).to(whole.keys.dtype)
        bias = whole.bias
        whole.bias = squares if bias is None else (bias + squares).where(torch.ne(bias, -torch.inf), -torch.inf)
        return whole

    def own_gradients(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (part,) = self.parts
        *own, by_bias = gradients
        assert own[0] is not None
        assert by_bias is not None
        # The squares need no more than the sum over the queries.
        by_key = by_bias.sum(-2)
        shares = sum_to_shape(-part._row_scale * by_key, part.keys.shape[:-1])
        own[0] = own[0] + shares[..., None] * self._finite()
        if isinstance(part.beta, Tensor):
            assert own[1] is not None
            own[1] = own[1] - sum_to_shape((by_key * self._squares()).sum(-1) / 2, part.beta.shape)
        if part.bias is not None:
            summed = by_bias.shape[-2] == 1 < part.bias.ndim and part.bias.shape[-2] > 1
            own.append(None if summed else sum_to_shape(by_bias, part.bias.shape))
        return tuple(own)

    def _finite(self) -> Tensor:
        """The keys with zeros for numbers that are not finite: the queries that read such a key are NaN anyway."""
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
        part = self.parts[0]
        return part.keys.dtype == torch.float32 and host_may_look(*part.tensors()) and self._is_far(self._squares())

    @torch.no_grad()
    def _is_far(self, squares: Tensor) -> bool:
        return bool((self.parts[0]._row_scale * squares > LARGEST).any())

    def _about_origin(self) -> tuple[Self, Tensor] | None:
        part = self.parts[0]
        if type(self) is not DistanceLogSumExp or part.keys.dtype in HALF:
            return None
        keys = part._keys_read()
        count = keys.ne(0).any(-1, keepdim=True).sum(-2, keepdim=True).clamp(min=1)
        origin = (keys.sum(-2, keepdim=True) / count).to(part.keys.dtype)
        if host_may_look(*part.tensors()) and not self._is_far(origin.square().sum(-1)):
            return None
        clone, moved = copy.copy(self), copy.copy(part)
        moved.keys, clone.parts = part.keys - origin, (moved,)
        attended = joined(part.mask, part.bias)[1]
        # The mean of a query without keys is 0 about any origin.
        return clone, origin if attended is None else origin.where(attended.any(-1, keepdim=True), 0.0)

    def _whole_at(self, z: Tensor) -> tuple[LogSumExp, Tensor]:
        if not self.loses_digits():
            return self.whole(), z
        wide = self.replace(*(t.double() if t.is_floating_point() else t for t in self.tensors()))
        return wide.whole(), z.double()
