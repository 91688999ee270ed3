"""`watch`: anchors and radii, copies and state dicts, what it refuses, how it ends, and what is printed."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from watched_layers import DIM, HEADS, LAYERS, TOKENS, Gathered, layer_of, model_of, tokens

from implicit_attention import Anderson, Equilibrium, ImplicitAttention
from implicit_attention.training import watch
from implicit_attention.training.tally import Tally, _counted

every = pytest.mark.parametrize("name", LAYERS)


# Anchors, temperatures, radii.


def test_anchors_and_temperatures_are_means_over_heads_and_layers():
    model = nn.ModuleList([ImplicitAttention(DIM, HEADS, anchor=0.75, beta=0.5), ImplicitAttention(DIM, HEADS)])
    with torch.no_grad():
        model[1].anchor.logit.copy_(torch.tensor([-1.0, 2.0]))
    seen = watch(model)
    for layer in model:
        layer(tokens())
    first, second = seen.take().layers
    assert (first.anchor, first.beta) == (0.75, 0.5)
    learned = model[1].anchor().mean().item()
    assert 0 < learned < 1
    assert second.anchor == pytest.approx(learned)
    assert second.beta == pytest.approx(model[1].beta().mean().item())
    total = seen.take().total
    assert total.anchor == pytest.approx((0.75 + learned) / 2)


def radii(layer, x):
    """Spectral radii of the maps of a layer's queries at their solutions, by plain steps and dense matrices."""
    q, k = (p(x.double()).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    anchor, beta = layer.anchor(), layer.beta()[:, None, None]
    z = q
    for _ in range(500):
        weights = (beta * z @ k.mT).softmax(-1)
        z = anchor * q + (1 - anchor) * weights @ k
    inner = torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]
    keys = k[:, :, None]
    jacobian = ((1 - anchor) * beta)[:, None] * (keys.mT @ inner @ keys)
    return torch.linalg.eigvals(jacobian).abs().amax(-1)


@pytest.mark.parametrize("count", [TOKENS, 40])
def test_spectral_radii_are_those_of_dense_jacobians(count):
    model = layer_of().double()
    given = tokens(count=count, scale=3.0, dtype=torch.float64)
    # More than sixteen states of a head are told by sixteen.
    rows = torch.linspace(0, count - 1, min(count, 16)).round().long()
    with torch.no_grad():
        expected = radii(model, given)[..., rows].max()
    assert 0.1 < expected < 1
    with watch(model, spectral=True) as seen:
        model(tokens(seed=5, dtype=torch.float64))
        model(given).sum().backward()
        observed = seen.take()
        assert observed.total.spectral_radius == observed.layers[0].spectral_radius
        assert observed.total.spectral_radius == pytest.approx(expected.item(), rel=1e-3)
        # Of the last call, also where nothing was solved since.
        assert seen.take().total.spectral_radius == pytest.approx(expected.item(), rel=1e-3)
    with watch(model) as seen:
        model(given)
        assert math.isnan(seen.take().total.spectral_radius)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("spins", "published")])
def test_radii_are_asked_of_every_layer_that_solves(name):
    model = layer_of(name)
    gathered = Gathered(model)
    seen = watch(model, spectral=True)
    gathered.step(model, tokens(scale=2.0))
    observed = seen.take()
    gathered.check(observed)
    assert 0 <= observed.total.spectral_radius < 2


