"""Potentials, energies and problems show themselves in one line that reads no tensor."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attention import AnchoredEnergy, EnergyFunction, FixedPointMap, LogSumExp, PerSample, Potential
from implicit_attention.energies import SelfAttentionEnergy
from implicit_attention.potentials import Entmax

KEYS, FIELD = torch.ones(2, 7, 5), torch.ones(2, 3, 5)


class Silent(TorchDispatchMode):
    """No operation of torch runs inside, so that no device is waited for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


class Own(Potential):
    def __init__(self):
        self._cache, self.name, self.switch, self.off, self.nothing = torch.ones(3), "mine", True, False, None
        self.opaque = object()


SHOWN = {
    "LogSumExp(keys (2, 7, 5), beta 0.5, float32)": lambda: LogSumExp(KEYS, 0.5),
    "LogSumExp(keys (2, 7, 5), beta (2,), mask (3, 7), float32)": lambda: LogSumExp(
        KEYS, torch.ones(2), mask=torch.ones(3, 7, dtype=torch.bool)
    ),
    "Entmax(keys (2, 7, 5), beta 0.333333, alpha 1.5, float64)": lambda: Entmax(KEYS.double(), 1 / 3),
    "AnchoredEnergy(LogSumExp(keys (2, 7, 5), beta 0.5), field (2, 3, 5), anchor 0.5, float32)": lambda: AnchoredEnergy(
        LogSumExp(KEYS, 0.5), FIELD, 0.5
    ),
    "Sum(Scaled(LogSumExp(keys (2, 7, 5), beta 1), weight 2), LogSumExp(keys (2, 7, 5), beta 1), float32)": lambda: (
        2.0 * LogSumExp(KEYS, 1.0) + LogSumExp(KEYS, 1.0)
    ),
    "SelfAttentionEnergy(SelfAttention(beta 0.5), field (2, 3, 5), anchor 0.5, float32)": lambda: SelfAttentionEnergy(
        FIELD, beta=0.5, anchor=0.5
    ),
    "FixedPointMap(cos, event_ndim 1)": lambda: FixedPointMap(torch.cos, event_ndim=1),
    "FixedPointMap(mul, inputs (3,), event_ndim 1, float32)": lambda: FixedPointMap(
        torch.mul, PerSample(torch.ones(3)), event_ndim=1
    ),
    "EnergyFunction(Linear, event_ndim 0, float32)": lambda: EnergyFunction(torch.nn.Linear(2, 1), event_ndim=0),
    "FixedPointMap(cos, inputs (1,), (1,), (1,), (1,), and 2 more, event_ndim 1, float32)": lambda: FixedPointMap(
        torch.cos, *[torch.ones(1)] * 6, event_ndim=1
    ),
    "Own(name 'mine', switch, opaque object, float32)": Own,
}


@pytest.mark.parametrize("text", SHOWN)
def test_one_line_of_shapes_and_numbers_of_the_host(text):
    made = SHOWN[text]()
    with Silent():
        assert repr(made) == text


def test_what_is_on_another_device_says_so():
    assert repr(LogSumExp(KEYS.to("meta"), 0.5)).endswith("beta 0.5, float32, meta)")


def test_shown_inside_transforms_and_compiled_code():
    shown = []

    def value(keys):
        potential = LogSumExp(keys, 0.5)
        shown.append(repr(potential))
        return potential.value(FIELD[0]).sum()

    expected = "LogSumExp(keys (7, 5), beta 0.5, float32)"
    torch.vmap(value)(KEYS)
    torch.func.grad(value)(KEYS[0])
    torch.compile(value, backend="eager")(KEYS[0])
    assert shown == [expected] * 3
