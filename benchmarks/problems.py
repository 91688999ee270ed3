"""The problems: settings as data, their inputs, and the evidence, recomputed without the library."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

#: A query is solved when |f(z) - z| <= ATOL + RTOL |f(z)|.
RTOL = 1e-4
ATOL = 1e-8
#: Queries of which the check holds the float64 scores at once.
CHUNK = 512

CENTRES, NOISE = 16, 0.5


@dataclasses.dataclass(frozen=True)
class Shape:
    """B samples, H heads, N queries, head dimension D, and M keys, by default as many as queries."""

    batch: int = 2
    heads: int = 8
    length: int = 512
    dim: int = 64
    num_keys: int | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """One problem: how the keys are drawn, beta * sqrt(D), and the anchor; and what it is computed on."""

    keys: Literal["gaussian", "clustered"]
    sharpness: float
    anchor: float
    shape: Shape = Shape()
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    rtol: float = RTOL
    causal: bool = False

    @property
    def name(self) -> str:
        return f"{self.keys} keys, beta*sqrt(D) {self.sharpness:g}, anchor {self.anchor:g}"

    @property
    def beta(self) -> float:
        return self.sharpness / self.shape.dim**0.5


def setting_of(argument: str) -> Setting:
    """A setting from its fields as JSON."""
    given = json.loads(argument)
    return Setting(**{**given, "shape": Shape(**given["shape"])})


FULL = tuple(
    Setting(keys, sharpness, anchor)  # type: ignore[arg-type]
    for keys in ("gaussian", "clustered")
    for sharpness in (1.0, 2.0, 4.0, 8.0)
    for anchor in (0.0, 0.5)
)
QUICK = (Setting("gaussian", 2.0, 0.0), Setting("clustered", 4.0, 0.0))


class Data(NamedTuple):
    """The inputs of a setting: queries, keys, and the cotangent of the fixed loss sum(cotangent * state)."""

    setting: Setting
    queries: Tensor
    keys: Tensor
    cotangent: Tensor


def draw(setting: Setting, on: str = "cpu") -> Data:
    """Queries and keys iid standard normal; clustered keys lie around CENTRES such points per head.

    Drawn in float32 and on the CPU, so that every device and dtype gets the same numbers, or `on` another device, where
    that takes no time.
    """
    generator = torch.Generator(on).manual_seed(setting.seed)
    s, where = setting.shape, {"generator": generator, "device": on}
    size = (s.batch, s.heads, s.length, s.dim)
    size_of_keys = (s.batch, s.heads, s.length if s.num_keys is None else s.num_keys, s.dim)
    queries, keys, cotangent = (torch.randn(shape, **where) for shape in (size, size_of_keys, size))
    if setting.keys == "clustered":
        centres = torch.randn(s.batch, s.heads, CENTRES, s.dim, **where)
        member = torch.randint(CENTRES, size_of_keys[:3], **where)
        keys = centres.gather(2, member[..., None].expand(size_of_keys)) + NOISE * keys
    return Data(setting, *(t.to(setting.device, getattr(torch, setting.dtype)) for t in (queries, keys, cotangent)))


def last_head(data: Data) -> Data:
    """The problem of the last head of the last sample, with its leading axes; heads do not mix."""
    return Data(data.setting, *(t[-1:, -1:] for t in data[1:]))


def probabilities(setting: Setting, z: Tensor, keys: Tensor, first: int) -> Tensor:
    """Softmax over the keys in float64, for queries z of which `first` is the index of the first."""
    scores = setting.beta * z.double() @ keys.double().mT
    if setting.causal:
        rows, cols = (torch.arange(count, device=z.device) for count in scores.shape[-2:])
        scores = scores.masked_fill(cols > first + rows[:, None], -torch.inf)
    return scores.softmax(-1)


def mapped(data: Data, z: Tensor) -> Tensor:
    """f(z) in float64 by an explicit softmax."""
    setting, keys, parts = data.setting, data.keys.double(), z.split(CHUNK, dim=-2)
    means = [probabilities(setting, part, keys, CHUNK * i) @ keys for i, part in enumerate(parts)]
    return setting.anchor * data.queries.double() + (1 - setting.anchor) * torch.cat(means, dim=-2)


def evidence(data: Data, z: Tensor) -> dict[str, Any]:
    """Measure how well z solves the setting: relative residuals of queries, and the part within the tolerance."""
    z = z.detach()
    f = mapped(data, z)
    residual = torch.linalg.vector_norm(f - z.double(), dim=-1)
    size = torch.linalg.vector_norm(f, dim=-1)
    relative = residual / size
    return {
        "residual_median": float(relative.median()),
        "residual_max": float(relative.max()),
        "converged": float((residual <= ATOL + data.setting.rtol * size).double().mean()),
    }


def gradient_error(data: Data, z: Tensor, by_queries: Tensor, by_keys: Tensor, *, most: int | None = None) -> float:
    """Relative error of a gradient (the larger of its two parts) at the state z, against dense float64 solves.

    One head is checked: heads do not mix, and 64 x 64 systems for each of its queries are enough of them. Where `most`
    of its queries are enough, their gradients alone are checked, as those of keys are sums over all.
    """
    anchor, head = data.setting.anchor, (-1, -1)
    z, keys, g = (t[head].detach().double() for t in (z, data.keys, data.cotangent))
    u, exact_keys = exact_adjoint(data.setting, z[:most], keys, g[:most])
    if most is not None:
        return float((by_queries[head][:most].double() - anchor * u).norm() / (anchor * u).norm())
    # Without an anchor the gradient for the queries is exactly 0; it is then measured against the other one.
    scale = anchor * u.norm() if anchor else exact_keys.norm()
    errors = (
        (by_queries[head].double() - anchor * u).norm() / scale,
        (by_keys[head].double() - exact_keys).norm() / exact_keys.norm(),
    )
    return float(torch.stack(errors).max())


def exact_adjoint(setting: Setting, z: Tensor, keys: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """u with (I - df/dz) u = g for every query of one head, by dense solves, and (df/dkeys)^T u."""
    keys = keys.clone().requires_grad_()
    rate, identity = 1 - setting.anchor, torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    with torch.no_grad():
        squares = (keys[:, :, None] * keys[:, None, :]).flatten(1)
    solved, by_keys = [], torch.zeros_like(keys)
    for i, (part, right) in enumerate(zip(z.split(CHUNK), g.split(CHUNK), strict=True)):
        p = probabilities(setting, part, keys, CHUNK * i)
        mean = p @ keys
        with torch.no_grad():
            covariance = (p @ squares).unflatten(-1, identity.shape) - mean[:, :, None] * mean[:, None, :]
            solved.append(torch.linalg.solve(identity - rate * setting.beta * covariance, right))
        by_keys += torch.autograd.grad((rate * mean * solved[-1]).sum(), keys)[0]
    return torch.cat(solved), by_keys
