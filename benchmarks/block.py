"""A small transformer block with equilibrium attention, against the same block with one explicit step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attention import ImplicitAttention

from . import guard
from .compare import CONVERGED
from .measure import interleaved, once
from .targets import Row

TESTS = ("tests/layers/test_attention.py",)


@dataclasses.dataclass(frozen=True)
class BlockSetting:
    """Sizes of the block and its input."""

    batch: int = 4
    length: int = 256
    dim: int = 256
    heads: int = 4
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"transformer block, B {self.batch}, N {self.length}, width {self.dim}, {self.heads} heads"


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = ImplicitAttention(dim, heads, causal=True, on_failure="ignore")
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, max_steps: int | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), max_steps=max_steps)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def block_row(setting: BlockSetting, *, repeats: int, max_seconds: float) -> Row:
    """Training steps of both, and how the equilibria of the first were found."""
    if (reason := guard.red(TESTS)) is not None:
        return {"evidence": {"equilibrium": {"error": reason}}, "seconds": {}, "ratios": {"block": None}}
    torch.manual_seed(setting.seed)
    block = Block(setting.dim, setting.heads).to(setting.device)
    x = torch.randn(setting.batch, setting.length, setting.dim).to(setting.device)

    def step(max_steps: int | None) -> Callable[[], Any]:
        def run() -> Any:
            block.zero_grad(set_to_none=True)
            block(x, max_steps).square().mean().backward()
            return block.attention.last_solve

        return run

    functions = {"equilibrium": step(None), "explicit": step(0)}
    first, found = {}, {}
    for name, function in functions.items():
        last, first[name] = once(function, setting.device)
        evaluations = last.num_evals.double()
        found[name] = {
            "converged": float(last.converged.double().mean()),
            "evaluations_mean": float(evaluations.mean()),
            "evaluations_max": int(evaluations.max()),
        }
    if found["equilibrium"]["converged"] < CONVERGED:
        found["equilibrium"]["error"] = "not timed, equilibria were not found"
        return {"evidence": found, "seconds": {}, "ratios": {"block": None}}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds, device=setting.device)
    return {
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": {"block": times["equilibrium"].median / times["explicit"].median},
    }
