"""Causal layers, solved token by token: windows, chunks and caches answer as one solve of all tokens does."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import implicit_attention as ia
from implicit_attention import Anderson, EquilibriumTransformer, Picard, Rotary
from implicit_attention.layers import Equilibrium, Exit

TIGHT = Picard(rtol=1e-8, atol=1e-12, max_steps=500)


def contract(model):
    """Weights so small that a step contracts."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(0.4 if "norm" in name else 0.6)
    return model


def made(dim=8, depth=1, **options):
    torch.manual_seed(0)
    model = EquilibriumTransformer(dim, 2, depth, causal=True, **{"solver": TIGHT, "on_failure": "raise", **options})
    return contract(model.double())


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decoded(model, x, cache=None, parts=None, **options):
    """All tokens by calls with a cache, of the lengths `parts`."""
    cache = model.new_cache() if cache is None else cache
    lengths = [1] * x.shape[-2] if parts is None else parts
    return torch.cat([model(part, cache=cache, **options) for part in x.split(lengths, -2)], -2)


KINDS = {
    "plain": {},
    "rotary": {"rotary": Rotary()},
    "deep": {"depth": 2, "rotary": Rotary(), "norm": "pre", "injection": "film"},
    "anderson": {"solver": Anderson(rtol=1e-8, atol=1e-12, history=2, max_steps=500)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [None, [3, 1, 4, 1], [9]], ids=str)
def test_decoding_is_the_solve_of_all_tokens(kind, parts):
    model, x = made(**KINDS[kind]), tokens(3, 9, 8)
    whole = model(x).detach()
    assert model.last_solve.status.shape == (3, 9)
    assert bool(model.last_solve.converged.all())
    torch.testing.assert_close(decoded(model, x, parts=parts), whole, rtol=0, atol=1e-6)
    assert model.last_solve.status.shape == (3, 1 if parts is None else parts[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 100])
def test_chunks_answer_as_all_tokens_at_once(kind, chunk):
    model, x = made(**KINDS[kind]), tokens(3, 9, 8).requires_grad_()
    whole, cotangent = model(x), tokens(3, 9, 8, seed=2)
    (expected,) = torch.autograd.grad(whole, x, cotangent)
    found = model(x, chunk=chunk)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found, x, cotangent)[0], expected, rtol=0, atol=1e-5)
    assert bool(model.last_solve.converged.all())


@pytest.mark.parametrize("seed", range(8))
def test_random_lengths_paddings_and_parts(seed):
    draw = torch.Generator().manual_seed(seed)
    batch, count = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((1, 4), (2, 14)))
    model, x = made(depth=1 + seed % 2, rotary=Rotary() if seed % 3 else None), tokens(batch, count, 8, seed=seed)
    exists = torch.ones(batch, count, dtype=torch.bool)
    for row in range(batch):
        absent = int(torch.randint(0, count, (), generator=draw))
        exists[row, :absent] = False
        if row % 2:
            exists[row] = exists[row].flip(0)
    parts, left = [], count
    while left:
        parts.append(int(torch.randint(1, left + 1, (), generator=draw)))
        left -= parts[-1]
    with torch.no_grad():
        whole = model(x, key_mask=exists)
        cache, found, end = model.new_cache(), [], 0
        for i, part in enumerate(x.split(parts, 1)):
            begin, end = end, end + part.shape[1]
            # Those of the new tokens, or of all.
            key_mask = exists[:, :end] if i % 2 else exists[:, begin:end]
            found.append(model(part, cache=cache, key_mask=key_mask))
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-6)
    assert not whole[~exists].any()
    assert bool((whole[exists] != 0).any(-1).all())
    torch.testing.assert_close(model(x, key_mask=exists, chunk=3).detach(), whole, rtol=0, atol=1e-6)
    if model.block.layers[0].attention.rotary is None:
        for row in range(batch):
            alone = model(x[row, exists[row]]).detach()
            torch.testing.assert_close(whole[row, exists[row]], alone, rtol=0, atol=1e-6)


