"""The models that `usefulness` compares: one block around attention that is repeated, or that settles; their FLOPs.

Per sample of N tokens of width d, in multiplications and additions of matrix products alone:

    FLOPs = projections x 8 N d^2 + passes x 4 N^2 d + what is the same for all.

A projection set makes queries, keys, values and the output from the tokens. A pass scores every token against every
token and sums keys or values with the weights; masked pairs count. A stack of k steps has k of both. An equilibrium has
one projection set, a pass for every evaluation of its map (the last of which only measures the residual), and one to
read out the values. A layer of spins has two maps of width d and two of the width of a head, and half a pass for its
couplings and for every evaluation: what it couples is what comes out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from implicit_attention import Anderson, Implicit, ImplicitAttention, Picard, Unrolled
from implicit_attention.layers import SpinAttention
from implicit_attention.linear import CG
from implicit_attention.spins import AmosResponse, KineticPlefka

#: States within 1e-3 of their equilibria, and gradients that are no more exact than their states.
RTOL = 1e-3
#: Most evaluations of a query that is solved to tolerance.
CAP = 100

Kind = Literal["stack", "shared", "budget", "capped", "solved", "spins"]


@dataclasses.dataclass(frozen=True)
class Model:
    """One of the compared ways to attend.

    kind: "stack" and "shared" repeat explicit attention `count` times, with weights of its own for every step or always
        the same; "budget" makes `count` evaluations of one equilibrium, "capped" at most so many, "solved" as many as
        it needs. "spins" make `count` steps, 0 for as many as they need.
    group: the number of explicit steps it is held against, 1 for the floor, 0 for none.
    """

    kind: Kind
    count: int
    group: int

    @property
    def name(self) -> str:
        if self.kind in ("stack", "shared"):
            if self.count == 0:
                return "no attention"
            weights = {"stack": ", own weights", "shared": ", shared weights"}[self.kind] if self.count > 1 else ""
            return f"explicit, {self.count} step{'s' if self.count > 1 else ''}{weights}"
        return {
            "budget": f"equilibrium, {self.count} evaluations",
            "capped": f"equilibrium, at most {self.count} evaluations",
            "solved": "equilibrium, solved",
            "spins": f"spins, {'1 step' if self.count else 'solved'}",
        }[self.kind]

    @property
    def explicit(self) -> bool:
        return self.kind in ("stack", "shared")

    @property
    def stops(self) -> bool:
        """Return whether the solve ends at a tolerance."""
        return self.kind in ("capped", "solved") or (self.kind == "spins" and self.count == 0)

    def layer(self, shape: Shape) -> nn.Module:
        """One layer of it."""
        if self.kind != "spins":
            return ImplicitAttention(shape.dim, shape.heads, causal=shape.causal, **self.options())
        method = KineticPlefka(response=AmosResponse(), rtol=None if self.count else RTOL)
        options = {"method": method, "steps": self.count or None, "on_failure": "ignore"}
        return SpinAttention(shape.dim, shape.heads, causal=shape.causal, **options)

    def options(self) -> dict[str, Any]:
        """Return the options of `ImplicitAttention`; a solver makes one evaluation more than steps."""
        if self.explicit:
            # It has no use for an anchor, and shall not be counted one as a parameter.
            return {"max_steps": 0, "anchor": 0.5}
        if self.kind == "budget":
            return {"solver": Picard(rtol=0, atol=0, max_steps=self.count - 1), "adjoint": Unrolled()}
        steps = (self.count if self.kind == "capped" else CAP) - 1
        # Queries that run into their cap are counted, not warned about.
        adjoint = Implicit(CG(rtol=RTOL))
        return {"solver": Anderson(rtol=RTOL, max_steps=steps), "adjoint": adjoint, "on_failure": "ignore"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes that a task sets for its models: tokens in, classes out at every token or for all of them together."""

    length: int
    inputs: int
    classes: int
    discrete: bool
    causal: bool
    per_token: bool
    dim: int = 32
    heads: int = 2


