"""The two files of docs/magnetize.md: `python docs/magnetize/systems.py [FOLDER]` writes ising.npz and vortex.npz."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SIDE = 6


def ising() -> dict[str, np.ndarray]:
    """Twelve Ising spins with random couplings between all of them, in random fields."""
    random = np.random.default_rng(3)
    couplings = np.triu(random.normal(size=(12, 12)), 1) / np.sqrt(12)
    return {"J": couplings + couplings.T, "h": 0.3 * random.normal(size=12), "beta": np.array(1.0)}


def vortex() -> dict[str, np.ndarray]:
    """A square of plane spins, neighbours alike, with a field at its border only, which runs around it."""
    y, x = np.divmod(np.arange(SIDE * SIDE), SIDE)
    neighbours = np.abs(x[:, None] - x) + np.abs(y[:, None] - y) == 1
    middle = (SIDE - 1) / 2
    around = np.stack([y - middle, x - middle], -1)
    border = (x % (SIDE - 1) == 0) | (y % (SIDE - 1) == 0)
    around /= np.linalg.norm(around, axis=-1, keepdims=True)
    return {"J": 0.5 * neighbours, "h": np.where(border[:, None], around, 0.0), "beta": np.array(1.5)}


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    np.savez(folder / "ising.npz", **ising())
    np.savez(folder / "vortex.npz", **vortex())
