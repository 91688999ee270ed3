"""A block as a fixed point in compiled graphs, against the same layer without them: forward pass and training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from implicit_attention import Equilibrium, Picard

from . import guard
from .measure import interleaved, once
from .targets import Row

TESTS = ("tests/layers/test_compiled_equilibrium.py",)
#: The compiler of the block that is compiled alone.
BACKEND = "inductor"
RATIOS = {
    "compiled step / eager": ("compiled step", "eager step"),
    "compiled forward / eager": ("compiled forward", "eager forward"),
    "compiled block step / eager": ("compiled block step", "eager step"),
    "compiled block forward / eager": ("compiled block forward", "eager forward"),
}
#: Calls before any is timed, in which graphs of the lengths that are needed are made.
WARM = 3


@dataclasses.dataclass(frozen=True)
class CompiledSetting:
    """Sizes of the block and its input, and the relative tolerance of the state."""

    batch: int = 8
    length: int = 32
    dim: int = 64
    heads: int = 4
    rtol: float = 1e-3
    seed: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        sizes = f"B {self.batch}, N {self.length}, D {self.dim}, {self.heads} heads"
        return f"compiled block as a fixed point, {sizes}, to {self.rtol:g}"


class Block(nn.Module):
    """A pre-norm transformer block of small weights, which the input joins: it contracts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        with torch.no_grad():
            self.out.weight.mul_(0.3)
            self.down.weight.mul_(0.3)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        parts = self.project(self.attention_norm(z)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        read = F.scaled_dot_product_attention(*(part.transpose(-2, -3) for part in parts))
        y = 0.3 * z + x + self.out(read.transpose(-2, -3).flatten(-2))
        out: Tensor = y + 0.5 * self.down(F.gelu(self.up(self.mlp_norm(y))))
        return out


def compiled_row(setting: CompiledSetting, *, repeats: int, max_seconds: float) -> Row:
    """Forward passes and training steps of all contenders in turns, at equal measured residuals."""
    nothing = dict.fromkeys(("compiled step / eager", "compiled forward / eager"))
    if (reason := guard.red(TESTS)) is not None:
        return {"evidence": {"compiled": {"error": reason}}, "seconds": {}, "ratios": nothing}
    torch.manual_seed(setting.seed)
    block = Block(setting.dim, setting.heads).to(setting.device)
    x = torch.randn(setting.batch, setting.length, setting.dim, device=setting.device)
    solver = Picard(rtol=setting.rtol)
    layers = {
        "eager": Equilibrium(block, solver=solver),
        "compiled": Equilibrium(block, solver=solver, compiled=True),
        "compiled block": Equilibrium(torch.compile(block, backend=BACKEND), solver=solver),  # type: ignore[arg-type]
    }
    found: dict[str, dict[str, Any]] = {}
    functions, first = {}, {}
    for name, layer in layers.items():
        for way, function in (("forward", forward(layer, x)), ("step", training(layer, x))):
            functions[f"{name} {way}"] = function
            for _ in range(WARM):
                _, first[f"{name} {way}"] = once(function, setting.device)
        found[name] = measured(block, layer, x)
    gradients = {name: evidence.pop("gradient") for name, evidence in found.items()}
    for name, gradient in gradients.items():
        found[name]["gradient_difference"] = float((gradient - gradients["eager"]).norm() / gradients["eager"].norm())
        if found[name]["residual"] > setting.rtol:
            found[name]["error"] = "not timed, the measured residual is above the tolerance"
    if any("error" in evidence for evidence in found.values()):
        return {"evidence": found, "seconds": {}, "ratios": nothing}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds, device=setting.device)
    return {
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": {label: times[one].median / times[other].median for label, (one, other) in RATIOS.items()},
    }


def forward(layer: Equilibrium, x: Tensor) -> Callable[[], Tensor]:
    """A call without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            state: Tensor = layer(x)
        return state

    return run


def training(layer: Equilibrium, x: Tensor) -> Callable[[], Tensor]:
    """A call, and the gradients of all weights."""

    def run() -> Tensor:
        layer.zero_grad(set_to_none=True)
        state: Tensor = layer(x)
        state.square().mean().backward()
        return state.detach()

    return run


def measured(block: Block, layer: Equilibrium, x: Tensor) -> dict[str, Any]:
    """Measure the evaluations of a step, the largest relative residual of its state, and its gradient."""
    state = training(layer, x)()
    with torch.no_grad():
        mapped = block(state, x).double().flatten(1)
        residual = (mapped - state.double().flatten(1)).norm(dim=1) / mapped.norm(dim=1)
    report = layer.last_solve
    assert report is not None
    return {
        "evaluations": int(report.num_evals.max()),
        "converged": float(report.converged.double().mean()),
        "residual": float(residual.max()),
        "gradient": torch.cat([p.grad.flatten().double() for p in block.parameters() if p.grad is not None]),
    }
