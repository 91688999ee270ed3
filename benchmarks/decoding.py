"""Decoding with a causal block that settles: a token by e evaluations over e plain steps; bytes of its cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from implicit_attention import EquilibriumTransformer, Picard, Rotary
from implicit_attention.layers import BlockCache
from implicit_attention.studies.measure import one_thread

from . import guard
from .measure import interleaved_clocks
from .past_by_hand import PastByHand
from .targets import Row

TESTS = ("tests/layers/test_causal_block.py",)
RATIOS = {"solve / plain": ("solve", "plain"), "steps / plain": ("steps", "plain")}
#: The bytes of a cache after decoding by 16 evaluations a token, over those by one.
BYTES = "cache bytes"
#: Tokens that are decoded for that.
COUNT = 8


@dataclasses.dataclass(frozen=True)
class DecodingSetting:
    """Sizes of the block, of the batch and of the past that a token reads, and the evaluations that it gets."""

    batch: int = 1
    past: int = 128
    dim: int = 96
    heads: int = 4
    depth: int = 2
    evaluations: int = 16
    seed: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        sizes = f"width {self.dim}, {self.depth} layers, B {self.batch}, {self.past} tokens before"
        return f"decoding a token, {sizes}"


SETTINGS = (DecodingSetting(), DecodingSetting(dim=256, past=256), DecodingSetting(batch=8))


class Appended(PastByHand):
    """Keys and values of the past, to which every step of a plain loop appends those of its token."""

    def __init__(self, cache: BlockCache, length: int) -> None:
        super().__init__(length)
        self.held = [
            (k.narrow(-2, 0, length).contiguous(), v.narrow(-2, 0, length).contiguous()) for k, v in _of(cache)
        ]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        held = self.held[self.called % len(self.held)]
        self.called += 1
        return torch.cat([held[0], keys], -2), torch.cat([held[1], values], -2)


def _of(cache: BlockCache) -> list[tuple[Tensor, Tensor]]:
    return [(held.keys, held.values) for held in cache.memory.held]


def decoding_row(setting: DecodingSetting, *, repeats: int, max_seconds: float) -> Row:
    """Process time of decoding one token, in turns, and the bytes of caches."""
    if (reason := guard.red(TESTS)) is not None:
        return {"evidence": {"solve": {"error": reason}}, "seconds": {}, "ratios": dict.fromkeys((*RATIOS, BYTES))}
    with one_thread(), torch.no_grad():
        return _timed(setting, repeats, max_seconds)


def _timed(setting: DecodingSetting, repeats: int, max_seconds: float) -> Row:
    torch.manual_seed(setting.seed)
    # Without a tolerance a solve makes all its evaluations.
    solver = Picard(rtol=0, atol=0, max_steps=setting.evaluations - 1)
    options: dict[str, Any] = {"causal": True, "rotary": Rotary(), "solver": solver}
    model = EquilibriumTransformer(setting.dim, setting.heads, setting.depth, **options).eval().to(setting.device)
    x = torch.randn(setting.batch, setting.past + COUNT, setting.dim, device=setting.device)
    cache, token = model.new_cache(), x[:, setting.past : setting.past + 1]
    model(x[:, : setting.past], cache=cache)
    past = Appended(cache, setting.past)

    def plain() -> Tensor:
        # Every token has a position of its own.
        past.begin(setting.past)
        z = torch.zeros_like(token)
        for _ in range(setting.evaluations):
            z = model.block(z, token, past=past)
        return z

    def behind(**options: Any) -> Tensor:
        z: Tensor = model(token, cache=cache, **options)
        cache.rewind(setting.past)
        return z

    functions = {
        "plain": plain,
        "solve": behind,
        "steps": lambda: behind(steps=setting.evaluations),
    }
    # A solve returns the state that it has evaluated last, a loop the image of that state.
    expected = {"steps": plain(), "solve": model.block(functions["solve"](), token, past=past)}
    found: dict[str, Any] = {}
    for name, state in (("steps", functions["steps"]()), ("solve", expected.pop("solve"))):
        error = float((state - expected["steps"]).norm() / expected["steps"].norm())
        found[name] = {"evaluations": setting.evaluations, "error": error} if error > 1e-4 else {"off": error}
    if any("error" in evidence for evidence in found.values()):
        return {"evidence": found, "seconds": {}, "ratios": dict.fromkeys((*RATIOS, BYTES))}
    process, wall = interleaved_clocks(functions, rounds=8 * repeats, max_seconds=max_seconds)
    sizes = [_cache_bytes(model, x, steps) for steps in (1, setting.evaluations)]
    found["cache"] = {"bytes": sizes}
    ratios = {name: process[one].median / process[other].median for name, (one, other) in RATIOS.items()}
    return {
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in wall.items()},
        "process_seconds": {name: dataclasses.asdict(timing) for name, timing in process.items()},
        "ratios": ratios | {BYTES: sizes[1] / sizes[0]},
    }


def _cache_bytes(model: EquilibriumTransformer, x: Tensor, steps: int) -> int:
    """The bytes of keys and values after some tokens, each by so many steps."""
    cache = model.new_cache()
    for i in range(COUNT):
        model(x[:, i : i + 1], cache=cache, steps=steps)
    return cache.num_bytes