def evaluations_for(steps: int, shape: Shape) -> int:
    """Evaluations with which an equilibrium costs the FLOPs of `steps` explicit steps, rounded down.

    steps (8 N d^2 + 4 N^2 d) = 8 N d^2 + (evaluations + 1) 4 N^2 d.
    """
    return (steps - 1) * (shape.length + 2 * shape.dim) // shape.length


def models(shape: Shape, groups: tuple[int, ...], *, spins: bool = False) -> tuple[Model, ...]:
    """The floor, for every k the stacks and equilibria that belong to it, and the equilibrium without a cap.

    With `spins` also these, and a model in which no token reads another.
    """
    made = [Model("stack", 1, 1)]
    for k in groups:
        equal = evaluations_for(k, shape)
        made += [Model("stack", k, k), Model("shared", k, k), Model("budget", k, k)]
        made += [Model("budget", equal, k)] if equal != k else []
        made += [Model("capped", equal, k)]
    beside = (Model("spins", 1, 0), Model("spins", 0, 0), Model("stack", 0, 0)) if spins else ()
    return (*made, Model("solved", 0, 0), *beside)


class Block(nn.Module):
    """Embedding, pre-norm attention once or repeatedly, one feed-forward part, and a linear head."""

    def __init__(self, model: Model, shape: Shape) -> None:
        super().__init__()
        self.model, self.shape = model, shape
        dim = shape.dim
        self.embed = nn.Embedding(shape.inputs, dim) if shape.discrete else nn.Linear(shape.inputs, dim)
        self.positions = nn.Parameter(torch.randn(shape.length, dim) / 10)
        self.repeats = model.count if model.explicit else 1
        layers = self.repeats if model.kind == "stack" else 1
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, shape.classes)
        self.mlp_norm, self.head_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # Made last: with the same seed everything else, and the first layer, begins with the same weights.
        self.norms, self.attention = nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            self.norms.append(nn.LayerNorm(dim))
            self.attention.append(model.layer(shape))

    def forward(self, inputs: Tensor, **options: Any) -> Tensor:
        """Scores of the classes, (batch, N, classes), or (batch, classes) for all tokens together.

        `options` override those of the attention layers.
        """
        x = self.embed(inputs) + self.positions
        for index in range(self.repeats):
            layer = index % len(self.attention)
            x = x + self.attention[layer](self.norms[layer](x), **options)
        x = x + self.mlp(self.mlp_norm(x))
        x = self.head_norm(x)
        return self.head(x if self.shape.per_token else x.mean(-2))


def flops(shape: Shape, *, projections: float, passes: float) -> float:
    """FLOPs of one forward of one sample by the formula above."""
    n, d = shape.length, shape.dim
    embedding = 0 if shape.discrete else 2 * n * shape.inputs * d
    same = embedding + 8 * n * d * d + 2 * d * shape.classes * (n if shape.per_token else 1)
    return projections * 8 * n * d * d + passes * 4 * n * n * d + same


def forward_flops(model: Model, shape: Shape, evaluations: float) -> float:
    """FLOPs of one forward of one sample, given the mean evaluations of a query."""
    if model.explicit:
        return flops(shape, projections=model.count, passes=model.count)
    if model.kind == "spins":
        return flops(shape, projections=(1 + 1 / shape.heads) / 2, passes=(evaluations + 1) / 2)
    return flops(shape, projections=1, passes=evaluations + 1)


@torch.no_grad()
def counted_flops(block: Block, inputs: Tensor) -> float:
    """FLOPs of one forward per sample as torch's counter sees the products, in the written-out implementation.

    Torch's counter does not know the fused attention of CPUs. What the solver multiplies itself is counted as well, and
    queries that wait for others of their block.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        block(inputs, **({} if block.model.kind == "spins" else {"impl": "reference"}))
    return counter.get_total_flops() / len(inputs)
