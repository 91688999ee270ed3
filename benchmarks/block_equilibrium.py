"""A whole block as a fixed point: its training step against torchdeq's, a stack's, and bare products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from implicit_attention import Anderson, Equilibrium, Implicit, Picard
from implicit_attention.linear import GMRES

from . import guard, memory
from .measure import interleaved, once
from .targets import Row

TESTS = ("tests/adjoints/test_blocks.py",)
#: torchdeq's tolerances are the loosest of these, in units of ours, at which its measured residuals are no larger.
LOOSEST, TIGHTEST = 2.0**4, 2.0**-8
TORCHDEQ_CAP = 100
#: The history of our accelerated steps, which `Anderson` advises for a block that contracts.
HISTORY = 2
#: Our solvers: accelerated and plain steps.
OURS = ("ours", "ours, plain steps")
#: torchdeq's solvers that ours are held against, the same one forward and backward.
RIVALS = ("anderson", "fixed_point_iter")
RATIOS = {
    "ours / bare": ("ours", "bare"),
    "ours / by hand": ("ours", "by hand"),
    "ours / ours, plain steps": OURS,
    "by hand / bare": ("by hand", "bare"),
    "ours / stack": ("ours", "stack"),
    **{f"ours / torchdeq {name}": ("ours", f"torchdeq {name}") for name in RIVALS},
}
#: The faster of our two solvers over the faster of theirs.
FASTEST = "ours / torchdeq"


@dataclasses.dataclass(frozen=True)
class EquilibriumSetting:
    """Sizes of the block and its input, the relative tolerance of state and adjoint, and the precision of products.

    A convolution has images of length x length pixels with `dim` channels, in `heads` groups that are normalised.
    """

    batch: int = 8
    length: int = 128
    dim: int = 64
    heads: int = 4
    kind: str = "block"
    rtol: float = 1e-3
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.kind} as a fixed point, {self.sizes}, {self.dtype}, to {self.rtol:g}"

    @property
    def sizes(self) -> str:
        if self.kind == "convolution":
            return f"B {self.batch}, {self.length} x {self.length}, {self.dim} channels"
        return f"B {self.batch}, N {self.length}, width {self.dim}, {self.heads} heads"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a state."""
        if self.kind == "convolution":
            return (self.batch, self.dim, self.length, self.length)
        return (self.batch, self.length, self.dim)


#: Blocks and convolutions of the sizes that people iterate.
TEN = (
    *(EquilibriumSetting(*sizes) for sizes in ((1, 8, 32), (8, 8, 32), (8, 32, 64), (32, 32, 128), (1, 128), (8, 128))),
    *(EquilibriumSetting(*sizes, heads=8, kind="convolution") for sizes in ((1, 8, 32), (8, 8, 32), (32, 8, 32))),
    EquilibriumSetting(8, 16, 16, heads=8, kind="convolution"),
)


