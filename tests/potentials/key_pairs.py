"""What two samples of three queries read of seven keys, in shapes that break wrong axes."""

import torch

from implicit_attention.potentials import (
    BernoulliUnits,
    ConstantUnits,
    DiscreteUnits,
    ExponentialUnits,
    GaussianUnits,
    LaplaceUnits,
    PoissonUnits,
    SignUnits,
    SphereUnits,
)
from implicit_attention.testing.numerics import random

KEYS = (2, 7, 5)
#: Over 0.3 times standard normal keys, with such queries, every one is in its domain.
LAWS = [
    GaussianUnits(0.3, 1.7),
    BernoulliUnits(0.2),
    SignUnits(),
    PoissonUnits(0.7),
    ExponentialUnits(9.0),
    LaplaceUnits(0.1),
    ConstantUnits(1.3),
    SphereUnits(3),
    DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5)),
]


def some_keys(count=7):
    """A mask: query (0, 1) reads no key, query (1, 0) but one."""
    mask = random(2, 3, count, seed=9) > 0
    mask[0, 1] = False
    mask[1, 0] = torch.arange(count) == 3
    return mask


def pairs(dtype, *, left_out=False):
    """Beta of each sample, the mask and a bias; with `left_out` the bias masks the third key."""
    beta, bias = torch.tensor([0.5, 1.3], dtype=torch.float64), 0.5 * random(2, 3, 7, seed=4, dtype=dtype)
    if left_out:
        bias[..., 2] = -torch.inf
    return {"beta": beta.to(dtype), "mask": some_keys(), "bias": bias}