def test_packed_documents_do_not_see_each_other():
    model, x = made(), tokens(2, 9, 8)
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
    mask = document[:, :, None] == document[:, None, :]
    for given, chunk in ((mask, None), (mask[:, None].expand(2, 2, 9, 9), 4), (mask.double().log(), 3)):
        found = model(x, given, chunk=chunk).detach()
        for row in range(2):
            for d in document[row].unique():
                own = document[row] == d
                torch.testing.assert_close(found[row, own], model(x[row, own]).detach(), rtol=0, atol=1e-6)


@pytest.mark.by_name(slow=r"\[deep")
@pytest.mark.parametrize("kind", ["plain", "deep"])
def test_earlier_tokens_keep_their_bits_when_later_ones_change(kind):
    model, x = made(dim=16, **KINDS[kind]), tokens(1, 40, 16)
    with torch.no_grad():
        before = model(x)
        for count in (1, 5, 30, 39):
            other = x.clone()
            other[:, count:] = 3 * tokens(1, 40 - count, 16, seed=7)
            assert torch.equal(model(other)[:, :count], before[:, :count])
            other[:, count:] = torch.nan
            found = model(other, on_failure="ignore")
            assert torch.equal(found[:, :count], before[:, :count])
            assert bool(found[:, count:].isnan().all())
            assert model.last_solve.status[0].tolist() == [0] * count + [int(ia.Status.NONFINITE)] * (40 - count)
        with pytest.raises(ia.ConvergenceError, match="NaN or an infinity"):
            model(other)


@pytest.mark.parametrize("steps", [None, 50])
@torch.no_grad()
def test_tokens_behind_a_nan_in_a_cache_are_lost_too(steps):
    model, x = made(on_failure="ignore"), tokens(2, 6, 8)
    whole = model(x)
    x[0, 2] = torch.nan
    cache = model.new_cache()
    found = decoded(model, x, cache, steps=steps)
    assert found.isnan().any(-1).tolist() == [[False] * 2 + [True] * 4, [False] * 6]
    torch.testing.assert_close(found[1], whole[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0, :2], whole[0, :2], rtol=0, atol=1e-6)
    assert cache.status[0].tolist()[2:] == [int(ia.Status.NONFINITE)] * 4
    assert bool((cache.status[1] <= ia.Status.BUDGET).all())
    # Forgotten tokens do no harm.
    cache.rewind(2)
    torch.testing.assert_close(
        decoded(model, tokens(2, 6, 8)[:, 2:], cache, steps=steps), whole[:, 2:], rtol=0, atol=1e-6
    )