class Nested(nn.Module):
    """A step of an equilibrium that solves for its attention."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = layer_of(), nn.LayerNorm(DIM)

    def forward(self, z, x):
        return self.norm(x + 0.1 * self.attention(z))


def test_what_a_look_solves_is_not_counted():
    torch.manual_seed(0)
    model = Equilibrium(Nested())
    with watch(model, spectral=True) as seen:
        model(tokens()).sum().backward()
        first = seen.take()
        assert [layer.layer for layer in first.layers] == ["", "block.attention"]
        # Each evaluation of the outer one is a call of the inner one.
        assert first.layers[1].forward.calls >= first.layers[0].forward.most
        assert 0 < first.layers[0].spectral_radius < 1
        second = seen.take().total
        assert (second.forward.calls, second.backward.calls) == (0, 0)
        assert second.spectral_radius == first.total.spectral_radius
        model(tokens())
        assert seen.take().layers[0].forward.calls == 1


# Beginning and end.


def test_closed_it_counts_no_more():
    model = model_of()
    with watch(model) as seen:
        model(tokens())
        assert seen.take().total.forward.calls == 2
    assert all(layer._site.tally is None for layer in model)
    model(tokens())
    for _ in range(2):
        seen.close()
    with pytest.raises(ValueError, match=r"`take` must be called before close\(\), got a closed watch"):
        seen.take()
    again = watch(model)
    model(tokens())
    assert again.take().total.forward.calls == 2


def test_what_cannot_be_watched_is_refused_and_changes_nothing():
    model = model_of()
    seen = watch(model[1])
    with pytest.raises(ValueError, match=r"`model` must not be watched already, got a watched layer \['1'\]"):
        watch(model)
    assert model[0]._site.tally is None
    model(tokens())
    assert seen.take().total.forward.calls == 1
    with pytest.raises(ValueError, match=r"`model` must have a layer that solves, got Linear.*attach\(model\)"):
        watch(nn.Linear(2, 2))
    for wrong in (None, model.parameters(), ImplicitAttention):
        with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got \w+"):
            watch(wrong)


def test_a_layer_used_twice_is_one_and_hidden_layers_are_found():
    layer = layer_of()
    model = nn.Sequential(layer, nn.Sequential(layer, layer_of(seed=1)))
    seen = watch(model)
    model(tokens())
    observed = seen.take()
    assert [(one.layer, one.forward.calls) for one in observed.layers] == [("0", 2), ("1.1", 1)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every
def test_copies_are_not_watched_and_the_original_goes_on(name, duplicate):
    model = layer_of(name) if name not in ("multihead", "x-transformers") else layer_of("timm")
    seen = watch(model)
    model(tokens()).sum().backward()
    other = duplicate(model)
    other(tokens()).sum().backward()
    assert seen.take().total.forward.calls == 1
    model(tokens())
    assert seen.take().total.forward.calls == 1
    with watch(other) as copied:
        other(tokens())
        assert copied.take().total.forward.calls == 1
    assert seen.take().total.forward.calls == 0


def test_state_dicts_know_nothing_of_it():
    model = model_of()
    before = model.state_dict()
    buffers = [name for name, _ in model.named_buffers()]
    seen = watch(model)
    model(tokens())
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [name for name, _ in model.named_buffers()] == buffers
    model.load_state_dict(before)
    assert seen.take().total.forward.calls == 2


def test_the_model_may_change_its_precision_and_device_afterwards():
    model = layer_of()
    gathered = Gathered(model)
    seen = watch(model)
    gathered.step(model, tokens())
    model.double()
    gathered.step(model, tokens(dtype=torch.float64))
    gathered.check(seen.take())


def test_a_model_may_be_made_on_no_device_and_watched_before_it_is_put_on_one():
    with torch.device("meta"):
        model = model_of()
    with watch(model) as seen:
        model(tokens().to("meta"))
        assert seen.take().total.forward.calls == 0
    seen = watch(model)
    model.to_empty(device="cpu")
    model.load_state_dict(model_of().state_dict())
    gathered = Gathered(model)
    gathered.step(model, tokens())
    gathered.check(seen.take())


def test_a_graph_that_holds_counts_of_another_device_says_what_to_do():
    tally, solved = Tally(torch.device("cpu"), spectral=False), torch.zeros(3, device="meta")
    with pytest.raises(
        ValueError, match=r"`model` must be watched where it is when .* \(meta\), got a watch begun on cpu"
    ):
        _counted(tally.counts, tally.peaks, solved, solved, solved, solved, None, 0)


def test_what_raises_is_not_seen():
    model = layer_of(solver=Anderson(rtol=1e-12, atol=1e-14, max_steps=1), on_failure="raise")
    seen = watch(model)
    with pytest.raises(RuntimeError, match="failed for"):
        model(tokens(scale=2.0))
    assert seen.take().total.forward.calls == 0


# As text.


def test_the_table_and_the_line_hold_the_numbers():
    model = model_of()
    seen = watch(model)
    model(tokens()).sum().backward()
    observed = seen.take(7)
    forward = observed.total.forward
    lines = repr(observed).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "all"]
    assert lines[-1].split()[1:5] == ["40", f"{forward.mean:.3g}", f"{forward.p99:.3g}", str(forward.most)]
    assert len({len(line) for line in lines}) == 1
    assert observed.line() == (
        f"step 7: evaluations {forward.mean:.1f}, p99 {forward.p99:.0f}, max {forward.most}; failed 0 of 40, "
        f"worst residual {forward.worst:.2g} of its tolerance; backward failed 0 of 40"
    )
    assert [row["step"] for row in observed.rows()] == [7, 7, 7]
