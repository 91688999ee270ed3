"""Softmax with a null key: attention that may attend to nothing."""

from __future__ import annotations

import torch.nn.functional as F

from .. import _validate
from ._shapes import Bias, Keys, Mask, PerBatch, ReadOut, States, Values, Weights
from .log_sum_exp import LogSumExp, OverLogSumExp


class Softmax1(OverLogSumExp):
    r"""Log-sum-exp with one more key, 0, of score 0; with scores s = beta K z + bias:

    ```math
    \Phi(z) = \frac1\beta \log \left( 1 + \sum_j e^{s_j} \right), \qquad
    \nabla\Phi(z) = \sum_j p_j\, k_j, \qquad p_j = \frac{e^{s_j}}{1 + \sum_i e^{s_i}}
    ```

    The weights sum to less than 1: the rest attends to nothing. `LogSumExp` with one key more computes it, with its
    fused solves and kernels.

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

    def __init__(self, keys: Keys, beta: PerBatch, *, mask: Mask = None, bias: Bias = None) -> None:
        # Validated before a key is added, so that errors name the shapes that the user passed.
        beta = LogSumExp(keys, beta, mask=mask, bias=bias).beta
        if mask is not None:
            mask = F.pad(mask.expand(*mask.shape[:-1], keys.shape[-2]), (0, 1), value=True)
        if bias is not None:
            bias = F.pad(bias.expand(*bias.shape[:-1], keys.shape[-2]), (0, 1))
        super().__init__(LogSumExp(F.pad(keys, (0, 0, 0, 1)), beta, mask=mask, bias=bias))

    def probabilities(self, z: States) -> Weights:
        """The weights p, (*batch, N, M), whose rows sum to less than 1."""
        return self.parts[0].probabilities(z)[..., :-1]

    def readout(self, z: States, values: Values, *, dropout_p: float = 0.0) -> ReadOut:
        """probabilities(z) V; see `LogSumExp.readout`."""
        _validate.check_float_tensor("values", values, min_ndim=2)
        keys = self.parts[0].keys
        if values.shape[-2] != keys.shape[-2] - 1:
            required = f"have one row for each of the {keys.shape[-2] - 1} keys, shape (*batch, M, E)"
            raise ValueError(_validate.message("values", required, f"shape {tuple(values.shape)}"))
        return self.parts[0].readout(z, F.pad(values, (0, 0, 0, 1)), dropout_p=dropout_p)
