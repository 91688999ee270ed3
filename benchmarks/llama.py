"""A converted Llama against the same model with torch's attention.

`python -m benchmarks.llama SETTING NAME` measures memory. Plain causal attention, to which transformers give no mask.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import guard
from .compare import CONVERGED
from .measure import interleaved, once
from .memory import begin, found_apart, peak
from .targets import Row

TESTS = ("tests/integrations/test_transformers_causal.py",)

#: The contenders: torch's attention, one explicit step of ours, and the equilibrium.
NAMES = ("sdpa", "explicit", "equilibrium")

#: The ratios of times in a table.
RATIOS = ("explicit / sdpa", "forward / sdpa", "training / sdpa", "watched / training")


@dataclasses.dataclass(frozen=True)
class LlamaSetting:
    """Sizes of the model and its input. `memory`: peaks of fresh processes, by numbers of tokens, instead of times."""

    tokens: int = 1024
    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    anchor: float = 0.9
    memory: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def name(self) -> str:
        sizes = f"width {self.hidden}, {self.layers} layers, {self.heads} heads, {self.kv_heads} of keys"
        return f"Llama, {sizes}, anchor {self.anchor:g}"


#: A small model, so that nearly all of its memory is that of attention, which is compared.
SMALL = {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1}


def model_of(setting: LlamaSetting, name: str) -> Any:
    """The model with the attention of that name; all have the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from implicit_attention.integrations.transformers import attach

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=setting.hidden,
        intermediate_size=11 * setting.hidden // 4,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        max_position_embeddings=max(setting.tokens, 2048),
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(setting.device)
    if name == "sdpa":
        model.set_attn_implementation("sdpa")
        return model
    return attach(model, anchor=setting.anchor, max_steps=0 if name == "explicit" else None)


def tokens_of(setting: LlamaSetting) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1000, (1, setting.tokens), generator=generator).to(setting.device)


def forward_of(model: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """The last hidden state of every token: logits would be more memory than all that is compared."""

    def run() -> Tensor:
        with torch.no_grad():
            found: Tensor = model.model(tokens).last_hidden_state
        return found

    return run


def step_of(model: Any, tokens: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model.model(tokens).last_hidden_state.square().mean().backward()

    return run


def llama_row(setting: LlamaSetting, *, repeats: int, max_seconds: float) -> Row:
    """Times of a forward pass and of a training step, or peaks of memory by tokens."""
    if (reason := guard.red(TESTS)) is not None:
        return {"evidence": {"equilibrium": {"error": reason}}, "seconds": {}, "ratios": {}}
    return _peaks(setting) if setting.memory else _times(setting, repeats, max_seconds)


def _times(setting: LlamaSetting, repeats: int, max_seconds: float) -> Row:
    from implicit_attention.integrations.transformers import last_solves

    models = {name: model_of(setting, name) for name in NAMES}
    tokens = tokens_of(setting)
    functions = {f"{name}, forward": forward_of(model, tokens) for name, model in models.items()}
    functions |= {f"{name}, training": step_of(model, tokens) for name, model in models.items()}
    states, first, evidence = {}, {}, {}
    for name, function in functions.items():
        states[name], first[name] = once(function, setting.device)
    off = (states["explicit, forward"] - states["sdpa, forward"]).norm() / states["sdpa, forward"].norm()
    evidence["explicit"] = {"relative_error": float(off)}
    solves = last_solves(models["equilibrium"]).values()
    evaluations = torch.cat([solve.num_evals.flatten() for solve in solves]).double()
    evidence["equilibrium"] = {
        "converged": min(float(solve.converged.double().mean()) for solve in solves),
        "adjoints_converged": all(not bool(solve.adjoint.failed.any()) for solve in solves),
        "evaluations_mean": float(evaluations.mean()),
        "evaluations_max": int(evaluations.max()),
    }
    found = evidence["equilibrium"]
    if found["converged"] < CONVERGED or not found["adjoints_converged"] or off > 1e-4:
        found["error"] = "not timed, an answer is wrong"
        return {"evidence": evidence, "seconds": {}, "ratios": dict.fromkeys(RATIOS)}
    watched = _watched(models["equilibrium"], functions["equilibrium, training"], 6 * repeats, setting.device)
    times = interleaved(functions, first, repeats=repeats, max_seconds=4 * max_seconds, device=setting.device)
    seconds = {name: timing.median for name, timing in times.items()}
    return {
        "evidence": evidence,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": {
            "explicit / sdpa": seconds["explicit, forward"] / seconds["sdpa, forward"],
            "forward / sdpa": seconds["equilibrium, forward"] / seconds["sdpa, forward"],
            "training / sdpa": seconds["equilibrium, training"] / seconds["sdpa, training"],
            "watched / training": watched,
        },
    }


def _watched(model: Any, step: Callable[[], None], pairs: int, device: str) -> float:
    """The median, over pairs in turn, of a training step that `training.watch` watches over one that it does not."""
    from implicit_attention.training import watch

    ratios = []
    for pair in range(pairs):
        seconds = {}
        for watching in (True, False) if pair % 2 else (False, True):
            seen = watch(model) if watching else None
            seconds[watching] = once(step, device)[1]
            if seen is not None:
                seen.close()
        ratios.append(seconds[True] / seconds[False])
    return statistics.median(ratios)


def _peaks(setting: LlamaSetting) -> Row:
    peaks: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        for tokens in setting.memory:
            one = dataclasses.replace(setting, tokens=tokens, memory=())
            peaks[f"{name}, {tokens} tokens"] = found_apart("benchmarks.llama", one, name, needed)
    few, many = setting.memory[0], setting.memory[-1]

    def growth(name: str) -> float | None:
        pair = [peaks[f"{name}, {tokens} tokens"].get("peak_bytes") for tokens in (few, many)]
        return None if None in pair else pair[1] / pair[0] / (many / few)

    return {
        "evidence": peaks,
        "seconds": {},
        "ratios": {"memory growth": growth("equilibrium"), "memory growth, sdpa": growth("sdpa")},
    }


def needed(setting: LlamaSetting, name: str) -> dict[str, Any]:
    """Run once with few tokens, then with all, and return what a training step and a forward pass needed."""
    model = model_of(setting, name)
    step_of(model, tokens_of(dataclasses.replace(setting, tokens=64)))()
    tokens = tokens_of(setting)
    before = begin(setting.device)
    forward_of(model, tokens)()
    forward = peak(setting.device) - before
    before = begin(setting.device)
    step_of(model, tokens)()
    return {"peak_bytes": peak(setting.device) - before, "forward_bytes": forward}


if __name__ == "__main__":
    setting = LlamaSetting(**{**json.loads(sys.argv[1]), "memory": ()})
    print(json.dumps(needed(setting, sys.argv[2])))
