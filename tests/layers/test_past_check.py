"""Blocks that read earlier tokens otherwise than by `past` are refused, and others are tried once."""

import pytest
import torch
import torch.nn.functional as F
from test_causal_block import TIGHT, Gated, decoded, made, tokens
from torch import nn

from implicit_attention import Picard
from implicit_attention.layers import Equilibrium


class Attention(Gated):
    """A block whose use of `past` is a mixin's."""

    def forward(self, z, x, past=None):
        query, key, value = self.project(z + x).unsqueeze(-3).chunk(3, -1)
        masks = {"is_causal": True}
        if past is not None:
            key, value, masks = self.used(past, key, value)
        read = F.scaled_dot_product_attention(query, key, value, **masks).squeeze(-3)
        return torch.tanh(0.4 * self.mix(z) + 0.4 * read + x)


class NeverUpdates(Attention):
    def used(self, past, key, value):
        return key, value, {"is_causal": True}


class MasksOthers(Attention):
    def used(self, past, key, value):
        return key, value, {"attn_mask": past.mask, "is_causal": past.is_causal}


class ReadsItsWindow(Attention):
    def used(self, past, key, value):
        past.update(key, value)
        return key, value, {"is_causal": True}


class ForgetsTheTriangle(Attention):
    def used(self, past, key, value):
        return *past.update(key, value), {"attn_mask": past.mask}


class Convolves(Gated):
    """A block that reads the token before by a convolution as well."""

    def forward(self, z, x, past=None):
        before = F.pad(z, (0, 0, 1, 0))[..., :-1, :]
        return super().forward(z, x + 0.1 * before, past)


class ReadsThatOfTheInput(Gated):
    def forward(self, z, x, past=None):
        return super().forward(z, x + 0.1 * F.pad(x, (0, 0, 1, 0))[..., :-1, :], past)


class LooksAhead(Gated):
    def forward(self, z, x, past=None):
        return super().forward(z, x + 0.1 * z.mean(-2, keepdim=True), past)


class LooksAheadInTheInput(Gated):
    def forward(self, z, x, past=None):
        return super().forward(z, x + 0.1 * x.mean(-2, keepdim=True), past)


BAD = [NeverUpdates, MasksOthers, ReadsItsWindow, ForgetsTheTriangle, Convolves, ReadsThatOfTheInput, LooksAhead]
CALLS = {
    "chunks": lambda layer, x: layer(x, chunk=3),
    "settled tokens": lambda layer, x: layer(x),
    "cache": lambda layer, x: layer(x, cache=layer.new_cache()),
    "two tokens": lambda layer, x: layer(x[:, :2], cache=layer.new_cache()),
    "steps": lambda layer, x: layer(x, cache=layer.new_cache(), steps=3),
    "behind one token": lambda layer, x: [decoded(layer, x, parts=parts) for parts in ([1, 6], [7])],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("block", BAD, ids=lambda block: block.__name__)
@torch.no_grad()
def test_a_block_that_reads_otherwise_is_refused(block, call):
    layer = Equilibrium(block(), causal=True, solver=TIGHT).double()
    text = "`block` must (read earlier tokens by its argument `past`|call `past.update`|let token t read)"
    with pytest.raises(ValueError, match=text) as error:
        CALLS[call](layer, tokens(2, 7, 6))
    assert block.__name__ in str(error.value)


@pytest.mark.parametrize("block", [LooksAhead, LooksAheadInTheInput])
@pytest.mark.parametrize("steps", [None, 2])
def test_a_block_that_looks_ahead_is_refused_at_the_first_call(block, steps):
    layer = Equilibrium(block(), causal=True).double()
    with pytest.raises(ValueError, match="let token t read tokens <= t alone with causal=True"):
        layer(tokens(2, 7, 6), steps=steps)


class Chooses(Gated):
    """A block whose second attention is there at some evaluations."""

    def __init__(self, first):
        super().__init__()
        self.left, self.first = 0, first

    def forward(self, z, x, past=None):
        self.left -= 1
        if past is not None and (self.left >= 0) == self.first:
            z = 0.5 * super().forward(z, x, past)
        return super().forward(z, x, past)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("parts", [[1] * 7, [4, 3]], ids=str)
@pytest.mark.parametrize("steps", [None, 5])
@torch.no_grad()
def test_another_number_of_updates_is_refused(first, parts, steps):
    layer = Equilibrium(Chooses(first), causal=True, solver=TIGHT).double()
    layer._checked.add((tuple(part.training for part in layer.block.modules()), "past alone"))
    layer.block.left = 3
    with pytest.raises(
        ValueError, match=r"call `past.update` as often at every evaluation, [12] times, got [12] calls"
    ):
        decoded(layer, tokens(2, 7, 6), parts=parts, steps=steps)


class Alone(nn.Module):
    """Tokens by themselves, without keys."""

    def forward(self, z, x, past=None):
        return 0.5 * z.cos() + x


@pytest.mark.parametrize("steps", [None, 60])
@torch.no_grad()
def test_tokens_that_leave_each_other_alone_need_no_update(steps):
    layer, x = Equilibrium(Alone(), causal=True, solver=TIGHT), tokens(2, 7, 6)
    with pytest.raises(ValueError, match="be called with two tokens or more first"):
        decoded(layer, x, steps=steps)
    found = decoded(layer, x, parts=[3, 1, 1, 1, 1], steps=steps)
    torch.testing.assert_close(found, layer(x), rtol=0, atol=1e-6)
    torch.testing.assert_close(decoded(layer, x, steps=steps), layer(x), rtol=0, atol=1e-6)


class Counts(Gated):
    """A block that counts evaluations, also those of its copies."""

    evaluations = 0

    def forward(self, z, x, past=None):
        type(self).evaluations += 1
        return super().forward(z, x, past)


@torch.no_grad()
def test_a_block_is_tried_once_in_each_mode():
    layer = Equilibrium(Counts(), causal=True, solver=Picard(rtol=0, atol=0, max_steps=2)).double()
    x, counts = tokens(2, 7, 6), []
    for training in (True, True, False, False):
        layer.train(training)
        before = Counts.evaluations
        layer(x, cache=layer.new_cache())
        counts.append(Counts.evaluations - before)
    assert counts == [7, 3, 7, 3]


class Drops(Gated):
    def forward(self, z, x, past=None):
        return super().forward(z, F.dropout(x, 0.3, self.training), past)


@torch.no_grad()
def test_random_numbers_of_the_block_are_left_to_it():
    layer, x = Equilibrium(Drops(), causal=True, solver=TIGHT).double(), tokens(2, 7, 6)
    assert layer(x, cache=layer.new_cache()).isfinite().all()
    layer.eval()
    torch.testing.assert_close(decoded(layer, x), layer(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_rounding_is_no_fault(dtype):
    for options in ({"depth": 4}, {"norm": "pre", "injection": "film"}):
        model, x = made(32, solver=Picard(rtol=1e-2), on_failure="ignore", **options), tokens(3, 65, 32)
        model.to(dtype)(x.to(dtype), chunk=7)
        with torch.autocast("cpu", torch.bfloat16):
            made(32, on_failure="ignore", **options).float()(x.float(), chunk=7, solver=Picard(rtol=1e-2))
