"""The walk through a call that the guide for contributors draws."""

import re
import sys
from pathlib import Path

import torch
from direct_ways import native

import implicit_attention as ia

ROOT = Path(ia.__file__).parent
GUIDE = ROOT.parent / "CONTRIBUTING.md"


@native
def test_a_training_step_passes_the_stops_that_the_guide_names_in_that_order():
    section = GUIDE.read_text().partition("## A call, stop by stop")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w/.]+)`: `(\w+)` \|", section, re.MULTILINE)
    assert 1 < len(named) <= 8
    layer, x = ia.ImplicitAttention(16, 2), torch.randn(2, 5, 16)
    layer(x).sum().backward()
    passed = []

    def watch(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            passed.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    # Backward passes run in a thread of their own, unless they are told not to.
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(watch)
        layer(x).sum().backward()
        sys.setprofile(None)
    assert [stop for stop in passed if stop in named] == named


@native
def test_a_call_of_a_layer_is_few_frames():
    layer, x, frames = ia.ImplicitAttention(16, 1), torch.randn(1, 8, 16), []
    with torch.no_grad():
        layer(x)
        sys.setprofile(lambda frame, event, argument: frames.append(frame) if event == "call" else None)
        layer(x)
        sys.setprofile(None)
    assert len(frames) <= 90
