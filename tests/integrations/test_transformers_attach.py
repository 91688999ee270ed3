"""`attach` and `load`: options of one model, which its file keeps."""

import functools
import json

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers_models import MODELS, batch, logits, make

from implicit_attention import Anderson, Implicit, Picard
from implicit_attention.integrations.transformers import attach, convert, last_solves, load, override, register, report
from implicit_attention.linear import CG
from implicit_attention.solvers import SciPy

HEADS = torch.tensor([0.3, 0.5, 0.7, 0.9])


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


def attached(name="llama", **options):
    model, given = make(name, torch.float32), batch(name, padding=3)
    return attach(model, **{"on_failure": "raise", **options}), given


# One model.


def test_options_belong_to_the_model_that_they_were_given_to():
    first, given = attached(anchor=0.9, solver=Anderson(rtol=1e-6))
    expected = logits(first, given)
    second, _ = attached(anchor=0.2, max_steps=0)
    register(anchor=0.4, max_steps=3, on_failure="ignore")
    assert {row.anchor for row in report_of(second, given)} == {0.2}
    assert torch.equal(logits(first, given), expected)
    assert {row.anchor for row in report(first)} == {0.9}
    third = make("llama", torch.float32)
    third.set_attn_implementation("equilibrium")
    assert {row.anchor for row in report_of(third, given)} == {0.4}


def report_of(model, given):
    logits(model, given)
    return report(model)


@pytest.mark.parametrize("door", [attach, lambda model: convert(model, schedule=[0.9])])
def test_a_model_with_the_same_configuration_is_left_alone(door):
    config, given = make("llama", torch.float32).config, batch("llama")
    ours, other = (hf.LlamaForCausalLM(config).eval() for _ in range(2))
    expected = logits(other, given)
    door(ours)
    assert other.config._attn_implementation != "equilibrium"
    assert not hasattr(config, "equilibrium_anchors")
    assert torch.equal(logits(other, given), expected)


def test_call_and_override_come_before_the_model():
    model, given = attached(anchor=0.9, layers={1: {"anchor": 0.3}})
    assert [row.anchor for row in report_of(model, given)] == [0.9, 0.3]
    logits(model, given, anchor=0.5)
    assert [row.anchor for row in report(model)] == [0.5, 0.5]
    with override(model, anchor=0.6):
        assert [row.anchor for row in report_of(model, given)] == [0.6, 0.6]
    convert(model, schedule=[0.7], inputs=given)
    assert [row.anchor for row in report_of(model, given)] == [0.7, 0.7]


def test_what_does_not_fit_is_refused_before_anything_is_changed():
    model = make("llama")
    before = model.config._attn_implementation
    for options in ({"layers": {2: {"anchor": 0.9}}}, {"solver": SciPy("hybr", {"jac": object()})}, {"anchor": 2.0}):
        with pytest.raises(ValueError, match=r"`(layers|solver|anchor)` must"):
            attach(model, **options)
        assert model.config._attn_implementation == before
        assert not hasattr(model.config, "equilibrium_anchors")


def test_an_unknown_layer_is_refused_at_the_door():
    with pytest.raises(
        ValueError, match=r"`layers` must hold indices of layers of LlamaForCausalLM \(0, 1\), got \[2\]"
    ):
        attached(layers={2: {"anchor": 0.9}})
    with pytest.raises(ValueError, match="`partial` must be one of"):
        attached(partial="accept")


def overridden(model, anchor):
    with override(model, anchor=anchor):
        pass


@pytest.mark.parametrize(
    "give",
    [
        lambda model, anchor: register(anchor=anchor),
        lambda model, anchor: register(layers={0: {"anchor": anchor}}),
        lambda model, anchor: attach(model, anchor=anchor),
        lambda model, anchor: attach(model, layers=lambda index: {"anchor": anchor}),
        overridden,
    ],
)
def test_an_anchor_that_no_optimiser_and_no_engine_knows_of_is_refused(give):
    anchor, model = HEADS.clone().requires_grad_(), make("llama")
    with pytest.raises(
        ValueError, match=r"`anchor` must not require grad here.*learn_anchors.*parameter of yours.*detach"
    ):
        give(model, anchor)
    give(model, anchor.detach())


