"""Problems with known answers that every solver must face."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..energies import AnchoredEnergy
from ..potentials import LogSumExp
from ..problem import FixedPointMap, Problem


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: where to start and, if there is only one, the answer."""

    name: str
    problem: Problem
    initial: Tensor
    answer: Tensor | None


def fixed_point_cases(dtype: torch.dtype = torch.float64) -> list[Case]:
    """Maps without an energy, one problem each: contractions, slopes of -1, a rotation, root finding as x + F(x).

    Those of SciPy are from scipy/optimize/tests/test_nonlin.py.
    """

    def tensor(*values: float) -> Tensor:
        return torch.tensor([values], dtype=dtype)

    def case(name: str, f: Callable[..., Tensor], initial: Tensor, answer: Tensor | None, *inputs: Tensor) -> Case:
        return Case(name, FixedPointMap(f, *inputs, event_ndim=1), initial, answer)

    decay = tensor(0.9, 0.99, 0.999)
    cos, sin = math.cos(0.7), math.sin(0.7)
    rotation = torch.tensor([[cos, -sin], [sin, cos]], dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(200, 200, generator=generator, dtype=torch.float64)
    # Of norm 0.9.
    matrix = (0.9 * matrix / torch.linalg.matrix_norm(matrix, ord=2)).to(dtype)
    shift = torch.randn(1, 200, generator=generator, dtype=torch.float64).to(dtype)
    eye = torch.eye(200, dtype=torch.float64)
    affine = torch.linalg.solve(eye - matrix.double(), shift[0].double()).to(dtype)[None]
    ones, zeros = torch.ones(1, 6, dtype=dtype), torch.zeros(1, 6, dtype=dtype)
    return [
        case("geometric decay", lambda x, d: d * x, ones[:, :3], zeros[:, :3], decay),
        case("sin(x) x^2", lambda x: x.sin() * x.square(), tensor(0.5), None),
        case("x^3", lambda x: x**3, tensor(0.5), None),
        case("cos x", torch.cos, tensor(0.0), tensor(0.7390851332151607)),
        # Of slope -1 at the answer.
        case("cos x + pi/2", lambda x: x.cos() + math.pi / 2, tensor(0.0), tensor(math.pi / 2)),
        case("affine", lambda x, m, b: x @ m.mT + b, torch.zeros_like(shift), affine, matrix, shift),
        case("rotation", lambda x, r: x @ r.mT, ones[:, :2], zeros[:, :2], rotation),
        case("exp(-x)", lambda x: (-x).exp(), tensor(0.0), tensor(0.5671432904097838)),
        case("tanh(x + 1)", lambda x: (x + 1).tanh(), tensor(0.0), tensor(0.9611797513715394)),
        case("scipy F", _scipy_f, ones[:, :5], zeros[:, :5]),
        case("scipy F2", lambda x: 2 * x, tensor(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), zeros),
        case("scipy F3", _scipy_f3, tensor(1.0, 2.0, 3.0), tensor(-2.5, -4.0, -3.5)),
        case("scipy F4 (Powell)", _scipy_f4, tensor(-1.0, -2.0), None),
        case("scipy F5", _scipy_f5, tensor(2.0, 0.0, 2.0, 0.0), None),
        case("scipy F6", _scipy_f6, tensor(-0.5, 1.4), None),
    ]


def _scipy_f(x: Tensor) -> Tensor:
    d = x.new_tensor([3.0, 2.0, 1.5, 1.0, 0.5])
    return x - d * x - 0.01 * x.square().sum(-1, keepdim=True) * x


def _scipy_f3(x: Tensor) -> Tensor:
    a = x.new_tensor([[-2.0, 1.0, 0.0], [1.0, -2.0, 1.0], [0.0, 1.0, -2.0]])
    return x + x @ a - x.new_tensor([1.0, 2.0, 3.0])


def _scipy_f4(x: Tensor) -> Tensor:
    first, second = x[..., 0], x[..., 1]
    scale = 1e4
    return x + torch.stack([scale * first * second - 1, (-first).exp() + (-second).exp() - (1 + 1 / scale)], dim=-1)


def _scipy_f5(x: Tensor) -> Tensor:
    """Flows through four equal pipes in parallel: pressures x^2/2 agree, and the flows sum to 4."""
    pressure = x.square() / 2
    root = torch.cat([pressure[..., 1:] - pressure[..., :1], x.sum(-1, keepdim=True) - 4], dim=-1)
    return x + root


def _scipy_f6(x: Tensor) -> Tensor:
    first, second = x[..., 0], x[..., 1]
    root = torch.stack([(first + 3) * (second**5 - 7) + 18, (second * first.exp() - 1).sin()], dim=-1)
    a, b = -0.5, 1.4
    slope = math.exp(a) * math.cos(b * math.exp(a) - 1)
    jacobian = x.new_tensor([[b**5 - 7, 5 * (a + 3) * b**4], [b * slope, slope]])
    step: Tensor = torch.linalg.solve(jacobian, root[..., None])
    return x - step.squeeze(-1)


def hopfield_energy(
    *,
    batch: tuple[int, ...] = (),
    queries: int = 64,
    keys: int = 256,
    dim: int = 64,
    sharpness: float = 1.0,
    anchor: float = 0.0,
    clustered: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> AnchoredEnergy:
    """The anchored log-sum-exp energy of Gaussian queries over Gaussian or clustered keys, beta = sharpness/sqrt(dim).

    Clustered: 16 Gaussian centres, keys around them with standard deviation 1/2. These energies have saddles.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64).to(dtype)

    patterns = normal(keys, dim)
    if clustered:
        centres = normal(16, dim)
        owner = torch.randint(16, (*batch, keys), generator=generator)
        patterns = centres.gather(-2, owner[..., None].expand(*owner.shape, dim)) + patterns / 2
    return AnchoredEnergy(LogSumExp(patterns, sharpness / math.sqrt(dim)), normal(queries, dim), anchor)