def test_a_nan_gives_no_gradient_to_anybody():
    model, x = made(on_failure="ignore"), tokens(2, 6, 8)
    x[0, 3] = torch.nan
    x.requires_grad_()
    for steps in (None, 12):
        z = model(x, steps=steps)
        assert z[0, :3].isfinite().all()
        assert z[1].isfinite().all()
        assert z[0, 3:].isnan().all()
        gradients = torch.autograd.grad(z.nan_to_num().square().sum(), [x, *model.parameters()])
        assert all(g.isfinite().all() for g in gradients)
        assert not gradients[0][0, 3:].any()
        assert bool(gradients[0][1].any())
        assert model.last_solve.status[0].tolist()[3:] == [int(ia.Status.NONFINITE)] * 3


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_gradient_is_that_of_many_steps(chunk):
    model, x = made(depth=2, rotary=Rotary(), chunk=chunk), tokens(2, 5, 8).requires_grad_()
    inputs, cotangent = [x, *model.parameters()], tokens(2, 5, 8, seed=3)
    found = torch.autograd.grad(model(x), inputs, cotangent)
    expected = torch.autograd.grad(model(x, steps=80), inputs, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Gated(nn.Module):
    """A causal block of its own, with masks that broadcast, which reads settled tokens."""

    def __init__(self, width=6, reads=True):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.mix, self.reads = nn.Linear(width, 3 * width), nn.Linear(width, width), reads

    @property
    def takes_past(self):
        return self.reads

    def forward(self, z, x, past=None):
        query, key, value = self.project(z + x).unsqueeze(-3).chunk(3, -1)
        masks = {"is_causal": True}
        if past is not None:
            key, value = past.update(key, value)
            masks = {"attn_mask": past.mask, "is_causal": past.is_causal}
        read = F.scaled_dot_product_attention(query, key, value, **masks).squeeze(-3)
        return torch.tanh(0.4 * self.mix(z) + 0.4 * read + x)


@pytest.mark.parametrize("reads", [True, False])
def test_a_block_of_its_own(reads):
    layer = Equilibrium(Gated(reads=reads), causal=True, solver=TIGHT, on_failure="raise").double()
    x = tokens(2, 7, 6).requires_grad_()
    z = layer(x)
    assert layer.last_solve.status.shape == (2, 7)
    torch.testing.assert_close(z, layer(x, steps=80), rtol=0, atol=1e-6)
    assert torch.autograd.gradcheck(layer, (x[:1, :3].detach().requires_grad_(),), atol=1e-5)
    if reads:
        torch.testing.assert_close(decoded(layer, x), z.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(layer(x, chunk=3), z, rtol=0, atol=1e-6)
        return
    with pytest.raises(ValueError, match="take a keyword argument `past` for a cache"):
        layer.new_cache()
    with pytest.raises(ValueError, match="`chunk` must be None for Gated"):
        layer(x, chunk=3)


class Pair(Gated):
    """Two streams, each token by token."""

    def forward(self, z, x, past=None):
        high, low = z
        low = super().forward(low, x + high, past)
        return torch.tanh(0.3 * low + 0.2 * high), low


def test_a_state_of_two_streams():
    layer = Equilibrium(Pair(), causal=True, solver=TIGHT, on_failure="raise").double()
    x = tokens(2, 7, 6)
    start = (torch.zeros_like(x), torch.zeros_like(x))
    high, low = (t.detach() for t in layer(x, start=start))
    assert layer.last_solve.status.shape == (2, 7)
    cache, found = layer.new_cache(), []
    with torch.no_grad():
        for part in x.split(1, 1):
            found.append(layer(part, cache=cache, start=(torch.zeros_like(part), torch.zeros_like(part))))
    for stream, all_at_once in zip(zip(*found, strict=True), (high, low), strict=True):
        torch.testing.assert_close(torch.cat(stream, 1), all_at_once, rtol=0, atol=1e-6)


class Slow(nn.Module):
    """Tokens by themselves, with a rate of convergence that the input says."""

    def forward(self, z, x, past=None):
        if past is not None:
            past.update(z[..., None, :, :], z[..., None, :, :])
        return x[..., :1].sigmoid() * z + 1.0


def test_one_slow_token_holds_up_those_behind_it_alone():
    layer = Equilibrium(Slow(), causal=True, solver=Picard(rtol=1e-6, max_steps=60), on_failure="ignore")
    x = torch.zeros(1, 8, 1)
    x[0, 4] = 6.0  # a rate of 1 - 1/400
    layer(x)
    report = layer.last_solve
    assert report.status[0].tolist() == [0] * 4 + [int(ia.Status.MAX_STEPS)] * 4
    assert report.num_evals[0].tolist()[:4] == [20] * 4
    assert report.num_evals[0, 4:].unique().tolist() == [61]
    chunked = layer(x, chunk=2)
    assert layer.last_solve.status[0].tolist() == report.status[0].tolist()
    # Of the value that is returned: those behind are right by themselves.
    residual = (layer.block(chunked, x) - chunked).norm(dim=-1)
    torch.testing.assert_close(layer.last_solve.residual, residual, rtol=1e-3, atol=1e-6)
    assert layer.last_solve.num_evals[0].tolist()[5:] == [61, 20, 20]


def test_a_token_that_has_not_settled_is_named_and_can_be_refused():
    layer = Equilibrium(Slow(), causal=True, solver=Picard(rtol=1e-6, max_steps=60), on_failure="raise")
    x, cache = torch.zeros(2, 5, 1), layer.new_cache()
    x[1, 3] = 6.0
    layer(x[:, :3], cache=cache)
    held = copy.deepcopy(cache)
    with pytest.raises(ia.ConvergenceError, match=r"1 of 2 problems, first at \(1, 0\)"):
        layer(x[:, 3:4], cache=cache)
    assert cache.length == 3
    assert torch.equal(cache.status, held.status)
    layer(x[:, 3:4], cache=cache, on_failure="ignore")
    layer(x[:, 4:5], cache=cache, on_failure="ignore")
    # Behind a token that has not settled none has.
    assert cache.status.tolist() == [[0] * 5, [0, 0, 0, 4, 4]]


class Growing(nn.Module):
    """Tokens by themselves whose steps shrink or grow by a rate that the input says; their keys are their states."""

    takes_past = True

    def forward(self, z, x, past=None):
        if past is not None:
            past.update(z[..., None, :, :], z[..., None, :, :])
        return 1.0 - x[..., :1] * z


@pytest.mark.parametrize("solver", [Picard(rtol=1e-6, max_steps=30), Picard(rtol=0, atol=0, max_steps=5)])
@pytest.mark.parametrize("parts", [[1] * 6, [6], [2, 4]], ids=str)
def test_a_cache_holds_the_keys_of_the_states_that_are_returned(parts, solver):
    block = Counted(Growing())
    layer = Equilibrium(block, causal=True, solver=solver, on_failure="ignore")
    x, cache = torch.tensor([[0.5, -0.3, 0.2, 1.1, 0.5, 0.4], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]])[..., None], None
    for chunk in (None, 2):
        cache, block.rows = layer.new_cache(), 0
        found, residuals = [], []
        with torch.no_grad():
            for part in x.split(parts, 1):
                found.append(layer(part, cache=cache, chunk=chunk))
                residuals.append(layer.last_solve.residual)
        found = torch.cat(found, 1)
        assert torch.equal(cache.memory.held[0].keys[..., 0, :6, :], found)
        expected = (block.block(found, x) - found).norm(dim=-1)
        torch.testing.assert_close(torch.cat(residuals, 1), expected, rtol=1e-5, atol=1e-6)
        if parts == [1] * 6 and solver.fixed_budget:
            # Nothing is evaluated again for the keys.
            assert block.rows == 2 * 6 * 6


class Counted(nn.Module):
    """A block that counts the tokens that it is evaluated on."""

    def __init__(self, block):
        super().__init__()
        self.block, self.rows = block, 0
        self.takes_past = block.takes_past

    def forward(self, z, x, *args, past=None):
        self.rows += z.shape[:-1].numel()
        return self.block(z, x, *args, past=past)


def test_settled_tokens_leave_the_work():
    layer = Equilibrium(Slow(), causal=True, solver=Picard(rtol=1e-6, max_steps=4000), on_failure="raise")
    x = torch.zeros(1, 64, 1)
    x[0, 40] = 4.0
    layer.block.takes_past = True
    layer.block = Counted(layer.block)
    with torch.no_grad():
        whole, evaluations = layer(x), layer.last_solve.num_evals
        assert layer.block.rows < 0.5 * 64 * int(evaluations.max())
        at_once, layer.block.rows = layer.block.rows, 0
        torch.testing.assert_close(layer(x, chunk=8), whole, rtol=1e-4, atol=0)
        assert layer.block.rows < 0.5 * at_once


def test_the_cache_has_one_set_of_keys_however_many_evaluations_are_made():
    sizes = []
    for steps in (1, 16):
        model, x = made(depth=2), tokens(2, 6, 8)
        cache = model.new_cache()
        decoded(model, x, cache, steps=steps)
        sizes.append(cache.num_bytes)
        assert cache.num_evals.tolist() == [[steps] * 6] * 2
        assert len(cache.memory.held) == 2
    assert sizes[0] == sizes[1] == 2 * 2 * (2 * 6 * 8) * 8


@pytest.mark.parametrize("steps", [None, 2])
def test_a_cache_of_no_sequences_grows_as_others_do(steps):
    model = made(depth=2)
    cache = model.new_cache()
    for length, count in enumerate((4, 1, 2)):
        assert model(tokens(0, count, 8), cache=cache, steps=steps).shape == (0, count, 8)
        assert cache.length == (4, 5, 7)[length]
    assert cache.status.shape == cache.num_evals.shape == (0, 7)
    with pytest.raises(ValueError, match="batch that it holds"):
        model(tokens(2, 1, 8), cache=cache)
    cache.rewind(5)
    assert cache.status.shape == (0, 5)


@pytest.mark.parametrize("options", [{"exit": Exit(rtol=0.3)}, {"steps": 3}], ids=repr)
def test_tokens_that_end_early_are_others_beside_a_cache_and_so_it_is_said(options):
    model, x = made(depth=2), tokens(2, 6, 8)
    with torch.no_grad():
        apart = decoded(model, x, **options) - model(x, **options)
        assert float((decoded(model, x) - model(x)).abs().max()) < 1e-5
    assert float(apart.abs().max()) > 1e-3
    for text in (type(model).new_cache.__doc__, Exit.__doc__):
        assert "as they ended" in " ".join(text.split())


def test_steps_beside_a_cache_tend_to_the_solve():
    model, x = made(depth=2, rotary=Rotary()), tokens(2, 6, 8)
    whole = model(x).detach()
    torch.testing.assert_close(decoded(model, x, steps=60), whole, rtol=0, atol=1e-6)
    assert model.last_solve.statuses == [["BUDGET"], ["BUDGET"]]
    one = decoded(model, x[:, :1], steps=3)
    torch.testing.assert_close(one, model(x[:, :1], steps=3).detach())
    with pytest.raises(ValueError, match="be at least 1 with a cache"):
        model(x[:, :1], cache=model.new_cache(), steps=0)


def test_rewinding_copies_and_beams():
    model, x = made(rotary=Rotary()), tokens(3, 8, 8)
    whole = model(x).detach()
    cache = model.new_cache()
    decoded(model, x[:, :5], cache)
    kept = copy.deepcopy(cache)
    decoded(model, tokens(3, 3, 8, seed=9), cache)
    cache.rewind(5)
    for each in (cache, kept):
        torch.testing.assert_close(decoded(model, x[:, 5:], each), whole[:, 5:], rtol=0, atol=1e-6)
    cache.rewind(5)
    beams = torch.tensor([2, 0, 0, 1])
    cache.select_batch(beams)
    assert cache.status.shape == (4, 5)
    torch.testing.assert_close(decoded(model, x[beams, 5:], cache), whole[beams, 5:], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="`length` must be at most 8"):
        cache.rewind(9)
    cache.rewind(0)
    torch.testing.assert_close(decoded(model, x[beams], cache), whole[beams], rtol=0, atol=1e-6)


def test_a_warm_start_begins_at_the_token_before():
    model, x = made(), tokens(1, 1, 8).expand(1, 12, 8)
    evaluations = []
    for warm in (False, True):
        cache = model.new_cache(warm_start=warm)
        decoded(model, x, cache)
        evaluations.append(int(cache.num_evals.sum()))
    assert evaluations[1] < 0.6 * evaluations[0]


def test_states_beside_a_cache_have_no_gradient_and_say_so():
    model, x = made(), tokens(2, 3, 8)
    z = model(x, cache=model.new_cache())
    with pytest.raises(RuntimeError, match="have no gradient, as keys of earlier tokens are kept without"):
        z.sum().backward()
    with torch.no_grad():
        assert not model(x, cache=model.new_cache()).requires_grad


def test_dropout_is_one_function_within_a_call():
    model, x = made(dim=16, dropout=0.2), tokens(2, 8, 16).requires_grad_()
    model.train()
    for _ in range(2):
        torch.manual_seed(3)
        z = model(x, chunk=3)
        assert bool(model.last_solve.converged.all())
        torch.manual_seed(3)
        torch.testing.assert_close(z, model(x, steps=100), rtol=0, atol=1e-6)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_axes_of_samples(lead):
    model, x = made(), tokens(*lead, 6, 8)
    whole = model(x).detach()
    assert model.last_solve.status.shape == (*lead, 6)
    torch.testing.assert_close(decoded(model, x), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(model(x, chunk=4).detach(), whole, rtol=0, atol=1e-6)
    flat = model(x.reshape(-1, 6, 8)).detach().view(whole.shape)
    torch.testing.assert_close(whole, flat, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_and_autocast(dtype):
    model, x = made(solver=Picard(rtol=1e-2)).to(dtype), tokens(2, 6, 8).to(dtype)
    whole = model(x).detach()
    assert whole.dtype == dtype
    torch.testing.assert_close(decoded(model, x), whole, rtol=0.1, atol=0.1)
    model, x = model.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).detach(), whole.float(), rtol=0.1, atol=0.1)
        torch.testing.assert_close(decoded(model, x), whole.float(), rtol=0.1, atol=0.1)


def test_transforms_solve_samples_as_a_whole():
    model, x = made(), tokens(2, 5, 8)
    expected = model(x).detach()
    found = torch.func.vmap(lambda x: model(x))(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    gradient = torch.func.grad(lambda x: model(x).square().sum())(x)
    x.requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x).square().sum(), x)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("adjoint", [ia.Unrolled(), ia.Phantom(60), ia.Reversible(damping=0.5)])