class Convolution(nn.Module):
    """z <- norm(relu(z + norm(x + conv(norm(relu(conv(z))))))): the block of the multiscale equilibria of images.

    Reference: Bai, Koltun and Kolter (2020), at one scale.
    """

    def __init__(self, setting: EquilibriumSetting) -> None:
        super().__init__()
        self.setting = setting
        self.first, self.second = (nn.Conv2d(setting.dim, setting.dim, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(setting.heads, setting.dim) for _ in range(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        first, second, third = self.norms
        inner = first(F.relu(self.first(z)))
        out: Tensor = third(F.relu(z + second(x + self.second(inner))))
        return out


class Block(nn.Module):
    """z <- norm(z + x + attention(z)), z <- norm(z + mlp(z)): the input joins at every step."""

    def __init__(self, setting: EquilibriumSetting) -> None:
        super().__init__()
        dim, self.setting = setting.dim, setting
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if self.setting.dtype == "float32":
            return self._next(z, x)
        with torch.autocast(z.device.type, getattr(torch, self.setting.dtype)):
            return self._next(z, x).to(z.dtype)

    def _next(self, z: Tensor, x: Tensor) -> Tensor:
        parts = self.project(z).unflatten(-1, (3, self.setting.heads, -1)).unbind(-3)
        read = F.scaled_dot_product_attention(*(part.transpose(-2, -3) for part in parts))
        y = self.attention_norm(z + x + self.out(read.transpose(-2, -3).flatten(-2)))
        out: Tensor = self.mlp_norm(y + self.mlp(y))
        return out


class Data(NamedTuple):
    """A block, its input, and the fixed cotangent of the state."""

    block: Block | Convolution
    x: Tensor
    cotangent: Tensor


def draw(setting: EquilibriumSetting) -> Data:
    torch.manual_seed(setting.seed)
    kind: type[Block | Convolution] = Convolution if setting.kind == "convolution" else Block
    block, x, cotangent = kind(setting), torch.randn(setting.shape), torch.randn(setting.shape)
    return Data(block.to(setting.device), x.to(setting.device), cotangent.to(setting.device))


#: A training step of the block, or of one that counts in its place; it returns the state.
Training = Callable[..., Tensor]


class Counted(nn.Module):
    """The block plus a shift, counting its evaluations without graph and the products with its Jacobian.

    The gradient of the shift, which is zero, is the solution of the adjoint system itself.
    """

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.block, self.shift = data.block, nn.Parameter(torch.zeros_like(data.x))
        self.counts = {"evaluations": 0, "products": 0}

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.block(z, x) + self.shift
        if out.requires_grad:
            out.register_hook(lambda cotangent: self._count("products"))
        else:
            self._count("evaluations")
        return out

    def _count(self, what: str) -> None:
        self.counts[what] += 1


def ours(data: Data, *, rtol: float, evaluations: int | None = None, plain: bool = False) -> Training:
    """`Equilibrium` by `Anderson` or `plain` steps; of so many evaluations for each sample, converged or not, if asked.

    The adjoint is the default, to the same tolerance.
    """
    solver: Any = Picard(rtol=rtol) if plain else Anderson(history=HISTORY, rtol=rtol)
    adjoint = None
    if evaluations is not None:
        solver = Anderson(history=HISTORY, rtol=0, atol=1e-30, max_steps=evaluations - 1)
        adjoint = Implicit(GMRES(rtol=rtol))
    layers: dict[nn.Module, Equilibrium] = {}

    def run(block: nn.Module = data.block) -> Tensor:
        block.zero_grad(set_to_none=True)
        if block not in layers:
            layers[block] = Equilibrium(block, solver=solver, adjoint=adjoint, on_failure="ignore")
        state: Tensor = layers[block](data.x)
        state.backward(data.cotangent)
        return state.detach()

    return run


def torchdeq_state(data: Data, name: str, *, forward: float, backward: float) -> Callable[[nn.Module], Tensor]:
    """The state of a block by torchdeq's layer with its implicit gradient, the same solver forward and backward."""
    from torchdeq import get_deq

    options: dict[str, Any] = {"f_tol": forward, "b_tol": backward}
    for way in "fb":
        options |= {f"{way}_solver": name, f"{way}_stop_mode": "rel", f"{way}_max_iter": TORCHDEQ_CAP}
    deq: Any = get_deq(ift=True, **options)
    deq.train()

    def run(block: nn.Module) -> Tensor:
        state: Tensor = deq(lambda z: block(z, data.x), torch.zeros_like(data.x))[0][-1]
        return state

    return run


def torchdeq(data: Data, name: str, *, forward: float, backward: float) -> Training:
    """Its training step."""
    solve = torchdeq_state(data, name, forward=forward, backward=backward)

    def run(block: nn.Module = data.block) -> Tensor:
        block.zero_grad(set_to_none=True)
        state = solve(block)
        state.backward(data.cotangent)
        return state.detach()

    return run


def stack(data: Data, count: int) -> Callable[[], None]:
    """As many untied blocks in turn, which hold as many weights and keep all that they compute."""
    blocks = nn.ModuleList(type(data.block)(data.block.setting) for _ in range(count)).to(data.x.device)

    def run() -> None:
        blocks.zero_grad(set_to_none=True)
        z = torch.zeros_like(data.x)
        for block in blocks:
            z = block(z, data.x)
        z.backward(data.cotangent)

    return run


def bare(data: Data, evaluations: int, products: int) -> Callable[[], None]:
    """Make so many calls of the block without a graph, in turn, and products with its Jacobian at one state."""
    at = torch.randn_like(data.x).requires_grad_()
    recorded = data.block(at, data.x)

    def run() -> None:
        z, u = torch.zeros_like(data.x), data.cotangent
        with torch.no_grad():
            for _ in range(evaluations):
                z = data.block(z, data.x)
        for _ in range(products):
            (u,) = torch.autograd.grad(recorded, at, u, retain_graph=True)

    return run


def by_hand(data: Data, rtol: float) -> Training:
    """The same two methods in as few calls of torch as they need: no status, safeguard or check, all samples at once.

    It is what a loop of torch's calls has to cost above bare products.
    """

    def run(block: nn.Module = data.block) -> Tensor:
        block.zero_grad(set_to_none=True)
        with torch.no_grad():
            z = _anderson(
                lambda z: block(z.view_as(data.x), data.x).flatten(1), torch.zeros_like(data.x).flatten(1), rtol
            )
        state = z.view_as(data.x).requires_grad_()
        mapped = block(state, data.x)

        def product(v: Tensor) -> Tensor:
            (by_state,) = torch.autograd.grad(mapped, state, v.view_as(state), retain_graph=True)
            return v - by_state.flatten(1)

        u = _gmres(product, data.cotangent.flatten(1), rtol)
        mapped.backward(u.view_as(state))
        return state.detach()

    return run


def _anderson(f: Callable[[Tensor], Tensor], z: Tensor, rtol: float) -> Tensor:
    changes: list[tuple[Tensor, Tensor]] = []
    before, size = None, torch.linalg.vector_norm
    while True:
        mapped = f(z)
        r = mapped - z
        if bool((size(r, dim=-1) <= rtol * size(mapped, dim=-1)).all()):
            return z
        if before is not None:
            changes = [(r - before[0], mapped - before[1]), *changes[:1]]
        before, z = (r, mapped), mapped
        if len(changes) == HISTORY:
            (a, b), rest = (dr for dr, _ in changes), [(dr * r).sum(-1) for dr, _ in changes]
            aa, ab, bb = (a * a).sum(-1), (a * b).sum(-1), (b * b).sum(-1)
            determinant = aa * bb - ab * ab
            weights = (bb * rest[0] - ab * rest[1]) / determinant, (aa * rest[1] - ab * rest[0]) / determinant
            for weight, (_, change) in zip(weights, changes, strict=True):
                z = torch.addcmul(z, weight[:, None], change, value=-1)


def _gmres(product: Callable[[Tensor], Tensor], b: Tensor, rtol: float) -> Tensor:
    """By the Hessenberg matrices as numbers of the host, a least-squares problem for each sample and step."""
    beta = torch.linalg.vector_norm(b, dim=-1)
    basis, columns, sizes = [b / beta[:, None]], [], beta.cpu().numpy()
    while True:
        w, column = product(basis[-1]), []
        for v in basis:
            column.append((v * w).sum(-1))
            w = torch.addcmul(w, column[-1][:, None], v, value=-1)
        column.append(torch.linalg.vector_norm(w, dim=-1))
        columns.append(torch.stack(column, -1).cpu().numpy())
        count = len(columns)
        hessenberg = np.zeros((len(b), count + 1, count))
        for j, entries in enumerate(columns):
            hessenberg[:, : j + 2, j] = entries
        q, triangle = np.linalg.qr(hessenberg, mode="complete")
        target = q[:, 0] * sizes[:, None]
        if (abs(target[:, -1]) <= rtol * sizes).all():
            weights = torch.from_numpy(np.linalg.solve(triangle[:, :-1], target[:, :-1, None])[..., 0]).to(b)
            u = weights[:, :1] * basis[0]
            for j in range(1, count):
                u.addcmul_(weights[:, j : j + 1], basis[j])
            return u
        basis.append(w.div_(column[-1][:, None]))


def measured(data: Data, training: Training) -> dict[str, Any]:
    """Measure the work of a step, and the largest relative residuals of its state and adjoint over the samples."""
    counted = Counted(data)
    # Once before: `solve` looks at what a new block reads.
    training(counted)
    counted.counts.update(evaluations=0, products=0)
    state = training(counted).requires_grad_()
    counts, u = dict(counted.counts), counted.shift.grad
    assert u is not None
    mapped = data.block(state, data.x)
    (product,) = torch.autograd.grad(mapped, state, u)
    of_state, of_adjoint = mapped.detach() - state.detach(), data.cotangent - u + product
    return counts | {
        "state_residual": float((_norms(of_state) / _norms(mapped.detach())).max()),
        "adjoint_residual": float((_norms(of_adjoint) / _norms(data.cotangent)).max()),
    }


def relative_residual(data: Data, state: Tensor) -> float:
    """The largest |f(z) - z| / |f(z)| over the samples."""
    mapped = data.block(state, data.x)
    return float((_norms(mapped - state) / _norms(mapped)).max())


def _norms(t: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(t.double().flatten(1), dim=-1)
    return size


def loosened(data: Data, name: str, rtol: float) -> tuple[Training, dict[str, Any]]:
    """torchdeq at the loosest tolerances at which its measured residuals are no larger than `rtol`."""
    tolerance = {"forward": LOOSEST * rtol, "backward": LOOSEST * rtol}
    while True:
        training = torchdeq(data, name, **tolerance)
        found = measured(data, training)
        # The state first, at which the adjoint is measured.
        way = "forward" if found["state_residual"] > rtol else "backward"
        if found["state_residual"] <= rtol and found["adjoint_residual"] <= rtol:
            return training, found | tolerance
        tolerance[way] /= 2
        if tolerance[way] < TIGHTEST * rtol:
            return training, found | {"error": f"{way} residual stays above {rtol:g}"}


def equilibrium_row(setting: EquilibriumSetting, *, repeats: int, max_seconds: float) -> Row:
    """Training steps at equal measured residuals of state and adjoint, in turns."""
    if (reason := guard.red(TESTS)) is not None:
        return {"evidence": {"ours": {"error": reason}}, "seconds": {}, "ratios": {FASTEST: None, "ours / bare": None}}
    data = draw(setting)
    functions: dict[str, Callable[[], Any]] = {}
    found = {}
    for name, training in zip(
        OURS, (ours(data, rtol=setting.rtol, plain=plain) for plain in (False, True)), strict=True
    ):
        functions[name], found[name] = training, measured(data, training)
        if max(found[name]["state_residual"], found[name]["adjoint_residual"]) > setting.rtol:
            found[name]["error"] = "not timed, the measured residuals are above the tolerance"
            return {"evidence": found, "seconds": {}, "ratios": {FASTEST: None, "ours / bare": None}}
    for name in RIVALS:
        rival, found[f"torchdeq {name}"] = loosened(data, name, setting.rtol)
        if "error" not in found[f"torchdeq {name}"]:
            functions[f"torchdeq {name}"] = rival
    evaluations, products = found["ours"]["evaluations"], found["ours"]["products"]
    found["by hand"] = measured(data, hand := by_hand(data, setting.rtol))
    functions["by hand"] = hand
    functions["stack"] = stack(data, evaluations)
    functions["bare"] = bare(data, evaluations, products)
    first = {}
    for name, function in functions.items():
        before = memory.begin(setting.device) if setting.device != "cpu" else 0
        first[name] = once(function, setting.device)[1]
        if setting.device != "cpu":
            found.setdefault(name, {})["peak_bytes"] = memory.peak(setting.device) - before
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds, device=setting.device)
    made: dict[str, float | None] = {
        label: times[one].median / times[other].median for label, (one, other) in RATIOS.items() if other in times
    }
    rivals = [times[f"torchdeq {name}"].median for name in RIVALS if f"torchdeq {name}" in times]
    if rivals:
        made[FASTEST] = min(times[name].median for name in OURS) / min(rivals)
    return {
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": made,
    }
