"""`restore_attention`: a model as it was before `attach`, `convert`, `learn_anchors` or `load` gave it equilibria."""

from __future__ import annotations

from typing import TypeVar

from transformers import PreTrainedModel

from ... import _validate
from .anchors import PART
from .attach import BEFORE, check_model, is_ours
from .attention import LAST, SITE
from .reach import reach
from .saved import NAME, configs_of
from .settings import ANCHORS, LAYERS, LEARNED, SAYS_CAUSAL, SETTINGS, SOLVERS

_Model = TypeVar("_Model", bound=PreTrainedModel)


def restore_attention(model: _Model) -> _Model:
    """Give a model the attention back that it had before `attach` or `convert`, in place; return the model.

    Its parameters stay as they are, with what was trained meanwhile; those of `learn_anchors` go. Keys of the state
    dict, the configuration and the bits of the answers are those of a model that never had equilibria. A model that
    came from a file by `load` gets the attention that transformers choose by themselves.

    Args:
        model: a model of transformers, after `attach`, `convert` or `load`.

    Raises:
        TypeError: a model that is not of transformers.
        ValueError: a model that none of these has changed.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import attach, restore_attention
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model, tokens = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes)).eval(), torch.randint(10, (1, 5))
        >>> before = model(tokens).logits
        >>> torch.equal(restore_attention(attach(model, anchor=0.5))(tokens).logits, before)
        True

    Not for a comparison of both attentions: `override(model, max_steps=0)` computes softmax attention for a while.
    """
    check_model(model)
    remedy = "there is nothing to restore; set_attn_implementation chooses the attention of a model by name"
    attached, received = any(getattr(m, SETTINGS, None) for m in model.modules()), f"{type(model).__name__} without"
    _validate.require(attached, "model", "have equilibria of attach, convert or load", received, remedy)
    own = {id(part.config): _attention_of(part) for part in model.modules() if isinstance(part, PreTrainedModel)}
    for config in configs_of(model):
        if is_ours(config._attn_implementation):
            config._attn_implementation_internal = own.get(id(config), _attention_of(model))
        for attribute in (ANCHORS, SOLVERS, LAYERS, LEARNED, SAYS_CAUSAL, NAME):
            vars(config).pop(attribute, None)
    for module in map(model.get_submodule, reach(model).asks):
        module._modules.pop(PART, None)
    for module in model.modules():
        for attribute in (SETTINGS, LAST, SITE, BEFORE):
            vars(module).pop(attribute, None)
    return model


def _attention_of(part: PreTrainedModel) -> str:
    """The attention that a model had, or that transformers would choose for it."""
    before: str | None = getattr(part, BEFORE, None)
    return before or ("sdpa" if part._supports_sdpa else "eager")
