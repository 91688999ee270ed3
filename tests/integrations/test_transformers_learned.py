"""`learn_anchors`: anchors of converted models as parameters."""

import copy
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers_learning import learning, loss_of, steps, values, written_out
from transformers_models import MODELS, TIGHT, batch, logits, make, with_equilibria

from implicit_attention.integrations.transformers import (
    attach,
    convert,
    last_solves,
    learn_anchors,
    override,
    register,
    report,
)

every = pytest.mark.parametrize("name", MODELS)
# Norms and rotary angles are rounded to float32, whatever the precision of the model.
ROUNDING = 1e-6


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


# What they are.


@every
@pytest.mark.parametrize("per", ["head", "layer"])
def test_every_attention_module_has_a_parameter_that_starts_where_it_was_told(name, per):
    model = attach(make(name))
    before = {key for key, _ in model.named_parameters()}
    anchors = learn_anchors(model, initial=0.7, per=per)
    count = 6 if name == "t5" else 2  # layers of encoder, decoder, and between both
    assert len(anchors) == count
    held = dict(model.named_parameters())
    assert held.keys() - before == anchors.keys() == {key for key in model.state_dict() if key.endswith("anchor.logit")}
    for key, parameter in anchors.items():
        assert parameter is held[key]
        assert parameter.requires_grad
        assert parameter.dtype == torch.float64
        assert parameter.shape == ((4,) if per == "head" else (1,))  # of queries, also where keys have two heads
    assert all(torch.allclose(value, torch.tensor(0.7).double(), atol=1e-7) for value in values(anchors))
    logits(model, batch(name))
    assert [row.anchor for row in report(model)] == pytest.approx([0.7] * count)


@every
@pytest.mark.parametrize("per", ["head", "layer"])
def test_values_and_gradients_are_those_of_a_reference_inside_eager_attention(name, per):
    model, anchors, given = learning(name, torch.float64, per, **TIGHT)
    parameters = dict(model.named_parameters())
    found = []
    for attention in ("equilibrium", with_equilibria(written_out)):
        model.set_attn_implementation(attention)
        loss = loss_of(model, given, name)
        found.append([loss, *torch.autograd.grad(loss, parameters.values(), allow_unused=True)])
    for key, ours, reference in zip(["loss", *parameters], *found, strict=True):
        assert (ours is None) == (reference is None), key
        if ours is not None:
            assert (ours - reference).abs().max() <= ROUNDING * max(1, reference.abs().max()), key
    gradients = dict(zip(parameters, found[0][1:], strict=True))
    assert min(gradients[key].norm() for key in anchors) > 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient(reentrant):
    model, _, given = learning()
    model.train()
    model.enable_input_require_grads()
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        loss_of(model, given).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_trains_them(autocast):
    model, anchors, given = learning(dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_of(model, given).backward()
    reference, exact, _ = learning()
    loss_of(reference, given).backward()
    for ours, theirs in zip(anchors.values(), exact.values(), strict=True):
        assert ours.grad.dtype == ours.dtype == (torch.float32 if autocast else torch.bfloat16)
        assert (ours.grad - theirs.grad).abs().max() <= 0.2 * theirs.grad.abs().max()


@every
@pytest.mark.parametrize("per", ["head", "layer"])
def test_they_start_at_one_number_for_each_head_as_fixed_ones_are(name, per):
    start = torch.tensor([0.3, 0.5, 0.7, 0.9] if per == "head" else [0.6]).double()
    fixed, learned = (attach(make(name), anchor=start if which else 0.5, **TIGHT) for which in (True, False))
    anchors = learn_anchors(learned, start.requires_grad_(), per)
    start = start.detach()
    assert all(torch.allclose(value, start, atol=1e-12) for value in values(anchors))
    torch.testing.assert_close(logits(learned, batch(name)), logits(fixed, batch(name)), rtol=1e-6, atol=1e-6)


class Adapted(nn.Module):
    """A module as adapters keep it that are told to train and to save it: frozen, with a copy that is trained."""

    def __init__(self, module):
        super().__init__()
        self.trained, self.original = copy.deepcopy(module).requires_grad_(), module.requires_grad_(False)

    def forward(self):
        return self.trained()


def test_a_report_says_how_many_layers_train_them(capsys):
    model, anchors, given = learning()
    told = []
    for change in ("trained", "frozen", "adapted"):
        if change == "frozen":
            model.requires_grad_(False)
        elif change == "adapted":
            attention = model.model.layers[1].self_attn
            attention.anchor = Adapted(attention.anchor)
        logits(model, given)
        report(model)
        told.append(capsys.readouterr().out.splitlines()[-1])
    assert told == [f"learned anchors: trainable in {count} of 2 layers" for count in (2, 0, 1)]
    loss_of(model, given).backward()
    assert attention.anchor.trained.logit.grad.norm() > 0
    assert all(parameter.grad is None for parameter in anchors.values())
    logits(fixed := attach(make("llama")), given)
    report(fixed)
    assert "learned anchors" not in capsys.readouterr().out


# Which anchor wins.


def test_they_replace_anchors_of_attach_and_of_its_layers():
    model, anchors, given = learning(anchor=0.2, layers={1: {"anchor": 0.3, "max_steps": 50}})
    fixed = attach(
        make("llama", torch.float32), on_failure="raise", layers=lambda i: {"anchor": values(anchors)[i].float()}
    )
    torch.testing.assert_close(logits(model, given), logits(fixed, given), rtol=1e-5, atol=1e-5)


def test_a_call_and_an_override_go_before_them_and_only_while_they_last():
    model, anchors, given = learning()
    own = logits(model, given)
    called = logits(model, given, anchor=0.4)
    assert {row.anchor for row in report(model)} == {0.4}
    with override(model, anchor=0.4):
        assert torch.equal(logits(model, given), called)
    assert torch.equal(logits(model, given, anchor=None), own)
    with override(model, max_steps=50, anchor=None):
        torch.testing.assert_close(logits(model, given), own)
    assert torch.equal(logits(model, given), own)
    assert not torch.allclose(own, called, atol=1e-2)
    assert [row.anchor for row in report(model)] == pytest.approx([float(value.mean()) for value in values(anchors)])


def test_softmax_attention_gives_them_zeros_instead_of_no_gradient():
    model, anchors, given = learning(layers={0: {"max_steps": 0}})
    loss_of(model, given).backward()
    first, second = (parameter.grad for parameter in anchors.values())
    assert first.eq(0).all()
    assert second.ne(0).all()


# Training.


def test_a_step_moves_them_and_frozen_ones_stay():
    model, anchors, given = learning()
    model.requires_grad_(False)
    for parameter in anchors.values():
        parameter.requires_grad_()
    before = copy.deepcopy(model.state_dict())
    losses, _ = steps(model, given, 5, torch.optim.Adam(anchors.values(), lr=0.1))
    assert losses[-1] < losses[0]
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == anchors.keys()
    model.requires_grad_()
    for parameter in anchors.values():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    steps(model, given, 1)
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved
    assert not moved & anchors.keys()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own(duplicate):
    model, anchors, given = learning()
    expected = logits(model, given)
    other = duplicate(model)
    with torch.no_grad():
        for parameter in anchors.values():
            parameter += 1
    assert torch.equal(logits(other, given), expected)
    assert not torch.allclose(logits(model, given), expected)


@pytest.mark.slow
def test_steps_of_a_compiled_model_share_one_graph():
    found = []
    for compiled in (False, True):
        model, anchors, given = learning(on_failure="warn")
        given.pop("position_ids")
        train = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(anchors.values(), lr=1.0)
        first, _ = steps(train, given, 1, optimizer)
        # The compiler's own state of recording is new in the second call.
        second, _ = steps(train, given, 1, optimizer)
        with torch.compiler.set_stance("fail_on_recompile"):
            rest, _ = steps(train, given, 3, optimizer)
        found.append((torch.cat([first, second, rest]), *(parameter.detach() for parameter in anchors.values())))
        assert [row.anchor for row in report(model)] != pytest.approx([0.7, 0.7])
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-4)


