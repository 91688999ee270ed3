"""Files of learned anchors: saved models, and runs that are resumed."""

import json

import pytest
import torch
import transformers as hf
from transformers_learning import learning, steps
from transformers_models import MODELS, logits, make

from implicit_attention.integrations.transformers import attach, learn_anchors, load, register, report


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_answers_the_same_bit_for_bit(name, tmp_path):
    model, anchors, given = learning(name)
    expected = logits(model, given)
    model.save_pretrained(tmp_path)
    loaded = load(type(model), tmp_path, on_failure="raise")
    assert torch.equal(logits(loaded, given), expected)
    held = dict(loaded.named_parameters())
    assert all(torch.equal(held[key], parameter) for key, parameter in anchors.items())
    assert all(held[key].requires_grad for key in anchors)
    assert json.loads((tmp_path / "config.json").read_text())["equilibrium_learned"] == {"equilibrium": "head"}


def clip():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    image = {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    text = {"num_attention_heads": 4, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 49}
    config = hf.CLIPConfig(text_config=sizes | text, vision_config=sizes | image, projection_dim=8)
    # What is read of a text is its end.
    ids = torch.cat([torch.randint(2, 49, (2, 4)), torch.full((2, 1), 49)], dim=1)
    return hf.CLIPModel(config), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}


def test_parts_with_other_numbers_of_heads_have_their_own(tmp_path):
    torch.manual_seed(0)
    model, given = clip()
    model = attach(model.eval(), anchor=0.2)
    anchors = learn_anchors(model, 0.6)
    assert {tuple(parameter.shape) for parameter in anchors.values()} == {(2,), (4,)}
    expected = model(**given)[0]
    expected.square().sum().backward()
    assert all(parameter.grad.abs().min() > 0 for parameter in anchors.values())
    model.save_pretrained(tmp_path)
    assert torch.equal(load(type(model), tmp_path)(**given)[0], expected)


def test_files_in_parts_other_classes_and_precisions_have_them(tmp_path):
    model, anchors, given = learning(per="layer")
    expected = logits(model, given)
    model.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    loaded = load(hf.AutoModelForCausalLM, tmp_path / "parts", on_failure="raise")
    assert torch.equal(logits(loaded, given), expected)
    loaded.save_pretrained(tmp_path / "again")
    inner, found = load(hf.AutoModel, tmp_path / "again", dtype=torch.bfloat16, output_loading_info=True)
    assert not found["missing_keys"]
    names = [key for key, _ in inner.named_parameters() if "anchor" in key]
    assert names == [key.removeprefix("model.") for key in anchors]
    for key in anchors:
        value = inner.get_parameter(key.removeprefix("model."))
        assert torch.equal(value, anchors[key].to(torch.bfloat16))


def test_loading_leaves_transformers_as_they_are(tmp_path):
    before = hf.PreTrainedModel.post_init
    learning()[0].save_pretrained(tmp_path)
    load(hf.LlamaForCausalLM, tmp_path)
    with pytest.raises(OSError, match="nothing"):
        load(hf.LlamaForCausalLM, tmp_path / "nothing")
    assert hf.PreTrainedModel.post_init is before


def test_files_without_them_and_readers_that_drop_them_are_refused(tmp_path):
    model, anchors, given = learning()
    model.save_pretrained(tmp_path / "whole")
    dropped = hf.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"`model` must be loaded by `load`, which reads its learned anchors"):
        dropped(**given)
    rest = {key: value for key, value in model.state_dict().items() if key not in anchors}
    model.save_pretrained(tmp_path / "part", state_dict=rest)
    with pytest.raises(ValueError, match=r"`path` must hold the learned anchors.*layers\.0\.self_attn\.anchor\.logit"):
        load(hf.LlamaForCausalLM, tmp_path / "part")


def test_a_new_model_of_the_same_configuration_has_fixed_ones(tmp_path):
    model, _, given = learning()
    other = attach(hf.LlamaForCausalLM(model.config).eval(), anchor=0.8)
    logits(other, given)
    assert {row.anchor for row in report(other)} == {0.8}
    other.save_pretrained(tmp_path)
    assert not any("anchor" in key for key in load(hf.LlamaForCausalLM, tmp_path).state_dict())
    assert model.config.equilibrium_learned == {"equilibrium": "head"}


def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path):
    model, _, given = learning()
    whole, _ = steps(model, given, 4)
    model, _, given = learning()
    first, optimizer = steps(model, given, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    read = torch.load(tmp_path / "run.pt")
    again = attach(make("llama", torch.float32), on_failure="raise")
    learn_anchors(again)
    again.load_state_dict(read["model"])
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    optimizer.load_state_dict(read["optimizer"])
    second, _ = steps(again, given, 2, optimizer)
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.slow
def test_a_trainer_resumes_bit_for_bit(tmp_path):
    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 50, (8, 9)).unbind()]

    def trained(**resume):
        model = attach(make("llama", torch.float32), on_failure="raise")
        anchors = learn_anchors(model)
        options = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
        options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
        trainer = hf.Trainer(model, hf.TrainingArguments(str(tmp_path), **options), train_dataset=texts)
        trainer.train(**resume)
        return anchors, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole, losses = trained()
    resumed, again = trained(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again == losses
    loaded = dict(load(hf.LlamaForCausalLM, tmp_path / "checkpoint-4").named_parameters())
    for key, parameter in whole.items():
        assert torch.equal(parameter, resumed[key])
        assert torch.equal(parameter, loaded[key])
    assert not torch.equal(
        loaded[key], dict(load(hf.LlamaForCausalLM, tmp_path / "checkpoint-2").named_parameters())[key]
    )