class Adapted(nn.Module):
    """What adapters, and engines, put around a model."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


@pytest.mark.parametrize("door", [attach, convert])
def test_the_model_inside_a_wrapper_is_named(door):
    with pytest.raises(TypeError, match=r"got Adapted; it wraps one .*pass model\.base_model\.model"):
        door(Adapted(make("llama")))
    with pytest.raises(TypeError, match=r"got Linear; for models of torch.nn use .*replace_attention"):
        door(nn.Linear(2, 2))


# Files.


@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_gives_the_same_logits_bit_for_bit(name, tmp_path):
    # Not the default solver, whose answer differs within the tolerance, or altogether where there are several.
    options = {"anchor": 0.6, "solver": Anderson(rtol=1e-2), "layers": {1: {"anchor": HEADS, "solver": Anderson()}}}
    model, given = attached(name, **options)
    expected = logits(model, given)
    model.save_pretrained(tmp_path)
    register(anchor=0.2, solver=Picard())
    for loaded in (load(type(model), tmp_path), type(model).from_pretrained(tmp_path)):
        if name == "gpt_oss":
            loaded.set_experts_implementation("eager")
        assert torch.equal(logits(loaded.eval(), given), expected)
    attach(loaded, anchor=0.6)
    assert not torch.equal(logits(loaded, given), expected)


def test_a_conversion_keeps_its_solver_in_the_file(tmp_path):
    model, given = make("t5", torch.float32), batch("t5")
    convert(model, schedule=[0.6], inputs=given, solver=Picard(rtol=1e-2))
    expected = logits(model, given)
    model.save_pretrained(tmp_path)
    loaded = load(hf.AutoModelForSeq2SeqLM, tmp_path).eval()
    assert torch.equal(logits(loaded, given), expected)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert torch.equal(logits(load(type(model), again).eval(), given), expected)


def test_a_file_that_is_loaded_without_the_library_is_not_softmax_in_silence(tmp_path, monkeypatch):
    model, _ = attached()
    model.save_pretrained(tmp_path)
    # As in a process that has never registered the name.
    monkeypatch.delitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "equilibrium")
    with pytest.raises(ValueError, match='attn_implementation="equilibrium"` is not supported'):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_file_without_what_is_needed_is_named(tmp_path):
    plain = make("llama")
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`path` must hold one model's anchors .*got none; save a model after attach"):
        load(type(plain), tmp_path)
    attach(attach(plain, name="other", anchor=0.3), anchor=0.9).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got anchors for 'equilibrium', 'other'; say which by name="):
        load(type(plain), tmp_path)
    assert load(type(plain), tmp_path, name="other").config._attn_implementation == "other"
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["equilibrium_solver"]["other"]["name"] = "Mine"
    del config["equilibrium_solver"]["equilibrium"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"`config.equilibrium_solver` must be one of .*'Mine'.*solver="):
        load(type(plain), tmp_path, name="other")
    with pytest.raises(ValueError, match="`solver` must be given where the configuration has none"):
        load(type(plain), tmp_path, name="equilibrium")
    loaded = load(type(plain), tmp_path, name="other", solver=Picard(), max_memory=None)
    assert loaded.config.equilibrium_solver["other"]["name"] == "Picard"


def test_a_model_with_anchors_in_its_file_and_softmax_in_use_is_told():
    model, given = attached()
    model.set_attn_implementation("sdpa")
    logits(model, given)
    with pytest.raises(ValueError, match="its configuration has anchors for 'equilibrium': load it with `load`"):
        report(model)


# Engines.


@pytest.mark.by_name(slow=r"\[compile")
@pytest.mark.parametrize("wrap", ["partial", "wraps", "compile", "object"])
def test_a_name_stays_ours_when_an_engine_wraps_its_function(wrap, monkeypatch):
    register("wrapped", anchor=0.9)
    function = ALL_ATTENTION_FUNCTIONS["wrapped"]

    @functools.wraps(function.__call__)
    def wrapper(*args, **given):
        return function(*args, **given)

    class Engine:
        def __call__(self, *args, **given):
            return function(*args, **given)

    wrapped = {
        "partial": functools.partial(function),
        "wraps": wrapper,
        "compile": torch.compile(function, backend="eager"),
        "object": Engine(),
    }[wrap]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "wrapped", wrapped)
    model, given = make("llama", torch.float32), batch("llama")
    model.set_attn_implementation("wrapped")
    logits(model, given)
    assert len(last_solves(model)) == len(report(model)) == 2
    register("wrapped", anchor=0.4)
    assert ALL_ATTENTION_FUNCTIONS["wrapped"] is wrapped
    assert {row.anchor for row in report_of(model, given)} == {0.4}
    attach(model, name="wrapped", anchor=0.7)
    assert {row.anchor for row in report_of(model, given)} == {0.7}


HASTY = Implicit(CG(rtol=1e-6, max_steps=1))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_failures_of_a_backward_pass_are_seen_under_checkpointing(reentrant):
    model, given = attached(adjoint=HASTY, on_failure="ignore")
    model.train()
    model.enable_input_require_grads()
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        model(**given, use_cache=False).logits.square().sum().backward()
        failed = [int(found.adjoint.failed.sum()) for found in last_solves(model).values()]
        assert len(failed) == 2
        assert min(failed) > 30
    model.eval()
    logits(model, given)
    assert all(found.adjoint.status is None for found in last_solves(model).values())
