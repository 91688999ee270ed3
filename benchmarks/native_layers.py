"""LAYER of the suite `native`: what `ImplicitAttention` costs beside the same layer of explicit attention."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from implicit_attention import ImplicitAttention
from implicit_attention._solve import is_finite
from implicit_attention.potentials._attention import loses_nan

from .compare import GRADIENT_ERROR
from .measure import interleaved_clocks
from .problems import Setting
from .targets import Row

#: Tokens of a decode loop.
DECODED = 16
#: Which call is over which.
PAIRS = {
    "explicit": ("explicit", "plain"),
    "explicit by hand": ("by hand", "plain"),
    "solve": ("solve", "plain"),
    "training": ("training", "plain training"),
    "explicit, packed": ("explicit", "packed"),
    "solve, packed": ("solve", "packed"),
    "training, packed": ("training", "packed training"),
    "decode": ("decode", "plain decode"),
    "decode, explicit": ("explicit decode", "plain decode"),
}
FRAMES = "frames of a call"
NAMES = (*PAIRS, FRAMES)


class Plain(nn.Module):
    """Softmax attention of one step with four projections, or with one packed projection of queries, keys, values."""

    def __init__(self, dim: int, heads: int, *, packed: bool) -> None:
        super().__init__()
        self.heads, self.packed = heads, packed
        if packed:
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.packed:
            query, keys, values = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            return query, keys, values
        shape = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        query, keys, values = (part(x).view(shape).transpose(-3, -2) for part in (self.q, self.k, self.v))
        return query, keys, values

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        query, keys, values = self.heads_of(x)
        if cache is not None:
            if cache:
                keys, values = (torch.cat(pair, dim=-2) for pair in zip(cache, (keys, values), strict=True))
            cache[:] = keys, values
        read = F.scaled_dot_product_attention(query, keys, values)
        out: Tensor = self.out(read.transpose(-3, -2).flatten(-2))
        return out


class ByHand(nn.Module):
    """The least that an explicit step with the evidence of `ImplicitAttention` costs, by the parameters of one.

    The same projections, read where they lie, a temperature per head, and an answer only where queries and keys are
    known to be finite, as the kernel does not tell; without arguments, options and a report, and for parameters that
    stay.
    """

    def __init__(self, layer: ImplicitAttention) -> None:
        super().__init__()
        self.heads, self.beta = layer.heads, layer.beta().detach().view(-1, 1, 1)
        self.weights = [part.weight for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out = self.weights
        shape = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        query = F.linear(x, q).view(shape).transpose(-3, -2)
        keys = F.linear(x, k).view(shape).transpose(-3, -2)
        values = F.linear(x, v).view(shape).transpose(-3, -2)
        if not is_finite(query) or (loses_nan(keys) and not is_finite(keys)):
            raise ValueError("queries and keys must be finite")
        read = F.scaled_dot_product_attention(self.beta * query, keys, values, scale=1.0)
        return F.linear(read.transpose(-3, -2).flatten(-2), out)


def layer_row(problem: Setting, *, rounds: int, max_seconds: float) -> Row:
    """Calls of the layers by one thread, by process time, and what the equilibria answer."""
    torch.set_num_threads(1)
    torch.manual_seed(problem.seed)
    shape = problem.shape
    dim = shape.heads * shape.dim
    x, cotangent = torch.randn(shape.batch, shape.length, dim), torch.randn(shape.batch, shape.length, dim)
    plain, packed = (Plain(dim, shape.heads, packed=packed) for packed in (False, True))
    ours = ImplicitAttention(dim, shape.heads)
    with torch.no_grad():
        for mine, theirs in ((ours.q_proj, plain.q), (ours.k_proj, plain.k), (ours.v_proj, plain.v)):
            theirs.weight.copy_(mine.weight)  # type: ignore[union-attr]
        plain.out.weight.copy_(ours.out_proj.weight)  # type: ignore[union-attr]
    found = {"ours": evidence(ours, plain, x, cotangent)}
    if "error" in found["ours"]:
        return {"evidence": found, "seconds": {}, "ratios": dict.fromkeys(NAMES)}
    functions: dict[str, Callable[[], Any]] = {
        "plain": partial(without_graph, plain, x),
        "packed": partial(without_graph, packed, x),
        "explicit": partial(without_graph, ours, x, max_steps=0),
        "by hand": partial(without_graph, ByHand(ours), x),
        "solve": partial(without_graph, ours, x),
        "plain training": training(plain, x, cotangent),
        "packed training": training(packed, x, cotangent),
        "training": training(ours, x, cotangent),
        "plain decode": partial(decode, plain, list, x),
        "decode": partial(decode, ours, ours.new_cache, x),
        "explicit decode": partial(decode, partial(ours, max_steps=0), ours.new_cache, x),
    }
    process, wall = interleaved_clocks(functions, rounds=rounds, max_seconds=max_seconds)
    ratios = {name: process[a].median / process[b].median for name, (a, b) in PAIRS.items()}
    with torch.no_grad():
        count = frames(partial(ours, x))
    return {
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in wall.items()},
        "process_seconds": {name: dataclasses.asdict(timing) for name, timing in process.items()},
        "ratios": {**ratios, FRAMES: float(count)},
    }


def evidence(ours: ImplicitAttention, plain: Plain, x: Tensor, cotangent: Tensor) -> dict[str, Any]:
    """Statuses, the largest error of the explicit layers, and that of gradients against float64."""
    wanted = plain(x)
    explicit = max(float((found - wanted).detach().abs().max()) for found in (ours(x, max_steps=0), ByHand(ours)(x)))
    _, gradient = training(ours, x, cotangent)()
    status = ours.last_solve
    assert status is not None
    solved = {"converged": float(status.converged.double().mean()), "explicit_error": explicit}
    double = ImplicitAttention(ours.dim, ours.heads, dtype=torch.float64)
    double.load_state_dict(ours.state_dict())
    _, exact = training(double, x.double(), cotangent.double())()
    error = float((gradient.double() - exact).norm() / exact.norm())
    solved |= {"gradient_error": error, "evaluations_mean": float(status.num_evals.double().mean())}
    if solved["converged"] < 1 or explicit > 1e-5 or error > GRADIENT_ERROR["float32"]:
        solved["error"] = "not timed, the answer is wrong: see the share that converged and the errors"
    return solved


def without_graph(layer: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return layer(x, **options)


def training(layer: nn.Module, x: Tensor, cotangent: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward, a fixed loss, and its gradients for all parameters, of which that of the first is returned."""
    parameters = list(layer.parameters())
    first = next(p for p in parameters if p.ndim == 2)

    def run() -> tuple[Tensor, Tensor]:
        for parameter in parameters:
            parameter.grad = None
        output = layer(x)
        (output * cotangent).sum().backward()
        assert first.grad is not None
        return output.detach(), first.grad

    return run


def decode(layer: Callable[..., Tensor], new_cache: Callable[[], Any], x: Tensor) -> Tensor:
    """The output of the last of so many tokens, one after the other."""
    cache = new_cache()
    with torch.no_grad():
        for i in range(DECODED):
            at = i % x.shape[-2]
            output = layer(x[:, at : at + 1], cache=cache)
    return output


def frames(call: Callable[[], Any]) -> int:
    """How many frames of Python a call makes."""
    made = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event == "call"

    call()
    sys.setprofile(count)
    call()
    sys.setprofile(None)
    return made
