"""Causal layers at their limits: masks without the own token, lost tokens, ambiguous shapes, empty calls, refusals."""

import copy
import functools

import pytest
import torch
from test_causal_block import TIGHT, Gated, decoded, made, tokens
from torch import nn

import implicit_attention as ia
from implicit_attention import EquilibriumTransformer, PerSample, Picard, Shared
from implicit_attention.layers import Equilibrium, Exit

HUGE = 1e25
STRICT = torch.ones(6, 6, dtype=torch.bool).tril(-1)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", ["boolean", "additive", "a row alone", "keys"])
def test_a_token_reads_itself_by_the_mask_alone(kind, chunk):
    row = torch.ones(6, 6, dtype=torch.bool)
    row[3] = False
    masks = {"boolean": STRICT, "additive": STRICT.double().log(), "a row alone": row}
    mask = masks.get(kind, torch.tensor([[True, True, False, True, True, True]]))
    model, x = made(), tokens(2, 6, 8).requires_grad_()
    z = model(x, mask, chunk=chunk)
    assert bool(model.last_solve.converged.all())
    torch.testing.assert_close(z, model(x, mask, steps=100), rtol=0, atol=1e-6)
    residual = (model.block(z, x, model._merged(x, mask, None).value) - z).norm(dim=-1)
    assert bool((residual <= 1e-6).all())


WAYS = {
    "implicit": {},
    "steps": {"steps": 20},
    "unrolled": {"adjoint": ia.Unrolled()},
    "budget": {"adjoint": ia.Unrolled(), "solver": Picard(rtol=0, atol=0, max_steps=5)},
    "one step": {"adjoint": ia.OneStep()},
    "phantom": {"adjoint": ia.Phantom(3)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [HUGE, torch.inf])
def test_a_token_that_overflows_spoils_no_gradient(way, value):
    torch.manual_seed(0)
    model = EquilibriumTransformer(8, 2, causal=True, on_failure="ignore")
    x = torch.randn(2, 6, 8)
    x[0, 4] = value
    x.requires_grad_()
    z = model(x, **WAYS[way])
    assert z[0, :4].isfinite().all()
    assert not bool((model.last_solve.status[0, 4:] <= ia.Status.BUDGET).any())
    loss = z[1].square().sum() + z[0, :4].square().sum()
    gradients = torch.autograd.grad(loss, [x, *model.parameters()])
    assert all(g.isfinite().all() for g in gradients)
    healthy = model(x.detach()[:, :4].requires_grad_(), **WAYS[way])
    torch.testing.assert_close(z[0, :4], healthy[0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("steps", [1, 2, 5])
@torch.no_grad()
def test_a_token_that_overflows_beside_a_cache_leaves_earlier_ones(steps):
    torch.manual_seed(0)
    model, x = EquilibriumTransformer(8, 2, causal=True, on_failure="ignore"), torch.randn(2, 6, 8)
    expected = model(x, steps=steps)
    x[0, 4] = HUGE
    found, cache = None, model.new_cache()
    found = model(x, cache=cache, steps=steps)
    assert found.isfinite().all(-1).tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    torch.testing.assert_close(found[0, :4], expected[0, :4])
    assert cache.status[0].tolist() == [2] * 4 + [int(ia.Status.DIVERGED)] * 2


@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_start_that_is_not_finite_is_lost_at_its_token_alone(steps, chunk):
    model, x = made(on_failure="ignore"), tokens(1, 6, 8)
    start = torch.zeros_like(x)
    expected = model(x, steps=steps, start=start).detach()
    start[0, 4] = torch.nan
    found = model(x, steps=steps, start=start, chunk=chunk).detach()
    assert found[0].isfinite().all(-1).tolist() == [True] * 4 + [False] * 2
    torch.testing.assert_close(found[0, :4], expected[0, :4], rtol=0, atol=1e-6)


class Scaled(Gated):
    """A block with another argument: a gain, or a matrix."""

    def __init__(self):
        super().__init__(8)

    def forward(self, z, x, other, past=None):
        z = super().forward(z, x, past)
        return z @ other if other.ndim > 1 and other.shape[-2:] == (8, 8) else z * other


@torch.no_grad()
def test_shapes_that_could_be_those_of_tokens():
    layer = Equilibrium(Scaled(), causal=True, solver=TIGHT, on_failure="raise").double()
    gain, matrix = 0.5 + tokens(8).sigmoid(), 0.5 * torch.linalg.qr(tokens(8, 8))[0]
    for x, other in ((tokens(8, 8), gain), (tokens(8, 8, 8), matrix), (tokens(8, 8), matrix)):
        options = {"event_ndim": 2} if x.ndim == 2 else {}
        layer.event_ndim = options.get("event_ndim")
        expected = layer(x, Shared(other), steps=200)
        # All at once, shapes need not be told apart.
        torch.testing.assert_close(layer(x, other), expected, rtol=0, atol=1e-6)
        for chunk in (1, 3):
            torch.testing.assert_close(layer(x, Shared(other), chunk=chunk), expected, rtol=0, atol=1e-6)
            with pytest.raises(ValueError, match="wrap what all tokens read in Shared or PerSample"):
                layer(x, other, chunk=chunk)
        torch.testing.assert_close(layer(x, Shared(other), cache=layer.new_cache()), expected, rtol=0, atol=1e-6)
    layer.event_ndim, own = None, matrix.expand(2, 8, 8)
    expected = layer(tokens(2, 8, 8), PerSample(own), steps=200)
    torch.testing.assert_close(layer(tokens(2, 8, 8), PerSample(own), chunk=1), expected, rtol=0, atol=1e-6)


class Weighted(nn.Module):
    """Tokens by themselves, x with a number for each."""

    def forward(self, z, x):
        return 0.3 * z.tanh() + x["state"] * x["weight"][..., None]


def test_a_number_of_a_token_that_is_nan_loses_that_token():
    layer = Equilibrium(Weighted(), causal=True, solver=TIGHT, on_failure="ignore").double()
    x = {"state": tokens(2, 6, 4), "weight": tokens(2, 6)}
    x["weight"][0, 3] = torch.nan
    start = torch.zeros(2, 6, 4, dtype=torch.float64)
    z = layer(x, start=start)
    assert z.isfinite().all(-1).tolist() == [[True] * 3 + [False] * 3, [True] * 6]


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 4, 8), (0, 8)])
def test_calls_without_tokens(shape):
    model, x = made(), torch.zeros(shape, dtype=torch.float64)
    for options in ({}, {"exit": 0.1}, {"chunk": 2}, {"cache": model.new_cache()}, {"steps": 2}):
        assert model(x, **options).shape == shape
        assert model.last_solve.status.shape == shape[:-1]
    model(x, cache=model.new_cache(), steps=2)


