"""The picture of docs/spin_layers.md: `python docs/spin_layers/driven.py` writes driven.png beside this file."""

from __future__ import annotations

from pathlib import Path

import torch

from implicit_attention.plotting import driven_figure
from implicit_attention.spins import DrivenPath, KineticPlefka, drive


def path(steps: int = 48) -> DrivenPath:
    """Six plane spins with causal softmax couplings; their fields turn for a while, then stay, then become weak."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(6, 2, dtype=torch.float64, generator=generator)
    scores = (tokens @ tokens.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    time = torch.arange(steps, dtype=torch.float64)
    angle = 0.35 * time.clamp(max=16)
    strength = torch.where(time < 32, 0.6, 0.1)[:, None, None]
    turns = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).reshape(steps, 2, 2)
    return drive(KineticPlefka(), torch.softmax(scores, -1), strength * (tokens @ turns.mT), beta=0.8)


if __name__ == "__main__":
    title = "Six plane spins, causal softmax couplings: fields turn until step 17, stay, and are weak from step 33"
    driven_figure(path(), title=title).savefig(Path(__file__).parent / "driven.png")
