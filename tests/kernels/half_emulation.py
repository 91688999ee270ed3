"""The solve and its gradients in half precision, in plain torch with the roundings of the kernels: the reference.

`python tests/kernels/half_emulation.py` prints how accurate it is by setting, against float64 with the same keys.
"""

import dataclasses
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from triton_oracle import EPS, FLOOR, Dense, adjoint, chosen, follow

from implicit_attention import Status
from implicit_attention.kernels import Attention

#: Weights relative to 1 are multiplied by this before they are rounded.
UNIT = 2.0**12
#: The rule by default, and the tolerance of the adjoint.
RULE = SimpleNamespace(
    rtol=1e-3, atol=0.0, max_steps=100, plain_steps=2, fixed_budget=False, exhausted=Status.MAX_STEPS
)
ADJOINT_RTOL = 3e-3
DTYPES = torch.float16, torch.bfloat16


def power_of_two(x):
    """The largest power of two up to x > 0; 1 where there is none."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1).where(x > 0, 1.0)


def rounded(x, fine):
    """x in float16, with the next 11 bits where `fine`."""
    high = x.half().float()
    return high + (x - high).half().float().masked_fill(~fine, 0.0)


def by_rows(x, fine):
    """The numbers of rows in units of the power of two up to their length, rounded, and that power."""
    unit = power_of_two(x.norm(dim=-1, keepdim=True))
    return rounded(x / unit, fine), unit


@dataclasses.dataclass
class Half:
    """Evaluations and products over the keys of a dense problem: operands in float16, sums in float32."""

    dense: Dense
    dtype: torch.dtype
    #: What weights of the gradient of keys are multiplied by.
    weights: float = UNIT

    def __post_init__(self):
        self.peak = power_of_two(self.dense.keys.abs().amax((-2, -1), keepdim=True))
        # float16 has no room for all exponents of bfloat16.
        self.unit = (self.peak / 2**14 if self.dtype == torch.bfloat16 else torch.ones_like(self.peak)).float()
        self.keys = (self.dense.keys / self.unit).half().float()
        self.peak = (self.peak / self.unit).float()
        self.beta, self.bias = self.dense.beta.float(), self.dense.bias.float()
        self.rest = 1 - self.dense.anchor.float()

    def scores(self, z, fine):
        """The scores of rounded states, those states, and what their rounding takes off a log-sum-exp by its mean."""
        half, scale = by_rows(z, fine)
        scores = self.beta * (self.unit * scale) * (half @ self.keys.mT) + self.bias
        return scores, half, lambda mean: self.beta * (mean * (z - half * scale)).sum(-1, keepdim=True)

    def attend(self, z, fine):
        """Mean and log-sum-exp at z, (..., N, D), of queries that are `fine` (..., N) with the low parts too."""
        fine = fine[..., None]
        scores, _, lost = self.scores(z, fine)
        peak = scores.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        p = (scores - peak).exp()
        total = p.sum(-1, keepdim=True)
        empty = total == 0
        mean = self.summed(rounded(UNIT * p, fine)) * (self.unit / UNIT / total.masked_fill(empty, 1.0))
        return mean, (peak + total.log() + lost(mean)).masked_fill(empty, 0.0)[..., 0]

    def summed(self, weights):
        """The sum over the keys: one number after the other float32 would lose digits with their number."""
        return (weights.double() @ self.keys.double()).float()

    def finely(self, z):
        return self.attend(z, torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device))

    def product(self, z, mean, logsumexp, v, fine):
        """The Hessian at z times v."""
        return v - self.rest * self.beta * self.spread(z, mean, logsumexp, v, fine)

    def spread(self, z, mean, logsumexp, v, fine):
        """The covariance of the keys at z times v."""
        fine = fine[..., None]
        scores, _, lost = self.scores(z, fine)
        p = (scores - (logsumexp[..., None] - lost(mean))).exp()
        half, scale = by_rows(v, fine)
        t = p * (half @ self.keys.mT - (mean / self.unit * half).sum(-1, keepdim=True))
        sums = self.summed(rounded(t * (UNIT / self.peak), fine)) * (self.peak / UNIT)
        return (sums * self.unit - t.sum(-1, keepdim=True) * mean) * (scale * self.unit)

    def by_keys(self, z, mean, logsumexp, u):
        """(df/dK)^T u, for every set of keys as the queries see it."""
        coarse = torch.zeros_like(logsumexp, dtype=torch.bool)[..., None]
        (z_half, z_unit), (half, unit) = by_rows(z, coarse), by_rows(self.rest * u, coarse)
        p = (self.scores(z, ~coarse)[0] - logsumexp[..., None]).exp()
        t = p * (half @ self.keys.mT - (mean / self.unit * half).sum(-1, keepdim=True))
        first = (rounded(self.weights * p, coarse) * unit).mT @ half
        second = (rounded(t * (self.weights / self.peak), coarse) * (unit * z_unit)).mT @ z_half
        return (first + second * self.beta * self.unit * self.peak) / self.weights

    def solve(self, initial, stop):
        return follow(self.dense, initial.float(), stop, self.attend, half=True)

    def adjoint(self, solved, cotangent, rtol=ADJOINT_RTOL, max_steps=100):
        """Conjugate gradients for A u = cotangent, and the gradients that u carries."""
        there = solved.state, solved.mean, solved.logsumexp
        size = cotangent.norm(dim=-1)
        running = size > 0
        fine = torch.full_like(running, rtol < 1e-3)
        u, r, p = torch.zeros_like(cotangent), cotangent, cotangent
        for _ in range(max_steps):
            if not running.any():
                break
            moved = self.product(*there, p, fine)
            square = (r * r).sum(-1, keepdim=True)
            rate = square / (p * moved).sum(-1, keepdim=True)
            after = r - rate * moved
            turned = after + after.square().sum(-1, keepdim=True) / square * p
            u, r, p = chosen(running, (u + rate * p, after, turned), (u, r, p))
            running = running & (r.norm(dim=-1) > rtol * size)
        return self.answer(*there, cotangent, u + r)

    def answer(self, z, mean, logsumexp, cotangent, u):
        """What is told of u: the residual, and the gradients that it carries."""
        spread = self.rest * self.spread(z, mean, logsumexp, u, torch.ones_like(logsumexp, dtype=torch.bool))
        residual = (cotangent - u + self.beta * spread).norm(dim=-1)
        by_keys = self.by_keys(z, mean, logsumexp, u)
        return SimpleNamespace(value=u, residual=residual, by_beta=(z * spread).sum(-1), by_keys=by_keys)


# Accuracy by setting.


class Setting(NamedTuple):
    """A problem of a few queries and many keys; beta in units of 1/sqrt(dim)."""

    keys: str
    beta: float
    anchor: float
    count: int
    dtype: torch.dtype
    rows: int = 12
    dim: int = 64

    def __str__(self):
        return f"{self.keys} {self.beta:g} {self.anchor} 2^{self.count.bit_length() - 1} {str(self.dtype)[6:]}"

    def problem(self):
        torch.manual_seed(self.count)
        keys = torch.randn(self.count, self.dim)
        if self.keys == "clustered":
            keys = torch.randn(16, self.dim)[torch.arange(self.count) % 16] + 0.5 * keys
        # Queries near some keys, and others.
        query = torch.randn(self.rows, self.dim)
        query[::2] = keys[: len(query[::2])] + 0.3 * query[::2]
        query, keys = (t.to(self.dtype)[None] for t in (query, keys))
        return Attention.of(query, keys, torch.tensor([self.beta / self.dim**0.5]), torch.tensor([self.anchor]))


SETTINGS = [
    Setting(*each)
    for each in itertools.product(
        ("Gaussian", "clustered"), (1.0, 2.0, 4.0, 8.0), (0.0, 0.5), (2**9, 2**13, 2**16), DTYPES
    )
]


def relative(value, exact):
    return float((value.double() - exact).norm() / exact.norm())


def noise(dense, z):
    """By how much the rounding of float32 alone moves f(z), (*batch, N).

    A score beta <k_j, z> + bias_j is known to two units of the last place of beta |k_j| |z| + |bias_j|, and moves f by
    p_j (k_j - mean) times that; and the mean is a sum of numbers of the size of keys.
    """
    p, _ = dense.probabilities(z)
    sizes, away = dense.keys.norm(dim=-1)[..., None, :], torch.cdist(p @ dense.keys, dense.keys)
    scores = dense.beta * sizes * z.norm(dim=-1, keepdim=True) + dense.bias.masked_fill(p == 0, 0.0).abs()
    return 2 * EPS * (p * (away * scores + sizes)).sum(-1)


class Accuracy(NamedTuple):
    """How far a solve and its gradients are from float64 with the same keys.

    evaluations: their mean number.
    residual: the largest error of a reported one, in units of |f(z)|; above: what of it float32 does not explain.
    state: the largest distance to the solution, in units of |z|; of_bound: in units of the residual over the smallest
        eigenvalue of the Hessian.
    query, keys, beta: the errors of gradients at the state, relative to their norms; that of beta, <df/dbeta, u>, to
        |df/dbeta| |u|, since for a u of any direction it may cancel, without a unit of float32 of |k| |z|^2 |u|.
    rounding: that of keys against the exact one of the same u.
    """

    evaluations: float
    residual: float
    above: float
    state: float
    of_bound: float
    query: float
    keys: float
    beta: float
    rounding: float

    @property
    def broken(self):
        """Which promises are not kept: {name: (number, the largest that it may be)}."""
        most = {"above": FLOOR, "of_bound": 1.1, "query": 5e-3, "keys": 5e-3, "beta": 5e-3, "rounding": 1e-3}
        return {name: (getattr(self, name), most[name]) for name in most if not getattr(self, name) <= most[name]}

    @classmethod
    def of(cls, problem, solved, adjoint_of):
        """adjoint_of: the adjoint answer for a cotangent."""
        dense, z = Dense.of(problem), solved.state.double()
        mapped = lambda z: dense.mapped(dense.attend(z)[0])  # noqa: E731
        f, hessian = mapped(z), dense.hessian(z)
        true, length = (f - z).norm(dim=-1), f.norm(dim=-1)
        wrong, solution = (solved.residual - true).abs(), z
        for _ in range(8):
            solution = solution + torch.linalg.solve(hessian, (mapped(solution) - solution)[..., None])[..., 0]
        away, least = (z - solution).norm(dim=-1), torch.linalg.eigvalsh(hessian)[..., 0]
        cotangent = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
        answer = adjoint_of(cotangent)
        value, gradients = adjoint(dense, problem, z, cotangent.double())
        by_keys, by_beta = gradients(value)
        eye = torch.eye(z.shape[-1], dtype=z.dtype)
        spread = ((eye - hessian) @ z[..., None])[..., 0] / dense.beta
        whole, size = (t.norm(dim=-1) * value.norm(dim=-1) for t in (spread, z))
        off = (answer.by_beta - by_beta).abs() - EPS * dense.keys.norm(dim=-1).amax() * z.norm(dim=-1) * size
        return cls(
            float(solved.num_evals.double().mean()),
            float((wrong / length).max()),
            float(((wrong - noise(dense, z)) / length).max()),
            float((away / z.norm(dim=-1)).max()),
            float((away * least / true.clamp(min=EPS * length)).max()),
            relative(answer.value, value),
            relative(answer.by_keys, by_keys),
            float(off.clamp(min=0).norm() / whole.norm()),
            relative(answer.by_keys, gradients(answer.value.double())[0]),
        )


def accuracy(setting, rtol=ADJOINT_RTOL):
    """That of the emulation, with a tolerance for the adjoint."""
    problem = setting.problem()
    half = Half(Dense.of(problem), setting.dtype)
    solved = half.solve(problem.query, RULE)
    assert bool((solved.status == Status.CONVERGED).all()), setting
    return Accuracy.of(problem, solved, lambda cotangent: half.adjoint(solved, cotangent, rtol))


if __name__ == "__main__":
    print("| keys, beta sqrt(D), anchor, M, dtype |", " | ".join(Accuracy._fields), "|")
    print("|---" * (1 + len(Accuracy._fields)), "|", sep="")
    for setting in SETTINGS:
        found = accuracy(setting)
        print(f"| {setting} |", " | ".join(f"{number:.2g}" for number in found), "|", flush=True)
