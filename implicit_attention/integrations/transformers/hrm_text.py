"""HRM-Text of transformers with its two streams as one state, which is solved for a fixed point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.hrm_text.modeling_hrm_text import HrmTextModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from ... import _validate
from ...layers.slots import slots_of
from ...layers.tied_call import EVERY, StepTokens, TiedCall, TokenEquilibrium, absent_tokens, injection


class HighCycle(nn.Module):
    """One high cycle of the recursion: z_L <- L(z_L + z_H + W x), as often as the model does, z_H <- H(z_H + z_L).

    Args:
        model: whose stacks L and H it shares.

    Attributes:
        inject: W, 0 at first.
        slots: of a cache: those of stack L, then those of stack H.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.L_module, self.H_module = model.L_module, model.H_module
        self.low_cycles: int = model.config.L_cycles
        self.layers_per_stack: int = model.config.num_layers_per_stack
        self.inject = injection(model.config.hidden_size, model.embed_tokens.weight)
        self.slots = frozenset(range(2 * self.layers_per_stack))
        self._register_load_state_dict_pre_hook(self._keep_stacks)  # type: ignore[no-untyped-call]

    def forward(
        self,
        state: tuple[Tensor, Tensor],
        x: tuple[Tensor, Tensor],
        options: dict[str, Any],
        tokens: StepTokens = EVERY,
    ) -> tuple[Tensor, Tensor]:
        tokens.enter(state)
        (high, low), injected = state, self.inject(x[0])
        for _ in range(self.low_cycles):
            low = self.L_module(low + high + injected, cycle_offset=0, **options)
        high = self.H_module(high + low, cycle_offset=self.layers_per_stack, **options)
        left: tuple[Tensor, Tensor] = tokens.leave((high, low))
        return left

    # The stacks are the model's, and stay at their names in its files.

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The state dict with W alone."""
        found = super().state_dict(*args, **options)
        prefix = options.get("prefix", args[1] if len(args) > 1 else "")
        for name in [name for name in found if name.startswith((f"{prefix}L_module.", f"{prefix}H_module."))]:
            del found[name]
        return found

    def _keep_stacks(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        stacks = {"L_module": self.L_module, "H_module": self.H_module}
        for name, stack in stacks.items():
            own = stack.state_dict(prefix=f"{prefix}{name}.")
            state_dict.update({key: value for key, value in own.items() if key not in state_dict})


class SettledHrmText(HrmTextModel):  # type: ignore[no-untyped-call]
    """An `HrmTextModel` that `settle` gave an equilibrium."""

    equilibrium: TokenEquilibrium

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The forward of `HrmTextModel`, whose streams settle."""
        if (input_ids is None) == (inputs_embeds is None):
            required, remedy = "be given, or inputs_embeds, and not both", "pass one of them"
            raise ValueError(_validate.message("input_ids", required, "none or both of them", remedy))
        for name in ("output_attentions", "output_hidden_states"):
            asked = kwargs.pop(name, None) or getattr(self.config, name, False)
            remedy = "settle(model, steps=None) is the model that has them"
            _validate.require(not asked, name, "be False in a model that is settled", True, remedy)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        scale: Any = self.embedding_scale
        x = x * scale
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = (torch.arange(x.shape[1], device=x.device) + held).unsqueeze(0)
        mask = self._mask(x, attention_mask, past_key_values, position_ids, token_type_ids)
        options = {"attention_mask": mask, "position_embeddings": self.rotary_emb(x, position_ids), **kwargs}
        options["position_ids"] = position_ids

        def with_slots(slots: Any) -> tuple[Any, ...]:
            return ({**options, "past_key_values": slots},)

        block: Any = self.equilibrium.block
        absent = absent_tokens(mask, x, past_key_values, block)
        start = (x, self.z_L_init.to(dtype=x.dtype, device=x.device).expand_as(x).contiguous())
        call = TiedCall(past_key_values, absent, passes=block.low_cycles)
        state = self.equilibrium.settled(start, call, with_slots)
        if past_key_values is not None:
            _leave_out_unused(past_key_values, max(slots_of(block)) + 1)
        return BaseModelOutputWithPast(last_hidden_state=state[0], past_key_values=past_key_values)

    def _mask(self, x: Tensor, exist: Tensor | None, cache: Cache | None, places: Tensor, kinds: Tensor | None) -> Any:
        given: dict[str, Any] = {"config": self.config, "inputs_embeds": x, "attention_mask": exist}
        given |= {"past_key_values": cache, "position_ids": places}
        if kinds is not None and self.config.prefix_lm and (cache is None or not int(cache.get_seq_length())):
            required = "be None where tokens are solved in their order: those of a prefix read later ones"
            remedy = "use settle(model, causal=False)"
            _validate.require(not self.equilibrium.causal, "token_type_ids", required, "a tensor", remedy)
            given["block_sequence_ids"] = torch.where(kinds == 1, 0, -1)
        return create_causal_mask(**given)


# Its name is written into files, which the class of transformers is to load.
SettledHrmText.__name__ = "HrmTextModel"


def _leave_out_unused(cache: Any, used: int) -> None:
    """Take the slots from a cache that only the published recursion writes to, while they are empty."""
    if not any(layer.is_initialized for layer in cache.layers[used:]):
        del cache.layers[used:]
