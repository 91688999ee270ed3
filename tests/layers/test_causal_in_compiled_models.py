"""Solves of causal layers inside of a model that torch.compile has: answers and statuses are those without it."""

import pytest
import torch
from test_causal_block import TIGHT, Gated, made, tokens
from torch import nn

import implicit_attention as ia
from implicit_attention import Picard, Rotary
from implicit_attention.layers import Equilibrium

# Torch looks at `.grad` where it resumes behind the layer.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing compiled by other tests, after whose number Torch would give up."""
    torch._dynamo.reset()


LEFT = torch.arange(7) >= torch.tensor([[2], [0], [6]])
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2])
MASKS = {
    "none": {},
    "left": {"key_mask": LEFT},
    "right": {"key_mask": LEFT.flip(1)},
    "documents": {"mask": DOCUMENTS[:, None] == DOCUMENTS},
    "documents of each": {"mask": torch.stack([DOCUMENTS[:, None] == DOCUMENTS, *[torch.ones(7, 7).bool()] * 2])},
    "both": {"mask": DOCUMENTS[:, None] == DOCUMENTS, "key_mask": LEFT},
    "additive": {"mask": tokens(7, 7), "key_mask": LEFT.flip(1)},
}
WAYS = {"solve": {}, "chunks": {"chunk": 3}, "unrolled": {"adjoint": ia.Unrolled()}}


class Model(nn.Module):
    """Parts before and behind the layer."""

    def __init__(self, layer, width=8):
        super().__init__()
        torch.manual_seed(1)
        self.before, self.layer, self.behind = nn.Linear(width, width), layer, nn.Linear(width, 3)

    def forward(self, x, **options):
        return self.behind(self.layer(self.before(x).tanh(), **options))


def answered(call, layer, x, **options):
    x = x.clone().requires_grad_()
    logits = call(x, **options)
    gradients = torch.autograd.grad(logits.nan_to_num().sin().sum(), [x, *layer.parameters()])
    report = layer.last_solve
    return [logits.detach(), report.status, report.num_evals, report.residual, *gradients]


@pytest.mark.parametrize(
    ("masks", "way"),
    [
        ("none", "chunks"),
        ("left", "solve"),
        ("both", "solve"),
        ("both", "chunks"),
        ("both", "unrolled"),
        *(pytest.param(masks, way, marks=pytest.mark.slow) for masks in MASKS for way in ("solve", "chunks")),
    ],
)
def test_masks(masks, way):
    model = Model(made(rotary=Rotary())).double()
    compiled, x = torch.compile(model, backend="eager"), tokens(3, 7, 8)
    expected, found = (answered(call, model.layer, x, **MASKS[masks], **WAYS[way]) for call in (model, compiled))
    assert found[1].shape == (3, 7)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("masks", ["left", "documents", "both"])
def test_tokens_that_fail_are_told_apart(masks):
    model = Model(made(on_failure="ignore", solver=Picard(rtol=1e-9, max_steps=6))).double()
    compiled, x = torch.compile(model, backend="eager"), tokens(3, 7, 8)
    x[1, 4] = torch.nan
    expected, found = (answered(call, model.layer, x, **MASKS[masks]) for call in (model, compiled))
    assert int(ia.Status.NONFINITE) in found[1][1]
    assert int(ia.Status.MAX_STEPS) in found[1][0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    with pytest.raises(ia.ConvergenceError):
        compiled(x, on_failure="raise", **MASKS[masks])


@torch.no_grad()
def test_caches_and_exits():
    model = Model(made(rotary=Rotary())).double()
    compiled, x = torch.compile(model, backend="eager"), tokens(3, 7, 8)
    answers = []
    for call in (model, compiled):
        cache = model.layer.new_cache()
        parts = zip(x.split([3, 1, 3], 1), LEFT.split([3, 1, 3], 1), strict=True)
        decoded = torch.cat([call(part, cache=cache, key_mask=own) for part, own in parts], 1)
        ended = call(x, key_mask=LEFT, exit=0.1)
        answers.append((decoded, cache.status, ended, model.layer.last_solve.rule))
    torch.testing.assert_close(*answers, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", [None, ia.Reversible(damping=0.5)], ids=str)
def test_steps_of_padded_tokens(adjoint):
    model = Model(made(rotary=Rotary(), adjoint=adjoint)).double()
    compiled, x = torch.compile(model, backend="eager"), tokens(3, 7, 8)
    for training in (True, False):
        model.train(training)
        expected, found = (answered(call, model.layer, x, key_mask=LEFT, steps=4) for call in (model, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True, check_dtype=False)


def test_a_block_of_its_own():
    model = Model(Equilibrium(Gated(8), causal=True, solver=TIGHT, on_failure="raise")).double()
    compiled, x = torch.compile(model, backend="eager"), tokens(3, 7, 8)
    for options in ({}, {"chunk": 3}, {"steps": 4}):
        expected, found = (answered(call, model.layer, x, **options) for call in (model, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
