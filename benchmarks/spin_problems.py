"""Spin systems that are solved: settings as data, and their inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from implicit_attention.spins import Bonds, SpinSystem


@dataclasses.dataclass(frozen=True)
class Timed:
    """C6: a batch of glasses at one temperature, to be solved and differentiated."""

    beta: float
    dtype: str = "float64"
    batch: int = 8
    sites: int = 128
    dim: int = 64
    seed: int = 0
    metric: ClassVar[str] = "C6"

    @property
    def name(self) -> str:
        return f"saddle point, B {self.batch}, N {self.sites}, D {self.dim}, beta {self.beta:g}, {self.dtype}"


class Data(NamedTuple):
    """Inputs of a `Timed`: fields (B, N, D), couplings (B, N, N) and beta (B,)."""

    setting: Timed
    field: Tensor
    couplings: Tensor
    beta: Tensor


def draw(setting: Timed) -> Data:
    """Standard normal fields; symmetric couplings of variance 1/N."""
    generator = torch.Generator().manual_seed(setting.seed)
    size, dtype = (setting.batch, setting.sites), getattr(torch, setting.dtype)
    field = torch.randn(*size, setting.dim, generator=generator, dtype=torch.float64)
    couplings = _symmetric(torch.randn(*size, setting.sites, generator=generator, dtype=torch.float64))
    beta = torch.full((setting.batch,), setting.beta, dtype=torch.float64)
    return Data(setting, *(t.to(dtype) for t in (field, couplings / math.sqrt(setting.sites), beta)))


@dataclasses.dataclass(frozen=True)
class Sized:
    """One method at growing sizes."""

    method: str
    sizes: tuple[int, ...]
    seed: int = 0
    metric: ClassVar[str] = "SCALING"

    @property
    def name(self) -> str:
        return f"scaling of {self.method}"


def one_system(sites: int, dim: int, *, chain: bool, seed: int = 0) -> SpinSystem:
    """Weak enough that every method has an answer: beta 1, couplings of variance 1/(4 N), fields of variance 1/4.

    A chain has couplings of standard deviation 1/2 between neighbours, and fields along one axis.
    """
    generator = torch.Generator().manual_seed(seed)
    field = torch.randn(sites, dim, generator=generator, dtype=torch.float64) / 2
    if chain:
        field[:, 1:] = 0
        upper = torch.diag_embed(torch.randn(sites - 1, generator=generator, dtype=torch.float64) / 2, 1)
        return SpinSystem(upper + upper.mT, field, 1.0)
    weights = torch.randn(sites, sites, generator=generator, dtype=torch.float64)
    return SpinSystem(_symmetric(weights).fill_diagonal_(0) / (2 * math.sqrt(sites)), field, 1.0)


@dataclasses.dataclass(frozen=True)
class Many:
    """One method on all random systems that it admits, or, but for the saddle point, until its time is up."""

    method: str
    groups: int
    per_group: int = 10
    seed: int = 0
    cap_seconds: float = 10.0
    metric: ClassVar[str] = "RANDOM"

    @property
    def name(self) -> str:
        return f"{self.groups * self.per_group} random systems by {self.method}"


@dataclasses.dataclass(frozen=True)
class OnGraph:
    """One method on a graph: a square lattice closed in itself, whose couplings are 1, or random 3-regular ones, whose
    couplings are standard normal; fields are a tenth of that.
    """

    method: str
    sites: int
    graph: str = "torus"
    beta: float = 0.3
    rtol: float = 1e-11
    dtype: str = "float64"
    batch: int | None = None
    seed: int = 0
    metric: ClassVar[str] = "GRAPHS"

    @property
    def name(self) -> str:
        many = "" if self.batch is None else f"{self.batch} graphs, "
        return f"{self.method}, {many}{self.graph}, N {self.sites}, beta {self.beta:g}, {self.rtol:g}, {self.dtype}"


def graph_system(setting: OnGraph) -> SpinSystem:
    generator, dtype = torch.Generator().manual_seed(setting.seed), getattr(torch, setting.dtype)
    batch = () if setting.batch is None else (setting.batch,)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if setting.graph == "torus":
        length = math.isqrt(setting.sites)
        sites = torch.arange(length**2).reshape(length, length)
        pairs = torch.cat([torch.stack([sites, sites.roll(-1, axis)], -1).flatten(0, 1) for axis in (0, 1)])
        values = torch.ones(len(pairs), dtype=dtype)
    else:
        drawn = [_regular(setting.sites, generator) for _ in range(math.prod(batch))]
        pairs = drawn[0] if setting.batch is None else torch.stack(drawn)
        values = normal(*pairs.shape[:-1])
    return SpinSystem(Bonds(pairs, values, setting.sites), 0.1 * normal(*batch, setting.sites, 1), setting.beta)


def _regular(sites: int, generator: torch.Generator) -> Tensor:
    """The pairs of a random graph in which each site has three neighbours, none of them twice."""
    stubs = torch.arange(sites).repeat(3)
    order = torch.randperm(3 * sites, generator=generator)
    while True:
        pairs = stubs[order].reshape(-1, 2).sort(-1).values
        key, place = (pairs[:, 0] * sites + pairs[:, 1]).sort()
        wrong = pairs[:, 0] == pairs[:, 1]
        wrong[place[1:][key.diff() == 0]] = True
        if not bool(wrong.any()):
            return pairs
        # Those that are wrong change ends with others by chance.
        moved = 2 * wrong.nonzero()[:, 0]
        other = torch.randint(3 * sites, moved.shape, generator=generator)
        for a, b in zip(moved.tolist(), other.tolist(), strict=True):
            order[[a, b]] = order[[b, a]]


#: How the couplings of a random system are drawn; `_drawn` says what a name means.
KINDS = (
    "gaussian, weak",
    "gaussian",
    "gaussian, strong",
    "gaussian, not scaled",
    "ferromagnet",
    "antiferromagnet",
    "sparse",
    "low rank",
)
FIELDS = (0.0, 0.01, 0.1, 1.0, 10.0)
DIMS = (1, 3, 8)


def random_systems(setting: Many) -> list[SpinSystem]:
    """Groups of systems of one size; kind, field and beta differ within a group.

    N is uniform in 2..64, log beta uniform between those of 0.01 and 100; with a diagonal in every other group.
    """
    generator = torch.Generator().manual_seed(setting.seed)
    return [_group(index, setting.per_group, generator) for index in range(setting.groups)]


def _group(index: int, count: int, generator: torch.Generator) -> SpinSystem:
    sites = int(torch.randint(2, 65, (), generator=generator))
    dim = DIMS[index % len(DIMS)]
    places = range(index * count, (index + 1) * count)
    couplings = torch.stack([_drawn(KINDS[place % len(KINDS)], sites, generator) for place in places])
    if index % 2:
        couplings.diagonal(dim1=-2, dim2=-1).zero_()
    strength = torch.tensor([FIELDS[place % len(FIELDS)] for place in places], dtype=torch.float64)
    field = strength[:, None, None] * torch.randn(count, sites, dim, generator=generator, dtype=torch.float64)
    beta = 10 ** (4 * torch.rand(count, generator=generator, dtype=torch.float64) - 2)
    return SpinSystem(couplings, field, beta)


def _drawn(kind: str, sites: int, generator: torch.Generator) -> Tensor:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    glass = _symmetric(normal(sites, sites))
    if kind == "low rank":
        patterns = normal(sites, 2).sign()
        return patterns @ patterns.mT / sites
    if kind == "sparse":
        # About three neighbours.
        kept = torch.rand(sites, sites, generator=generator, dtype=torch.float64).triu(1) > 1 - 3 / sites
        bonds = glass.sign() * kept
        return bonds + bonds.mT
    everyone = torch.ones_like(glass) / sites
    return {
        "gaussian, weak": 0.1 * glass / math.sqrt(sites),
        "gaussian": glass / math.sqrt(sites),
        "gaussian, strong": 10 * glass / math.sqrt(sites),
        "gaussian, not scaled": glass,
        "ferromagnet": everyone,
        "antiferromagnet": -everyone,
    }[kind]


def _symmetric(weights: Tensor) -> Tensor:
    """Of the same variance off the diagonal."""
    return (weights + weights.mT) / math.sqrt(2)
