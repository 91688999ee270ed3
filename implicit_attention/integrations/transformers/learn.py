"""`learn_anchors`: the anchors of a converted model as its parameters."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import _validate
from ...layers.projections import logit_of
from .anchors import Per, has_learned, put_anchors
from .attach import attention_of, check_model, is_ours
from .reach import reach
from .saved import configs_of, names
from .settings import LEARNED, SETTINGS


def learn_anchors(model: PreTrainedModel, initial: float | Tensor = 0.9, per: Per = "head") -> dict[str, nn.Parameter]:
    """Make the anchors of a model parameters, in place; return these by name.

    Every attention module that asks transformers' interface gets a part `anchor` with the parameter `logit`, as
    `ImplicitAttention` has: anchor = m + (1 - 2 m) sigmoid(logit), m = 1e-4, inside (0, 1). It takes the place of the
    anchors of `attach`, those of `layers` as well. A call's `anchor=` and `override` go before it. Optimisers, state
    dicts, averages and distributed training see a parameter like any other: make them afterwards.

    Args:
        model: a model of transformers, after `attach`, `convert` or `load`.
        initial: in (0, 1), where all anchors start, or a tensor with one number for each head.
        per: one anchor for each "head" of each layer, or one for each "layer".

    Returns:
        The parameters, (heads,) or (1,), by their names in the model, in the dtype of their layer.

    Raises:
        TypeError, ValueError: a model that is not attached, or has learned anchors; arguments that do not fit; for
            "head", a module that does not say how many heads it has.

    Gradients: of the first order and more, as of the other parameters; zeros with `max_steps=0`, where nothing is
    solved.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import attach, learn_anchors
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = attach(LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes)))
        >>> anchors = learn_anchors(model, initial=0.9)
        >>> list(anchors)
        ['model.layers.0.self_attn.anchor.logit', 'model.layers.1.self_attn.anchor.logit']
        >>> optimizer = torch.optim.AdamW([{"params": anchors.values(), "lr": 1e-2}], weight_decay=0)

    Not for anchors that stay where they are: give these to `attach`. Weight decay pulls anchors to 1/2.
    """
    check_model(model)
    initial = _validate.check_per_batch("initial", initial, low=0.0, high=1.0)
    shown = "initial" if isinstance(initial, Tensor) else f"{initial:g}"
    logit = logit_of("initial", initial, f"attach(model, anchor={shown}) fixes it there")
    _validate.check_choice("per", per, ("head", "layer"))
    remedy = "the parameters are in model.named_parameters(), and LearnedAnchor.set moves them"
    _validate.require(not has_learned(model), "model", "have fixed anchors", "learned ones", remedy)
    attached = [key for key in reach(model).asks if _is_attached(model.get_submodule(key))]
    required, received = "have equilibrium attention with options of its own", type(model).__name__
    _validate.require(bool(attached), "model", required, received, "call attach(model) or convert(model) first")
    parts = put_anchors(model, attached, per, logit)
    name = attention_of(model.get_submodule(attached[0]))
    for config in configs_of(model):
        if name in names(config):
            setattr(config, LEARNED, {**(getattr(config, LEARNED, None) or {}), name: per})
    return {f"{key}.anchor.logit".lstrip("."): part.logit for key, part in parts.items()}


def _is_attached(module: nn.Module) -> bool:
    name = attention_of(module)
    return is_ours(name) and name in (getattr(module, SETTINGS, None) or {})
