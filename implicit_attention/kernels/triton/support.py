"""Whether the Triton kernels can do a problem, and the small problems by which they earn trust.

Only what runs a kernel imports Triton.
"""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch import HALF
from ...linear import GMRES
from ...solution import Status
from ..problem import FINEST, FLOOR, Attention, FusedRule
from ..trust import Errors, KernelComparison, adjoint_errors, check_rule, mask_kind, normal, small_problem, solve_errors
from .layout import PART, TILES, fitting, largest_dim, lists, step_tiles, tiles, whole_tiles

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensor cores with bfloat16 and the asynchronous copies that the kernels count on.
LEAST_CAPABILITY = (8, 0)


def unsupported(record: Attention) -> str | None:
    """Why the Triton kernels cannot do `record`, as "what is unsupported; what to use"; None if they can."""
    query, keys, beta, anchor, pairs = *record[:4], record.pairs
    dim = query.shape[-1]
    if (reason := absent(query.device)) is not None:
        return reason
    for name, tensor in (("field", query), ("keys", keys)):
        if tensor.dtype not in DTYPES:
            return f"Triton kernels do not compute in {tensor.dtype} ({name}); use float32, or impl='auto'"
    if not 1 <= dim <= largest_dim(keys.dtype):
        most = f"{largest_dim(keys.dtype)} with keys in {keys.dtype}"
        return f"Triton kernels do not take a head dimension of {dim}; use at most {most}, or impl='auto'"
    if any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in (pairs, beta, anchor)):
        return "Triton kernels do not read float64 masks, betas or anchors; use float32, or impl='auto'"
    # A compiler's graph must hold for other lengths.
    if not torch.compiler.is_compiling() and query.shape[-2] * dim >= 2**31:
        return "Triton kernels take less than 2^31 numbers of queries of one set; split them, or use impl='auto'"
    return None


def absent(device: torch.device) -> str | None:
    """Why Triton kernels do not run on a device; None if they do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it (`pip install triton`) or use impl='auto'"
    if device.type == "cuda":
        if (capability := torch.cuda.get_device_capability(device)) >= LEAST_CAPABILITY:
            return None
        has = ".".join(map(str, capability))
        return f"Triton kernels need compute capability 8.0 or more, this device has {has}; use impl='auto'"
    # The interpreter runs kernels on the CPU: the variable must be set before Triton is imported.
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
        return None
    return f"Triton kernels do not run on the device {str(device)!r}; use a CUDA device or impl='auto'"


# As by `torch.compiler.assume_constant_result`, which would import the compiler.
absent._dynamo_marked_constant = True  # type: ignore[attr-defined]


#: Numbers of the longest rows of which kernels make steps.
LONGEST_ROW = 2**19


class StepVariant(NamedTuple):
    """The properties of a step of a user's map that select the code of its kernels."""

    dtype: torch.dtype
    history: int
    #: Of a row, up to a power of two.
    parts: int


def step_variant(z: Tensor, event: int, history: int) -> StepVariant | None:
    """The kernels for states of so many numbers, and for so many changes that are mixed; None where there are none."""
    fits = absent(z.device) is None and 0 < event <= LONGEST_ROW
    return StepVariant(z.dtype, history, _parts(event)) if fits else None