def test_a_converted_model_learns_from_where_it_is():
    model, given = make("llama", torch.float32), batch("llama")
    convert(model, schedule=(0.9, 0.8), inputs=given)
    expected = logits(model, given)
    learn_anchors(model, 0.8)
    torch.testing.assert_close(logits(model, given), expected, rtol=1e-5, atol=1e-5)
    assert all(solve.converged.all() for solve in last_solves(model).values())


# Bad input.


@pytest.mark.parametrize(
    "initial", [0, 1.0, 1e-5, float("nan"), float("inf"), torch.tensor([0.5, 1.5, 0.5, 0.5]), torch.tensor([0.5, 1.0])]
)
def test_anchors_that_cannot_be_learned_are_refused(initial):
    model = attach(make("llama"))
    with pytest.raises(ValueError, match=r"`initial` must (be in \[0, 1\]|lie in \(0.0001, 0.9999\) to be learned)"):
        learn_anchors(model, initial)
    assert not any("anchor" in key for key, _ in model.named_parameters())


def test_a_number_of_anchors_that_is_not_that_of_heads_is_refused():
    model = attach(make("llama"))
    for shape in ((3,), (2, 2), (1, 4)):
        required = f"`initial` must broadcast to one for each head = (4,), got shape {shape}"
        with pytest.raises(ValueError, match=re.escape(required)):
            learn_anchors(model, torch.full(shape, 0.5))
    with pytest.raises(ValueError, match=re.escape("`initial` must broadcast to one for each layer = (1,)")):
        learn_anchors(model, torch.full((4,), 0.5), per="layer")
    with pytest.raises(TypeError, match="`initial` must have a floating-point dtype"):
        learn_anchors(model, torch.ones(4, dtype=torch.long))
    assert not any("anchor" in key for key, _ in model.named_parameters())


def test_other_bad_input_is_refused_with_a_remedy():
    model = make("llama")
    for wrong, words in {nn.Sequential(model): r"pass model\.0", None: "NoneType"}.items():
        with pytest.raises(TypeError, match=words):
            learn_anchors(wrong)
    learn_anchors(attach(model))
    for again in (learn_anchors, attach, lambda model: convert(model, schedule=(0.9,))):
        with pytest.raises(ValueError, match=r"`model` must have fixed anchors, got learned ones; \w+"):
            again(model)
    silent = attach(make("llama"))
    for layer in silent.model.layers:
        layer.self_attn.config = SimpleNamespace(_attn_implementation="equilibrium")
    with pytest.raises(ValueError, match=r"`per` must be 'layer' for LlamaAttention \(model.layers.0.self_attn\)"):
        learn_anchors(silent)
    registered = make("llama")
    registered.set_attn_implementation("equilibrium")
    with pytest.raises(ValueError, match=r"call attach\(model\) or convert\(model\) first"):
        learn_anchors(registered)


def test_anchors_of_another_number_of_heads_are_refused_in_the_call():
    model, _, given = learning()
    for module in model.modules():
        if hasattr(module, "anchor"):
            module.anchor.logit = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"`anchor` must be one number, or one for each of the 4 heads.*got 3 numbers"):
        model(**given)
