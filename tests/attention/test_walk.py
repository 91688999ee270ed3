"""The walk through a call that the guide for contributors draws."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from walk import frames, walked

import implicit_attention as ia
from implicit_attention.kernels import native_status

native = pytest.mark.skipif(native_status().isa is None, reason=native_status().reason)
GUIDE = Path(ia.__file__).parents[1] / "CONTRIBUTING.md"


@native
def test_a_training_step_passes_the_stops_that_the_guide_names_in_that_order():
    section = GUIDE.read_text().partition("## A call, stop by stop")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w/.]+)`: `(\w+)` \|", section, re.MULTILINE)
    assert 1 < len(named) <= 8
    layer, x = ia.ImplicitAttention(16, 2), torch.randn(2, 5, 16)
    walk = walked(lambda: layer(x).sum().backward())
    assert walk.native
    assert [stop for stop in walk.passed if stop in named] == named


@native
def test_a_call_of_a_layer_is_few_frames():
    layer, x = ia.ImplicitAttention(16, 1), torch.randn(1, 8, 16)
    with torch.no_grad():
        assert frames(partial(layer, x)) <= 90
