"""Tokens that do not exist: what stands in their places changes nothing of the others, gradients included."""

import pytest
import torch
from test_causal_block import made
from test_causal_block_limits import HUGE

import implicit_attention as ia
from implicit_attention import EquilibriumTransformer, Picard
from implicit_attention.layers import Exit

WAYS = {
    "implicit": {},
    "from the input": {"start": "input"},
    "chunks": {"chunk": 2},
    "steps": {"steps": 6},
    "unrolled": {"adjoint": ia.Unrolled()},
    "budget": {"adjoint": ia.Unrolled(), "solver": Picard(rtol=0, atol=0, max_steps=5)},
    "one step": {"adjoint": ia.OneStep()},
    "phantom": {"adjoint": ia.Phantom(3)},
    "reversible": {"adjoint": ia.Reversible(damping=0.5), "steps": 6},
}
CONTENTS = [HUGE, 3e38, torch.inf, torch.nan]


def padded(side, content):
    """Tokens, of which three of the first sample do not exist."""
    exists = torch.ones(2, 6, dtype=torch.bool)
    exists[0, slice(3) if side == "left" else slice(3, 6)] = False
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    return torch.where(exists[..., None], x, content), exists


def answered(model, x, exists, **way):
    """States and evidence of tokens that exist, with the gradients of these states; others have the state 0."""
    x = x.clone().requires_grad_()
    z = model(x, key_mask=exists, **way)
    assert not z[~exists].any()
    z = z[exists]
    gradients = torch.autograd.grad(z.square().sum(), [x, *model.parameters()])
    return [z.detach(), model.last_solve.status[exists], model.last_solve.num_evals[exists], *gradients]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_stands_in_their_places_changes_no_bit(side, way):
    torch.manual_seed(0)
    model = EquilibriumTransformer(8, 2, causal=True, on_failure="raise", solver=Picard(rtol=1e-4, max_steps=200))
    expected = answered(model, *padded(side, 0.5), **WAYS[way])
    for content in CONTENTS:
        found = answered(model, *padded(side, content), **WAYS[way])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"steps": 4}, {"chunk": 2}, {"exit": Exit(mean=3.0)}], ids=str)
@pytest.mark.parametrize("parts", [[1] * 6, [2, 4]], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_nor_does_it_beside_a_cache(side, parts, options):
    model = made(on_failure="raise").float()
    model.options = model.options.override(solver=Picard(rtol=1e-4, max_steps=200))
    answers = []
    for content in (0.5, *CONTENTS):
        x, exists = padded(side, content)
        cache, split = model.new_cache(), zip(x.split(parts, 1), exists.split(parts, 1), strict=True)
        z = torch.cat([model(part, key_mask=own, cache=cache, **options) for part, own in split], 1)
        answers.append((z[exists], cache.status[exists], cache.num_evals[exists]))
    for answer in answers[1:]:
        for mine, other in zip(answer, answers[0], strict=True):
            assert torch.equal(mine, other)
