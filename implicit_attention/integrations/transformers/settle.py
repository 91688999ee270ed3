"""`settle`: models of transformers that repeat their layers, with what they repeat as one fixed point."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

from transformers import PreTrainedModel

from ... import _validate
from ...adjoints import Adjoint
from ...failure import OnFailure
from ...layers.tied_call import TokenEquilibrium
from ...solvers import Solver
from .attach import check_model

_Model = TypeVar("_Model", bound=PreTrainedModel)
SettleSteps: TypeAlias = Literal["solve"] | int | range | None

#: The classes that `settle` knows.
KNOWN = ("HrmTextForCausalLM", "HrmTextModel")


def settle(
    model: _Model,
    *,
    steps: SettleSteps = "solve",
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    on_failure: OnFailure = "warn",
    causal: bool | None = None,
) -> _Model:
    """Replace the recursion of an HRM-Text by a fixed point of its two streams, in place; return the model.

    The state is (z_H, z_L), (B, N, D) each, and starts where the published recursion starts: z_H at the scaled
    embeddings x, z_L at `z_L_init`. One step is one of its high cycles,

        z_L <- L(z_L + z_H + W x), L_cycles times;   z_H <- H(z_H + z_L),

    with a learned W that is 0 at first. With `steps=config.H_cycles` the answer is the published one; its gradient
    flows through all cycles, not through the last ones alone.

    The published recursion reads its input at the start only (W = 0). Its fixed points do not depend on the input then,
    except by which of them a start leads to: where there is one, the answer forgets the input; where there are many,
    the answer depends on the start. Tiny random models did both or neither: at `initializer_range` 0.02 the state still
    drifted after 300 steps, at 0.1 tokens grew alike, at 0.3 it never came to rest. A published model is no model that
    settles; train from it, with W as another parameter for the optimizer, before its fixed points are used. An
    accelerated solver (`Anderson`) may end at a fixed point that the recursion does not reach.

    Args:
        model: an `HrmTextForCausalLM` or an `HrmTextModel`; settled before, it gets the new options, and W stays.
        steps: "solve"; a number of high cycles >= 1, or a range of such numbers, from which each call in training mode
            draws, while evaluation solves; None is the model as it was, bit for bit: it undoes `settle`, and W goes.
        solver: default `Picard(rtol=1e-3, max_steps=200)`, the recursion run to its end.
        adjoint: default `Implicit()`, the exact gradient.
        on_failure: as of `Equilibrium`.
        causal: whether no token reads later ones. None is `not config.prefix_lm`: tokens of a prefix
            (`token_type_ids`) read later ones. With True a call with a prefix is refused.

    Caches: those of transformers hold the keys of the settled states, one slot for each layer of both stacks instead of
    H_cycles (L_cycles + 1) slots for each layer of one. `generate` gives the tokens of `use_cache=False` as far as the
    tolerance of the solve decides them, if the low cycles stand still at the fixed point, as they do where L contracts.
    With a number of steps it needs `use_cache=False`, and cannot take `inputs_embeds`, beside which transformers sets
    `use_cache=True`. A call that raises leaves the cache as it was.

    Saving: `torch.save(model.state_dict())` and `load_state_dict` into a model that was settled keep everything; the
    names are the published ones, and one more for W. `save_pretrained` writes all of them, and `from_pretrained` reads
    the published recursion from there, without W.

    Evidence: `report(model)` and `last_solves(model)` have a row "model.equilibrium"; `training.watch` counts it.

    Gradients: to all parameters, by the adjoint or through the steps. The backward pass of a call beside tokens of a
    cache raises.

    Raises:
        TypeError: a model of another class; it names those that are known. ValueError: options that do not fit.

    Examples:
        >>> import torch
        >>> from transformers import HrmTextConfig, HrmTextForCausalLM
        >>> from implicit_attention.integrations.transformers import last_solves, settle
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = HrmTextForCausalLM(HrmTextConfig(vocab_size=10, head_dim=4, **sizes)).eval()
        >>> ids = torch.randint(10, (1, 5))
        >>> before = model(ids).logits
        >>> torch.allclose(settle(model, steps=model.config.H_cycles)(ids).logits, before, atol=1e-5)
        True
        >>> list(last_solves(model)), torch.equal(settle(model, steps=None)(ids).logits, before)
        (['model.equilibrium'], True)

    Not for making a pretrained model better without training. Not for layers that a model applies once: see `tie`.
    """
    check_model(model)
    inner: Any = _known(model)
    # The classes are loaded where one of their models is at hand.
    from .hrm_text import HighCycle, SettledHrmText

    settled = isinstance(inner, SettledHrmText)
    if steps is None:
        if settled:
            del inner.equilibrium
            inner.__class__ = SettledHrmText.__mro__[1]
        return model
    if isinstance(steps, str):
        _validate.check_choice("steps", steps, ("solve",))
    elif not isinstance(steps, range):
        _validate.check_integer("steps", steps, low=1, remedy="'solve' solves, None is the model as it was")
    causal = not inner.config.prefix_lm if causal is None else causal
    _validate.check_instance("causal", causal, bool, "be True, False or None")
    block = inner.equilibrium.block if settled else HighCycle(inner)
    number: Any = None if isinstance(steps, str) else steps
    options: dict[str, Any] = {"steps": number, "solver": solver, "adjoint": adjoint, "on_failure": on_failure}
    equilibrium = TokenEquilibrium(block, causal=causal, **options)
    inner.equilibrium = equilibrium.train(inner.training)
    inner.__class__ = SettledHrmText
    return model


def _known(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that is settled, or an error that names the class of the model."""
    kinds = {
        kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.hrm_text")
    }
    if "HrmTextModel" in kinds:
        return model
    if "HrmTextForCausalLM" not in kinds:
        required, remedy = f"be one of {', '.join(KNOWN)}", "for consecutive layers of another model see `tie`"
        raise TypeError(_validate.message("model", required, type(model).__name__, remedy))
    inner: PreTrainedModel = model.model
    return inner
