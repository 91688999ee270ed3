"""Tiny models of transformers with tied layers, or settled streams, that contract and read their input."""

from functools import partial

import torch
import transformers as hf
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache

import implicit_attention as ia
from implicit_attention.integrations.transformers import settle

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.1}
GROUPED = {**SIZES, "num_key_value_heads": 2}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=1, pad_token_id=0)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, use_sliding_window=False)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)),
}
PATHS = {"gpt2": "transformer.h"}
TIGHT = ia.Picard(rtol=1e-6, max_steps=300)
IDS = torch.arange(21).reshape(3, 7) % 57 + 2
#: Sequences of different lengths, padded on the left.
EXIST = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]])
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


def plain(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def shrunk(module, arguments, output):
    """A part of the answer of a layer: layers that only add to their input do not contract."""
    return 0.2 * output


def tied(name, keep=1, contracts=True, **options):
    """The model and its equilibrium, whose states depend on the input."""
    model = plain(name)
    given = {"solver": TIGHT, "on_failure": "raise", **options}
    equilibrium = ia.tie(model, PATHS.get(name, "model.layers"), keep=keep, **given)
    if contracts:
        equilibrium.block.layers[-1].register_forward_hook(shrunk)
        nn.init.eye_(equilibrium.block.inject.weight)
    return model, equilibrium


def hrm(**changes):
    """A small HRM-Text with two layers per stack."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 64, "prefix_lm": False}
    sizes["initializer_range"] = 0.03
    model = hf.HrmTextForCausalLM(hf.HrmTextConfig(**sizes | changes)).eval()
    with torch.no_grad():
        # The embedding of the padding token is 0 at first: finished sequences go on with it, and settle nowhere.
        model.model.embed_tokens.weight[0] = model.model.embed_tokens.weight[2:].mean(0) * 4
    return model


def settled(reads=4.0, **options):
    """An HRM-Text whose streams contract, as they read their input at every step."""
    changes = {key: options.pop(key) for key in ("L_cycles", "H_cycles", "prefix_lm") if key in options}
    model = settle(hrm(**changes), **{"solver": TIGHT, "on_failure": "raise", **options})
    with torch.no_grad():
        model.model.equilibrium.block.inject.weight.copy_(reads * torch.eye(32))
    return model, model.model.equilibrium


#: Models and their equilibria: tied layers, alone and between others, and settled streams.
MADE = {name: partial(tied, name, keep=0) for name in MODELS}
MADE |= {f"{name}, kept": partial(tied, name) for name in MODELS}
MADE |= {"HRM-Text": settled, "HRM-Text, 1 low cycle": partial(settled, L_cycles=1)}
BOTH = ("llama, kept", "HRM-Text")


def generated(model, mode, cached, ids=IDS, exist=EXIST, count=8):
    """The tokens that a model generates with or without a cache."""
    options = {**MODES[mode], "max_new_tokens": count, "pad_token_id": 0, "eos_token_id": 1}
    if not cached:
        options.pop("cache_implementation", None)
    if mode == "lookup":
        # Transformers look up in one sequence at a time.
        ids, exist = ids[1:2].repeat(1, 2), None
        if not cached:
            options.pop("prompt_lookup_num_tokens")
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=exist, use_cache=cached, **options).tolist()


def stored(cache):
    """The bytes of a cache."""
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values) if t is not None)


def cache_of(model, kind, length=12):
    """An empty cache of this kind, with room for `length` tokens where that is fixed."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config) if kind == "by config" else DynamicCache()