@torch.no_grad()
def test_a_call_that_raises_leaves_a_cache_for_any_batch_and_precision():
    model = made(solver=Picard(rtol=1e-12, max_steps=1))
    cache = model.new_cache()
    with pytest.raises(ia.ConvergenceError):
        model(tokens(2, 3, 8), cache=cache)
    assert model(tokens(3, 2, 8), cache=cache, on_failure="ignore").shape == (3, 2, 8)
    cache.rewind(0)
    model.float()(tokens(1, 2, 8).float(), cache=cache, on_failure="ignore")


@torch.no_grad()
def test_caches_that_inference_mode_has_copied():
    model, x = made(), tokens(2, 6, 8)
    whole = model(x)
    for change in (copy.deepcopy, lambda cache: cache.select_batch(torch.tensor([0, 1])) or cache):
        cache = model.new_cache()
        decoded(model, x[:, :3], cache)
        with torch.inference_mode():
            cache = change(cache)
        torch.testing.assert_close(decoded(model, x[:, 3:], cache), whole[:, 3:], rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_mean_budget_is_kept_by_chunks_and_with_padding(chunk):
    model, exists = made(solver=Picard(rtol=1e-8, max_steps=300)), torch.ones(2, 12, dtype=torch.bool)
    exists[0, 5:], exists[1, :4] = False, False
    for mean in (1.5, 3.7, 6.0):
        model(tokens(2, 12, 8), key_mask=exists, chunk=chunk, exit=Exit(mean=mean))
        spent = model.last_solve.num_evals
        assert spent[~exists].unique().tolist() == [1]
        assert mean - 0.7 < float(spent[exists].double().mean()) <= mean


@pytest.mark.parametrize("needed", ["argument", "start", "start of the layer"])
def test_the_tensor_that_needs_a_gradient_is_told_of_too(needed):
    start, x = tokens(5, 8), tokens(2, 5, 8)
    gain = (0.5 + tokens(8).sigmoid()).requires_grad_(needed == "argument")
    given = nn.Parameter(start) if needed == "start of the layer" else "zeros"
    layer = Equilibrium(Scaled(), start=given, causal=True, solver=TIGHT).double()
    layer.block.requires_grad_(False)
    own = {"start": start.expand(2, 5, 8).clone().requires_grad_()} if needed == "start" else {}
    for options in ({"exit": 0.1}, {"cache": layer.new_cache()}):
        z = layer(x, gain, **own, **options)
        with pytest.raises(RuntimeError, match="have no gradient"):
            z.sum().backward()


def reversible(**options):
    model = made(adjoint=ia.Reversible(damping=0.5))
    return model(tokens(1, 3, 8), **{"cache": model.new_cache(), **options})


REFUSED = {
    "reversible steps": (lambda: reversible(steps=3), "`adjoint` must not be Reversible"),
    "vmap": (
        lambda: torch.vmap(functools.partial(made(), exit=0.1))(tokens(2, 3, 8)),
        "`exit` must be None inside",
    ),
    "start of all tokens": (
        lambda: decoded(made(start=tokens(6, 8)), tokens(2, 6, 8)),
        r"`start` must have as many tokens as x beside a cache, got 6 for x \[\(2, 1, 8\)\]",
    ),
    "segments": (
        lambda: next(made().segments(tokens(2, 6, 8), count=2, cache=made().new_cache())),
        "`cache` must be None for segments",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_limits_are_told(name):
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call()
