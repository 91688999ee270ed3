"""The picture of docs/energy_transformer.md: `python docs/energy_transformer/energies.py` (some minutes) writes
energies.json and energies.png beside this file; `--figure` draws the picture from energies.json alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attention import Anderson, Unrolled, solve
from implicit_attention.energies import LegendreEnergy, PublishedDynamics
from implicit_attention.plotting import descent_figure
from implicit_attention.potentials import LayerNormPotential, Polynomial, Potential, TokenAttention, TokenMemory
from implicit_attention.solvers import GradientDescent

HERE = Path(__file__).resolve().parent
TOKENS, HEADS, DIM, WIDTH, MEMORIES = 100, 12, 128, 42, 512
STEPS, STEP_SIZE, RTOL = 3000, 0.5, 1e-8
#: Steps that the file keeps: the first ones, and then so many to a factor of 10.
PER_DECADE = 40


def potentials() -> tuple[dict[str, Potential], Tensor]:
    """Attention and memory, alone and together, with the random weights of the tutorial, and normalised tokens."""
    generator = torch.Generator().manual_seed(11)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    w_query, w_key = drawn(HEADS, WIDTH, DIM) / WIDTH, drawn(HEADS, WIDTH, DIM) / WIDTH
    attention = TokenAttention(w_query, w_key, WIDTH**-0.5)
    memory = TokenMemory(Polynomial(drawn(MEMORIES, DIM), 1.0))
    tokens = LayerNormPotential().mean(drawn(TOKENS, DIM))
    return {"attention": attention, "memory": memory, "attention + memory": attention + memory}, tokens


def kept(steps: int) -> list[int]:
    """Which of the steps 0 to `steps` are kept."""
    return sorted({0, steps} | {round(10 ** (i / PER_DECADE)) for i in range(200) if 10 ** (i / PER_DECADE) < steps})


@torch.no_grad()
def course(potential: Potential, tokens: Tensor, steps: int) -> dict[str, Any]:
    """Both ways down from the same tokens, which are the field of the equilibrium too; energies are per token."""
    norm, number = LayerNormPotential(), len(tokens)
    published = PublishedDynamics(norm, potential)
    descent = GradientDescent(STEP_SIZE, max_steps=steps, rtol=0, atol=0)
    trace = solve(published, tokens, solver=descent, adjoint=Unrolled(), trace=True).trace
    at = kept(steps)
    x = trace.value[at]
    after = x + STEP_SIZE * potential.mean(norm.mean(x))
    problem = LegendreEnergy(norm, potential, tokens)
    solution = solve(problem, tokens, solver=Anderson(rtol=RTOL, max_steps=5000), trace=True)
    solved = solution.trace
    return {
        "published": {
            "step": at,
            "energy": rounded(trace.energy[at] / number),
            "largest rise": rounded(trace.energy.diff().max() / number),
            "size of x": rounded(size(x)),
            "step of x": rounded(size(after - x)),
            "step of g": rounded(size(norm.mean(after) - norm.mean(x))),
        },
        "equilibrium": {
            "evaluations": solved.num_evals.tolist(),
            "energy": rounded(solved.energy / number),
            "published energy": rounded(published.energy(solved.value) / number),
            "relative residual": rounded(solution.residual / torch.linalg.vector_norm(solution.value)),
            "size of x": rounded(size(solution.value)),
        },
    }


def size(x: Tensor) -> Tensor:
    """Root mean square over tokens and entries."""
    return x.square().mean((-1, -2)).sqrt()


def rounded(x: Tensor) -> Any:
    """To 12 digits: the last ones of a float64 differ between machines."""
    return [float(f"{entry:.12g}") for entry in x.tolist()] if x.ndim else float(f"{x.item():.12g}")


def figure(found: dict[str, Any]) -> Any:
    def columns(way: str, *names: str) -> dict[str, tuple[Tensor, ...]]:
        return {
            name: tuple(torch.tensor(ways[way][each], dtype=torch.float64) for each in names)
            for name, ways in found.items()
        }

    published = columns("published", "step", "energy")
    equilibrium = columns("equilibrium", "evaluations", "published energy", "energy")
    title = f"{TOKENS} tokens of {DIM} entries, {HEADS} heads, {MEMORIES} memories, random weights; energies per token"
    return descent_figure(published, equilibrium, title=title)


def main() -> None:
    path = HERE / "energies.json"
    if "--figure" not in sys.argv:
        torch.set_num_threads(1)
        parts, tokens = potentials()
        found = {name: course(potential, tokens, STEPS) for name, potential in parts.items()}
        path.write_text(json.dumps(found, allow_nan=False).replace("}, ", "},\n") + "\n")
    figure(json.loads(path.read_text())).savefig(HERE / "energies.png")


if __name__ == "__main__":
    main()
