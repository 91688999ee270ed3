"""Functions of potentials compute in the precision of their tensors, also inside torch.autocast."""

from functools import partial

import pytest
import torch

from implicit_attention import LogSumExp
from implicit_attention.potentials import (
    GaussianMixture,
    RestrictedBoltzmannMachine,
    SignUnits,
    bregman,
    conjugate,
    contrastive_loss,
    exact_gradient,
    fisher,
    jensen_bound,
    natural_parameter,
    renormalise,
)
from implicit_attention.testing.numerics import check_autocast, random

_numbers = partial(random, dtype=torch.float32)
PHI = LogSumExp(_numbers(12, 4, seed=0), beta=2.0)
MIXTURE = GaussianMixture(_numbers(5, 4, seed=1), torch.eye(4).expand(5, 4, 4), log_weights=torch.zeros(5))
MACHINE = RestrictedBoltzmannMachine(_numbers(6, 4, seed=2), _numbers(6, seed=3), SignUnits(), SignUnits())
A, B, STATES = _numbers(2, 3, 4, seed=4), _numbers(2, 3, 4, seed=5), _numbers(3, 6, seed=6).sign()
MEANS = PHI.mean(A)

CALLS = {
    "conjugate": lambda: conjugate(PHI, MEANS),
    "natural_parameter": lambda: natural_parameter(PHI, MEANS),
    "bregman": lambda: bregman(PHI, A, A + 0.01 * B),
    "fisher": lambda: fisher(PHI, A),
    "contrastive_loss": lambda: contrastive_loss(PHI, A, B),
    "jensen_bound": lambda: jensen_bound(MIXTURE, A),
    "renormalise": lambda: renormalise(0.5 * _numbers(20, 4, seed=7), torch.zeros(4), torch.eye(4)),
    "exact_gradient": lambda: exact_gradient(MACHINE, STATES).weights,
    "effective_energy": lambda: MACHINE.effective_energy(STATES),
    "hidden_mean": lambda: MACHINE.hidden_mean(STATES),
    "visible_mean": lambda: MACHINE.visible_mean(A.reshape(6, 4)),
    "log_partition": lambda: MACHINE.log_partition(),
}


@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_no_bit_of_a_function_of_potentials(name):
    assert CALLS[name]().dtype == torch.float32
    check_autocast(CALLS[name])
