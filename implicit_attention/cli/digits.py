"""The built-in case of `magnetize`: an Ising system for each of the ten digits, fitted to images of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..spins import SpinSystem
from ..spins.inverse import fit_ising
from ..spins.sampling import heat_bath
from .errors import require_modules
from .spin_methods import SAMPLER, Entry, applicable, evaluate

SIDE, CLASSES = 8, 10
#: A pixel is +1 from here on; they go from 0 to 16.
THRESHOLD = 8
#: Of all images, how many are used for the fit.
TRAINED = 2 / 3
#: Pseudocount per image. Less, and pairs are coupled too strongly for TAP's equation.
PSEUDOCOUNT = 1 / 4
FIT: Literal["tap"] = "tap"
#: Images per digit whose lower half is completed.
COMPLETED, QUICK_COMPLETED = 20, 2
#: Of the heat bath: chains, sweeps that do not count, sweeps that do.
SAMPLING, QUICK_SAMPLING = (10, 50, 150), (10, 20, 40)
DATA = "mean of the images"


class Digits(NamedTuple):
    """Images of -1 and 1, (count, 64), with their digits, apart for the fit and for what it is tried on; the fit."""

    images: Tensor
    digits: Tensor
    held_out: Tensor
    held_out_digits: Tensor
    system: SpinSystem

    @property
    def means(self) -> Tensor:
        """The mean image of every digit, (10, 64)."""
        return torch.stack([self.images[self.digits == c].mean(0) for c in range(CLASSES)])


def load(*, seed: int, dtype: torch.dtype) -> Digits:
    """scikit-learn's digits, binarised, and a system of 64 spins for each of the ten."""
    require_modules("sklearn")
    from sklearn import datasets

    raw = datasets.load_digits()
    images = torch.where(torch.from_numpy(raw.data) >= THRESHOLD, 1.0, -1.0).to(dtype)
    digits = torch.from_numpy(raw.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    count = round(TRAINED * len(images))
    used, rest = order[:count], order[count:]
    fits = []
    for c in range(CLASSES):
        mine = images[used][digits[used] == c]
        fits.append(fit_ising(mine, method=FIT, pseudocount=PSEUDOCOUNT * len(mine)))
    system = SpinSystem(
        torch.stack([fit.couplings for fit in fits]),
        torch.stack([fit.field for fit in fits]),
        radius=1.0,
        measure="counting",
    )
    return Digits(images[used], digits[used], images[rest], digits[rest], system)


def energies(system: SpinSystem, images: Tensor) -> Tensor:
    """E of every image in every system, (count, 10)."""
    pairs = torch.einsum("ni,cij,nj->nc", images, system.couplings, images) / 2
    return -pairs - images @ system.field[..., 0].mT


def named(digits: Digits, log_partition: Tensor) -> float:
    """The share of held-out images that have the largest log p = -E - log Z in the system of their own digit."""
    log_p = -energies(digits.system, digits.held_out) - log_partition
    # NaN is never the largest.
    best = log_p.nan_to_num(-torch.inf).argmax(-1)
    return float((best == digits.held_out_digits).double().mean())


class Completions(NamedTuple):
    """Lower halves of held-out images, given the upper ones.

    truth: the images, (count, 64). guesses: by name, means of the lower half's spins, (count, 32). rows: for every name
    the share of pixels whose sign is right. shown: the first image of every digit among them.
    """

    truth: Tensor
    guesses: dict[str, Tensor]
    rows: list[dict[str, Any]]
    shown: Tensor


def complete(
    digits: Digits, entries: list[Entry], *, seed: int, quick: bool, progress: Callable[[int, int], None] | None = None
) -> Completions:
    """Hold the upper half of images, and ask every method, and the heat bath, for the lower half.

    With the upper spins held the lower ones are a system of their own, whose field has what the upper ones add to it.
    """
    each = QUICK_COMPLETED if quick else COMPLETED
    rows = [torch.nonzero(digits.held_out_digits == c)[:each, 0] for c in range(CLASSES)]
    truth, which = digits.held_out[torch.cat(rows)], digits.held_out_digits[torch.cat(rows)]
    shown = torch.tensor([sum(len(r) for r in rows[:c]) for c in range(CLASSES)])
    half = SIDE * SIDE // 2
    couplings, field = digits.system.couplings[which], digits.system.field[which]
    guesses = {DATA: digits.means[which][:, half:]}
    held = torch.arange(2 * half) < half
    chains, burn_in, sweeps = QUICK_SAMPLING if quick else SAMPLING
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(chains, *truth.shape, 1, generator=generator, dtype=torch.float64)
    # The lower half starts from nothing that is to be found.
    start = torch.where(held[:, None], truth[..., None], (noise - 0.5).sign().to(truth.dtype))
    samples = heat_bath(
        SpinSystem(couplings, field, radius=1.0),
        chains=chains,
        burn_in=burn_in,
        sweeps=sweeps,
        generator=generator,
        start=start,
        clamp=held,
        progress=progress,
    )
    guesses[SAMPLER] = samples.magnetization[:, half:, 0]
    lower = SpinSystem(
        couplings[:, half:, half:],
        field[:, half:] + couplings[:, half:, :half] @ truth[:, :half, None],
        radius=1.0,
    )
    for entry in applicable(entries, lower)[0]:
        row, m = evaluate(entry, lower, max_seconds=0.0)
        if m is not None:
            guesses[entry.name] = m[..., 0].masked_fill(torch.tensor(row["failed"])[:, None], torch.nan)
    table: list[dict[str, Any]] = [
        # Where there is no answer, no pixel is right.
        {
            "method": name,
            "right": float((guess.sign() == truth[:, half:]).double().mean()),
            "failed": int(guess.isnan().any(-1).sum()),
        }
        for name, guess in guesses.items()
    ]
    return Completions(truth, guesses, table, shown)
