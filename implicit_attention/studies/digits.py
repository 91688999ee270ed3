"""The built-in case of `magnetize`: an Ising system for each of the ten digits, fitted to images of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..spins import SpinSystem
from ..spins.inverse_ising import fit_ising
from ..spins.sampling import heat_bath
from .spin_methods import SAMPLER, Entry, applicable, evaluate

SIDE, CLASSES = 8, 10
HALF = SIDE * SIDE // 2
#: A pixel is +1 from here on; they go from 0 to 16.
THRESHOLD = 8
#: The part of all images that is used for the fit.
TRAINED = 2 / 3
#: Pseudocount per image. Less, and pairs are coupled too strongly for TAP's equation.
PSEUDOCOUNT = 1 / 4
FIT: Literal["tap"] = "tap"
#: Images per digit whose lower half is completed.
COMPLETED, QUICK_COMPLETED = 20, 2
#: Chains of the heat bath, their sweeps before sampling, and their sweeps of sampling.
SAMPLING, QUICK_SAMPLING = (10, 50, 150), (10, 20, 40)
DATA = "mean of the images"


class Digits(NamedTuple):
    """Images of -1 and 1 with their digits, in two parts for the fit and for its test, and the fit.

    Attributes:
        images, digits: for the fit, (count, 64) and (count,).
        held_out, held_out_digits: the others.
        system: ten samples of 64 spins.
    """

    images: Tensor
    digits: Tensor
    held_out: Tensor
    held_out_digits: Tensor
    system: SpinSystem

    @property
    def summary(self) -> dict[str, Any]:
        """Return the settings of the fit as plain values."""
        counts = {"images": len(self.images), "held_out": len(self.held_out)}
        return {"fit": FIT, "pseudocount_per_image": PSEUDOCOUNT, "threshold": THRESHOLD, **counts}

    @property
    def means(self) -> Tensor:
        """Return the mean image of every digit, (10, 64)."""
        return torch.stack([self.images[self.digits == c].mean(0) for c in range(CLASSES)])

    @property
    def examples(self) -> Tensor:
        """Return the first held-out image of every digit, (10, 64)."""
        return torch.stack([self.held_out[self.held_out_digits == c][0] for c in range(CLASSES)])


def load(*, seed: int, dtype: torch.dtype) -> Digits:
    """Load scikit-learn's digits, binarised, and fit a system of 64 spins to each of the ten."""
    from sklearn import datasets

    raw = datasets.load_digits()
    images = torch.where(torch.from_numpy(raw.data) >= THRESHOLD, 1.0, -1.0).to(dtype)
    digits = torch.from_numpy(raw.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    used, rest = order.tensor_split([round(TRAINED * len(images))])
    fits = []
    for c in range(CLASSES):
        mine = images[used][digits[used] == c]
        fits.append(fit_ising(mine, method=FIT, pseudocount=PSEUDOCOUNT * len(mine)))
    couplings, field = (torch.stack(tensors) for tensors in zip(*((f.couplings, f.field) for f in fits), strict=True))
    system = SpinSystem(couplings, field, radius=1.0, measure="counting")
    return Digits(images[used], digits[used], images[rest], digits[rest], system)


def energies(system: SpinSystem, images: Tensor) -> Tensor:
    """Return E of every image in every system, (count, 10)."""
    pairs = torch.einsum("ni,cij,nj->nc", images, system.couplings, images) / 2
    return -pairs - images @ system.field[..., 0].mT


def named(digits: Digits, log_partition: Tensor) -> float:
    """Return the share of held-out images whose log p = -E - log Z is largest in the system of their own digit."""
    log_p = -energies(digits.system, digits.held_out) - log_partition
    # NaN is never the largest.
    best = log_p.nan_to_num(-torch.inf).argmax(-1)
    return float((best == digits.held_out_digits).double().mean())


class Completions(NamedTuple):
    """Lower halves of held-out images, given the upper ones.

    Attributes:
        truth: the images, (count, 64).
        guesses: by name, means of the lower half's spins, (count, 32).
        rows: for every name the share of pixels whose sign is right; the images' mean comes first.
        shown: the first image of every digit among them.
    """

    truth: Tensor
    guesses: dict[str, Tensor]
    rows: list[dict[str, Any]]
    shown: Tensor


def complete(
    digits: Digits, entries: list[Entry], *, seed: int, quick: bool, progress: Callable[[int, int], None] | None = None
) -> Completions:
    """Clamp the upper half of images, and complete the lower half by every method and by the heat bath.

    With clamped upper spins the lower ones are a system of their own, to whose field the upper ones add.
    """
    each = QUICK_COMPLETED if quick else COMPLETED
    rows = [torch.nonzero(digits.held_out_digits == c)[:each, 0] for c in range(CLASSES)]
    truth, which = digits.held_out[torch.cat(rows)], digits.held_out_digits[torch.cat(rows)]
    couplings, field = digits.system.couplings[which], digits.system.field[which]
    guesses = {DATA: digits.means[which][:, HALF:]}
    clamped = torch.arange(2 * HALF) < HALF
    chains, burn_in, sweeps = QUICK_SAMPLING if quick else SAMPLING
    length: dict[str, Any] = {"chains": chains, "burn_in": burn_in, "sweeps": sweeps}
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(chains, *truth.shape, 1, generator=generator, dtype=torch.float64)
    # The lower half starts from random signs.
    start = torch.where(clamped[:, None], truth[..., None], (noise - 0.5).sign().to(truth.dtype))
    system = SpinSystem(couplings, field, radius=1.0)
    samples = heat_bath(system, **length, generator=generator, start=start, clamp=clamped, progress=progress)
    guesses[SAMPLER] = samples.magnetization[:, HALF:, 0]
    added = couplings[:, HALF:, :HALF] @ truth[:, :HALF, None]
    lower = SpinSystem(couplings[:, HALF:, HALF:], field[:, HALF:] + added, radius=1.0)
    for entry in applicable(entries, lower)[0]:
        row, m, _ = evaluate(entry, lower)
        if m is not None:
            guesses[entry.name] = m[..., 0].masked_fill(torch.tensor(row["failed"])[:, None], torch.nan)
    # Where there is no answer, no pixel is right.
    right = {name: float((guess.sign() == truth[:, HALF:]).double().mean()) for name, guess in guesses.items()}
    failed = {name: int(guess.isnan().any(-1).sum()) for name, guess in guesses.items()}
    table = [{"method": name, "right": right[name], "failed": failed[name]} for name in guesses]
    lengths = torch.tensor([len(r) for r in rows])
    return Completions(truth, guesses, table, shown=lengths.cumsum(0) - lengths)