def test_unrolled_and_other_adjoints(adjoint):
    model, x = made(), tokens(2, 5, 8).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    z = made(adjoint=adjoint)(x, steps=30 if isinstance(adjoint, ia.Reversible) else None)
    torch.testing.assert_close(torch.autograd.grad(z.square().sum(), x)[0], expected, rtol=0, atol=1e-4)


def test_reversible_steps_of_lost_tokens_spoil_none_before_them():
    y = tokens(2, 5, 8)
    y[0, 3:] = torch.nan
    with pytest.warns(ia.ConvergenceWarning):
        z = made(on_failure="warn", adjoint=ia.Reversible(damping=0.5))(y, steps=30)
    assert z[0].isfinite().all(-1).tolist() == [True] * 3 + [False] * 2


def test_copies_and_pickles_of_the_layer_have_caches_of_their_own():
    model, x = made(), tokens(1, 2, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))
        with pytest.raises(ValueError, match="another layer"):
            other(x, cache=model.new_cache())


def test_one_token_of_a_block_that_gets_all_tokens_at_once():
    layer = Equilibrium(Gated(reads=False), causal=True, solver=TIGHT, on_failure="raise").double()
    x = tokens(2, 7, 6).requires_grad_()
    one = layer(x[:, :1])
    assert layer.last_solve.status.tolist() == [[0], [0]]
    torch.testing.assert_close(one, layer(x)[:, :1], rtol=0, atol=1e-6)
    left, right = (torch.autograd.grad(z.square().sum(), x)[0] for z in (one, layer(x)[:, :1]))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_loop_of_a_causal_model_is_one_graph(padded):
    model, x = made(rotary=Rotary(), on_failure="warn").eval(), tokens(2, 5, 8)
    masks = {"key_mask": torch.arange(5) >= torch.tensor([[0], [2]])} if padded else {}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, steps=3, **masks), model(x, steps=3, **masks))
    x[0, 3] = torch.nan
    assert compiled(x, steps=3, **masks)[0].isfinite().all(-1).tolist() == [True] * 3 + [False] * 2
    with pytest.warns(ia.ConvergenceWarning, match="NaN or an infinity"):
        assert model.last_solve.status[0].tolist()[3:] == [int(ia.Status.NONFINITE)] * 2


class Mixed(Gated):
    """A block that takes a matrix which all tokens share."""

    def forward(self, z, x, matrix, past=None):
        return super().forward(z, x, past) @ matrix


@pytest.mark.parametrize("count", [5, 6])
@torch.no_grad()
def test_a_matrix_of_as_many_rows_as_tokens_is_no_argument_of_tokens(count):
    layer = Equilibrium(Mixed(), causal=True, solver=TIGHT, on_failure="raise").double()
    x, matrix = tokens(2, count, 6), 0.5 * torch.linalg.qr(tokens(6, 6))[0]
    whole, cache = layer(x, matrix), layer.new_cache()
    torch.testing.assert_close(layer(x, matrix, chunk=2), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(layer(x, matrix, cache=cache), whole, rtol=0, atol=1e-6)
