"""Learned anchors of a converted model on two processes: data, parameters and heads spread, and sharded checkpoints."""

import copy
import os

import pytest
import torch
from processes import together
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from implicit_attention import Anderson, Implicit
from implicit_attention.integrations.transformers import attach, learn_anchors, load
from implicit_attention.linear import CG

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, ROWS, TOKENS = 3, 4, 7
OPTIONS = {"solver": Anderson(rtol=1e-10, atol=1e-11), "adjoint": Implicit(CG(rtol=1e-10)), "on_failure": "raise"}
HEADS = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel, "o_proj": RowwiseParallel}


def learning(per="head"):
    torch.manual_seed(0)
    model = attach(LlamaForCausalLM(LlamaConfig(**SIZES)).double(), **OPTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    for i, parameter in enumerate(learn_anchors(model, 0.7, per).values()):
        with torch.no_grad():
            parameter += torch.linspace(-1, 1, len(parameter)) * (i + 1)
    return model


def tokens(step):
    return torch.randint(50, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def steps(model, rows=slice(None), first=0, optimizer=None):
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    for step in range(first, STEPS):
        optimizer.zero_grad()
        ids = tokens(step)[rows]
        # Every row counts the same, however they are spread.
        model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean().neg().backward()
        optimizer.step()
    return model


def whole(model):
    state = model.state_dict()
    return {key: getattr(t, "full_tensor", lambda t=t: t)().detach() * 1 for key, t in state.items()}


def split(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_heads(model, mesh):
    styles = {f"model.layers.*.self_attn.{name}": style() for name, style in HEADS.items()}
    return parallelize_module(model, mesh, styles)


def logits_and_gradients(model):
    logits = model(tokens(0)).logits
    logits.square().mean().backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    return {
        key: getattr(t, "full_tensor", lambda t=t: t)().detach() * 1
        for key, t in ({"logits": logits} | gradients).items()
    }


def resumed(rows, mesh, folder):
    """The state after a sharded checkpoint was written, read into another model, and trained to the end."""
    model = split(learning(), mesh)
    optimizer = optimizer_of(model)
    optimizer.zero_grad()
    steps(model, rows, STEPS - 1, optimizer)
    expected = whole(model)
    state, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": state, "optimizer": moments}, checkpoint_id=folder)
    with torch.no_grad():
        other = learning()
        for parameter in other.parameters():
            parameter.zero_()
    other = split(other, mesh)
    again = optimizer_of(other)
    state, moments = get_state_dict(other, again)
    read = {"model": state, "optimizer": moments}
    checkpoint.load(read, checkpoint_id=folder)
    set_state_dict(other, again, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    restored = whole(other)
    return expected, restored, whole(steps(model, rows, 1, optimizer)), whole(steps(other, rows, 1, again))


def work(rank, folder, saved):
    mesh = init_device_mesh("cpu", (2,))
    rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    found = {}
    for per in ("head", "layer"):
        spread = DistributedDataParallel(learning(per))
        found[f"data {per}"] = whole(steps(spread, rows).module)
        found[f"parameters {per}"] = whole(steps(split(learning(per), mesh), rows))
        found[f"heads {per}"] = logits_and_gradients(by_heads(learning(per), mesh))
    fixed = learning()
    for module in fixed.modules():
        if hasattr(module, "anchor"):
            del module.anchor
    fixed = attach(fixed, anchor=torch.tensor([0.3, 0.5, 0.7, 0.9]), **OPTIONS)
    alone = copy.deepcopy(fixed)
    found["fixed"] = (whole(alone), logits_and_gradients(alone), logits_and_gradients(by_heads(fixed, mesh)))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    theirs = load(LlamaForCausalLM, saved, distributed_config=DistributedConfig(tp_size=2), **OPTIONS)
    found["heads by transformers"] = logits_and_gradients(theirs)
    found["resumed"] = resumed(rows, mesh, folder)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    saved = str(tmp_path_factory.mktemp("saved"))
    learning().save_pretrained(saved)
    return together(work, 2, str(tmp_path_factory.mktemp("checkpoint")), saved)


def assert_close(ours, theirs, bound=1e-6):
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert (ours[key] - expected).abs().max() <= bound * max(1, expected.abs().max()), key


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize("spread", ["data", "parameters"])
def test_three_steps_are_those_of_one_process_on_the_whole_batch(spread, per, found):
    first, second = (of_rank[f"{spread} {per}"] for of_rank in found)
    assert all(torch.equal(first[key], second[key]) for key in first)
    before, alone = whole(learning(per)), whole(steps(learning(per)))
    assert_close(first, alone)
    anchors = [key for key in first if key.endswith("anchor.logit")]
    assert len(anchors) == 2
    assert all((first[key] - before[key]).abs().min() > 1e-4 for key in anchors)


@pytest.mark.parametrize("kind", ["head", "layer", "by transformers"])
def test_a_process_with_some_heads_reads_their_anchors(kind, found):
    alone = logits_and_gradients(learning("layer" if kind == "layer" else "head"))
    for of_rank in found:
        assert_close(of_rank[f"heads {kind}"], alone)


def test_fixed_anchors_of_heads_are_cut_as_well(found):
    for of_rank in found:
        _, alone, spread = of_rank["fixed"]
        assert_close(spread, alone)


def test_a_sharded_checkpoint_restores_them_bit_for_bit(found):
    for of_rank in found:
        expected, restored, on, again = of_rank["resumed"]
        for ours, theirs in ((restored, expected), (again, on)):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
