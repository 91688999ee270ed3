"""Models of transformers with a FailurePolicy: each layer is counted and told of by itself."""

import copy
import pickle
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from implicit_attention import ConvergenceError, ConvergenceWarning, FailurePolicy, Picard
from implicit_attention.integrations.transformers import attach, convert, last_solves, load, override

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
IDS = torch.arange(12).reshape(2, 6) % 10
#: Too little for queries that see several keys.
ONCE = Picard(max_steps=1, rtol=1e-12, atol=1e-14)
WARN = FailurePolicy(tolerate=0.0, window=2, over="warn", forward="explicit")


def made(**options):
    torch.manual_seed(0)
    return attach(_larger(LlamaForCausalLM(LlamaConfig(**SIZES))), **{"solver": ONCE, "on_failure": WARN, **options})


def _larger(model):
    """With scores that are not all alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    return model


def told(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, ConvergenceWarning)]


def logits(model, **options):
    with torch.no_grad():
        return model(IDS, use_cache=False, **options).logits


def test_each_layer_is_told_of_by_itself():
    model = made()
    lines = [told(lambda: logits(model)) for _ in range(11)]
    assert [len(each) for each in lines] == [2, *[0] * 8, 2, 0]
    for line in lines[0]:
        assert line.endswith("(failing call 1 of this layer; the next one to be told of is number 10)")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(told(lambda other=other: logits(other))) == 2


def test_explicit_answers_are_those_of_softmax_attention_where_all_fail():
    model = made(on_failure=FailurePolicy(forward="explicit", tolerate=1.0))
    found = logits(model)
    # The first token sees one key alone, and is solved by a step.
    assert all(bool(solve.failed[..., 1:].all()) for solve in last_solves(model).values())
    softmax, best = (logits(model, **options) for options in ({"max_steps": 0}, {"on_failure": "ignore"}))
    torch.testing.assert_close(found, softmax, rtol=1e-5, atol=1e-5)
    assert float((best - softmax).abs().max()) > 1e-3


def test_a_window_is_of_one_layer():
    """20 of 24 fail in each layer: counted together, the second layer's would be too many in the first call."""
    model = made(on_failure=FailurePolicy(tolerate=0.6, window=2))
    logits(model)
    assert [int(solve.failed.sum()) for solve in last_solves(model).values()] == [20, 20]
    with pytest.raises(ConvergenceError, match="40 problems failed in a window of 2 calls, more than tolerate"):
        logits(model)


def test_policies_of_layers_calls_and_overrides():
    model = made(on_failure="ignore", layers={1: {"on_failure": WARN}})
    assert len(told(lambda: logits(model))) == 1
    assert told(lambda: logits(model, on_failure="ignore")) == []
    with override(model, on_failure="ignore"):
        assert told(lambda: logits(model)) == []
    with (
        pytest.raises(TypeError, match="must be an instance, got the class"),
        override(model, on_failure=FailurePolicy),
    ):
        pass
    with pytest.raises(ConvergenceError):
        logits(model, on_failure=FailurePolicy(window=1))


def test_a_saved_model_is_given_its_policy_anew(tmp_path):
    model = made(layers={1: {"on_failure": WARN, "anchor": 0.3}})
    expected = logits(model, on_failure="ignore")
    model.save_pretrained(tmp_path)
    assert "Policy" not in (tmp_path / "config.json").read_text()
    loaded = load(LlamaForCausalLM, tmp_path, on_failure=WARN)
    assert torch.equal(logits(loaded, on_failure="ignore"), expected)
    assert len(told(lambda: logits(loaded))) == 2


def test_a_converted_model_keeps_its_policy():
    torch.manual_seed(0)
    model = _larger(LlamaForCausalLM(LlamaConfig(**SIZES)))
    assert told(lambda: convert(model, schedule=(0.9, 0.6), solver=ONCE, on_failure=FailurePolicy(tolerate=1.0))) == []
    assert told(lambda: logits(model)) == []
    with pytest.raises(ConvergenceError):
        convert(model, schedule=(0.6,), on_failure=FailurePolicy(window=1))
