"""The inputs of the Energy Transformer's numbers in closed form: 3 tokens of width 4, two heads, five memories."""

import itertools
import math
from collections.abc import Callable

import torch

from implicit_attention.potentials import LayerNormPotential, TokenAttention


def made(f: Callable[..., float], *shape: int) -> torch.Tensor:
    numbers = [f(*index) for index in itertools.product(*map(range, shape))]
    return torch.tensor(numbers, dtype=torch.float64).reshape(shape)


TOKENS = made(lambda n, i: math.sin(1 + 4 * n + i), 3, 4)
W_QUERY = made(lambda h, y, i: math.cos(1 + 7 * h + 3 * y + i) / 2, 2, 2, 4)
W_KEY = made(lambda h, y, i: math.sin(2 + 5 * h + 2 * y + i) / 2, 2, 2, 4)
MEMORIES = made(lambda m, i: math.cos(3 + 2 * m + 5 * i) / 2, 5, 4)
DELTA = made(lambda i: i / 10, 4)
BETA = torch.tensor([0.7, 1.1], dtype=torch.float64)
V = made(lambda n, i: math.cos(n + 2 * i), 3, 4)
#: The weights of a loss that reads the normalised tokens.
W = made(lambda n, i: math.cos(1 + 4 * n + i), 3, 4)


def norm() -> LayerNormPotential:
    return LayerNormPotential(torch.tensor(1.3, dtype=torch.float64), DELTA)


def attention(*, mask: torch.Tensor | None = None, exclude_self: bool = False) -> TokenAttention:
    return TokenAttention(W_QUERY, W_KEY, BETA, mask=mask, exclude_self=exclude_self)
