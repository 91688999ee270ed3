"""Tiny models of seven architectures, and equilibrium attention written independently into their eager attention."""

import contextlib
import sys
from unittest import mock

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from implicit_attention import Anderson, Implicit
from implicit_attention.integrations.transformers import last_solves, register
from implicit_attention.linear import CG

TIGHT = {"solver": Anderson(rtol=1e-12, atol=1e-13), "adjoint": Implicit(CG(rtol=1e-12))}
VOCAB, WINDOW = 50, 4
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "sliding_window": WINDOW}
_OSS = {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2}

MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**_SIZES, max_position_embeddings=64)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2, bos_token_id=1, eos_token_id=1, pad_token_id=0)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=WINDOW)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**_T5, decoder_start_token_id=0)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_GROUPED, **_GEMMA)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**_GROUPED, **_OSS)),
}
DECODERS = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss")
CACHED = (*DECODERS, "t5")


def make(name, dtype=torch.float64, **config):
    """A model in evaluation mode whose attention is far from uniform."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for option, value in config.items():
        setattr(model.config, option, value)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
            elif "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_(0.0, 0.5)
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the others have no float64
    return model.to(dtype).eval()


def batch(name, rows=2, length=9, padding=0, seed=1):
    """Arguments of a forward; the first row begins with padding (ends with it for encoders)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.long)
    if padding and name in ("bert", "t5"):
        mask[0, -padding:] = 0
    elif padding:
        mask[0, :padding] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        given["decoder_input_ids"] = torch.randint(2, VOCAB, (rows, 5), generator=generator)
    elif name != "bert":
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return given


def real(name, given):
    """Which logits belong to tokens that exist."""
    return ... if name == "t5" else given["attention_mask"].bool()


def model_and_inputs(name="llama", dtype=torch.float64, **given):
    model = make(name, dtype)
    model.set_attn_implementation("equilibrium")
    return model, batch(name, **given)


def logits(model, given, **call):
    with torch.no_grad():
        return model(**given, **call).logits


def evaluations(model):
    """The most of a query, of every layer."""
    return [int(solve.num_evals.max()) for solve in last_solves(model).values()]


@contextlib.contextmanager
def watched_calls():
    """Queries, keys and masks of all calls of equilibrium attention by models: a wrapper, as engines put one there."""
    register()
    own, calls = ALL_ATTENTION_FUNCTIONS["equilibrium"], []

    def seen(module, query, key, value, attention_mask, **others):
        calls.append((query.detach(), key.detach(), attention_mask))
        return own(module, query, key, value, attention_mask, **others)

    AttentionInterface.register("equilibrium", seen)
    yield calls
    AttentionInterface.register("equilibrium", own)


# What no entry of a state may still move by.
STILL = 1e-12


def with_equilibria(anchor):
    """The model's own eager attention, its queries replaced by equilibria: plain steps of a gradient by autograd.

    Everything is differentiated through all steps, in the model's precision. The anchor may be a function of the
    attention module.
    """

    def forward(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **given):
        own_anchor = anchor(module) if callable(anchor) else anchor
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        beta = query.shape[-1] ** -0.5 if scaling is None else scaling

        def potential(z):
            scores = torch.einsum("bhnd,bhmd->bhnm", z, keys) * beta
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            for bias in (given.get("position_bias"), attention_mask):
                scores = scores if bias is None else scores + bias
            if s_aux is not None:
                scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
            return scores.logsumexp(-1) / beta

        differentiated = torch.is_grad_enabled()
        # Capped scores have no convex potential, so that full steps may climb.
        step = 1.0 if softcap is None else 0.5
        z, moved = query, 1.0
        with torch.enable_grad():
            while moved > STILL:
                z = z if z.requires_grad else z.detach().requires_grad_()
                (mean,) = torch.autograd.grad(potential(z).sum(), z, create_graph=differentiated)
                after = z + step * (own_anchor * query + (1 - own_anchor) * mean - z)
                moved = float((after - z).detach().abs().max())
                z = after if differentiated else after.detach()
        own = sys.modules[type(module).__module__].eager_attention_forward
        extra = {} if softcap is None else {"softcap": softcap}
        with mock.patch("torch.nn.functional.softmax", _softmax):
            return own(module, z, key, value, attention_mask, scaling=scaling, **extra, **given)

    name = f"reference_{anchor.__name__ if callable(anchor) else anchor}"
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, eager_mask)
    return name


def _softmax(scores, dim, dtype=None):
    """Some models round their weights to float32, whatever their own precision."""
    return scores.softmax(dim)