def _parts(event: int) -> int:
    """The parts of a row of so many numbers, up to a power of two."""
    return 1 << (-(-event // PART) - 1).bit_length()


def step_errors(variant: StepVariant, device: torch.device) -> Errors:
    """Solve a small problem with rows of as many parts, and compare what it says of its answers with measurements."""
    from .step import TritonStep

    rule = check_rule(variant.dtype)
    given = z = normal((3, PART * (variant.parts - 1) + 5), seed=0).to(device, variant.dtype)
    step = TritonStep(rule, variant.history, 0.0, 20.0, z, torch.ones(3, dtype=torch.bool, device=device))
    for number in range(rule.max_steps + 1):
        z = step(z, given + torch.tanh(z.flip(-1)) / 2, number)
        if not bool(step.memory.active.any()):
            break
    measured, compared = [], KernelComparison(torch.finfo(variant.dtype).eps)
    for dtype in (torch.float64, variant.dtype):
        value, own = step.value.cpu().to(dtype), given.cpu().to(dtype)
        image = own + torch.tanh(value.flip(-1)) / 2
        measured.append(((image - value).norm(dim=-1), rule.rtol * image.norm(dim=-1)))
    size = float(measured[0][1].max()) / rule.rtol
    for name, exact, rough in zip(("residual", "tolerance"), *measured, strict=True):
        compared.add(name, getattr(step.record, name), exact, rough, size=size)
    compared.none("unsolved", step.record.status != int(Status.CONVERGED))
    compared.none("miscounted", step.record.num_evals != step.record.num_steps + 1)
    return compared.errors


class GMRESVariant(NamedTuple):
    """The properties of a linear system that select the code of the kernels of GMRES."""

    dtype: torch.dtype
    #: Of a row, and of a sweep with one more: up to powers of two.
    parts: int
    steps: int


#: Steps of the longest sweep, and numbers of a matrix of each row that need not be less than its vectors.
LONGEST_SWEEP, FEW = 255, 2**22
#: Of a sweep that is checked: its steps, those between looks, and what it leaves of residuals.
CHECK_SWEEP, CHECK_EVERY, AIM = 12, 4, 2e-4


def gmres_variant(residual: Tensor, steps: int) -> GMRESVariant | None:
    """The kernels for sweeps of so many steps from residuals (*batch, n); None where there are none."""
    n, rows = residual.shape[-1], residual.shape[:-1].numel()
    if type(residual) is not Tensor or absent(residual.device) is not None or steps > LONGEST_SWEEP:
        return None
    side = 1 << steps.bit_length()
    if not 0 < n <= LONGEST_ROW or residual.numel() >= 2**31 or rows * side**2 > max(FEW, residual.numel() * side):
        return None
    return GMRESVariant(residual.dtype, _parts(n), side)


def gmres_errors(variant: GMRESVariant, device: torch.device) -> Errors:
    """Take the steps of a sweep for small systems with rows of as many parts, and compare them with `GMRES` by torch.

    Of the rows one is ordinary, one has an invariant space, one is singular, one has a basis that needs second passes
    of Gram-Schmidt, one has few steps left, and one takes none.
    """
    from .gmres import TritonGMRES

    n, steps = PART * (variant.parts - 1) + 37, min(CHECK_SWEEP, variant.steps - 1)
    residual, factors = normal((2, 6, n), seed=0)
    factors, aim, unit = 0.6 * factors.tanh(), AIM * residual.norm(dim=-1), torch.finfo(variant.dtype).eps
    factors[1], factors[2], residual[2] = 0.5, 1.0, 1.0
    factors[3], aim[1], aim[3] = 256 * unit * factors[3], 0.0, -1.0
    live, left = torch.tensor([True] * 5 + [False]), torch.tensor([0, 0, 0, 0, max(steps - 2, 0), 0])

    def swept(method: GMRES, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        (scale, r, least), basis, seen = (t.to(device, dtype) for t in (factors, residual, aim)), [], []

        def product(v: Tensor) -> Tensor:
            basis.append(v[3].cpu().double())
            seen.append((v != 0).any(-1))
            image: Tensor = v - scale * v.flip(-1)
            return image

        state, correction, num_steps = method._sweep(product, r, live.to(device), least, left.to(device), steps)
        vectors = torch.stack(basis)
        found = correction, state.residual_norm, vectors @ vectors.mT, state.verdict, num_steps, torch.stack(seen)
        return [t.cpu() for t in found]

    by_torch = GMRES(check_every=CHECK_EVERY)
    kernels = TritonGMRES(restart=variant.steps - 1, check_every=CHECK_EVERY)
    exact, rough = (swept(by_torch, dtype, torch.device("cpu")) for dtype in (torch.float64, variant.dtype))
    measured = swept(kernels, variant.dtype, device)
    compared, size = KernelComparison(unit), float(residual.norm(dim=-1).max())
    for name, *each in zip(("correction", "residual", "products of the basis"), measured, exact, rough, strict=False):
        compared.add(name, *each, size=size)
    for name, one, other in zip(("misjudged", "miscounted", "shown at rest"), measured[3:], exact[3:], strict=True):
        compared.none(name, one != other)
    return compared.errors


def too_fine(keys: Tensor, rule: FusedRule) -> str | None:
    """Why a solve by Triton cannot tell whether it has reached a tolerance, atol apart; None if it can."""
    if keys.dtype not in HALF or rule.max_steps == 0 or rule.fixed_budget or rule.rtol >= FINEST:
        return None
    reason = f"with keys in {keys.dtype} residuals are known to {FLOOR:g} |f(z)|"
    return f"{reason}; use rtol >= {FINEST:g}, got {rule.rtol:g}, float32 keys, or impl='auto'"


class TritonVariant(NamedTuple):
    """The properties of a call that select the code path of a Triton kernel."""

    dtype: torch.dtype
    head_dim: int
    mask: str
    causal: bool
    #: The dtype of what a mask adds.
    added: torch.dtype | None
    #: The `Tiles` of every kernel involved, and of steps.
    tiles: tuple[tuple[int | None, ...], ...]
    #: For each, whether queries that are left are listed.
    listed: tuple[bool, ...]


#: Operation -> the kernels of whose tiles it is made.
KERNELS = {"hopfield_solve": ("evaluate",), "hopfield_adjoint": ("evaluate", "product", "keys")}


def variant(record: Attention, operation: str) -> TritonVariant:
    keys, mask = record.keys, record.pairs
    chosen = [tiles(kernel, record) for kernel in KERNELS[operation]]
    return TritonVariant(
        dtype=keys.dtype,
        head_dim=keys.shape[-1],
        mask=mask_kind(mask),
        causal=record.first is not None,
        added=mask.dtype if mask is not None and mask.is_floating_point() else None,
        tiles=(*map(tuple, chosen), tuple(step_tiles(record))),
        listed=tuple(lists(record, each) for each in chosen),
    )


def errors(record: Attention, operation: str) -> Errors:
    """Those of a problem of the same code and tiles, with tiles of every kind: some pairs masked, none, all, and some.

    All problems of these tiles trust what it shows, so that its number of keys is theirs only where one tile has them.
    """
    from .adjoint import solve_adjoint
    from .solve import solve

    most = max(max(sizes.rows, sizes.keys) for table in TILES.values() for sizes in table.values())
    rows, count = min(record.query.shape[-2], most + 5), record.keys.shape[-2]
    many = all(tiles(kernel, record).keys == whole_tiles(kernel, record).keys for kernel in KERNELS[operation])
    small = small_problem(record, rows, 4 * most + 3 if many else fitting(count, most))
    if (pairs := small.pairs) is not None:
        low, high = (False, True) if pairs.dtype == torch.bool else (-torch.inf, 0.0)
        # All queries but the one that attends to no key.
        others = [row for row in range(pairs.shape[-2]) if row == 0 or row != pairs.shape[-2] // 2]
        if many:
            pairs[:, others, most : 2 * most] = high
            pairs[:, :, 2 * most : 3 * most] = low
        else:
            pairs[1] = high
    if small.first is not None and many:
        small = small._replace(first=3 * most)
    return solve_errors(small, solve) if operation == "hopfield_solve" else adjoint_errors(small, solve, solve_adjoint)
