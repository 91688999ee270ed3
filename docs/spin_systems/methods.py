"""Which spin method supports what: `python docs/spin_systems/methods.py` tries all of them, and rewrites the table of
spin_systems.md and the list of reference/spin_methods.md; `--check` says whether it would."""

import sys
from pathlib import Path

import torch

from implicit_attention.spins import Bonds, SpinSystem, magnetization
from implicit_attention.spins.dynamics import DynamicalMethod
from implicit_attention.spins.methods import METHODS
from implicit_attention.spins.system import ALL_PAIRS

DOCS = Path(__file__).parents[1]
FEATURES = ("D = 1", "D > 1", "asymmetric J", "matrices J_ij", "bonds", "a diagonal", "masks")
N = 3
LEGEND = f"""N <= {ALL_PAIRS:,}: bonds become a matrix, which `AdaTAP` inverts and `SaddlePoint` factorises; others read
all pairs."""
START, END = "<!-- methods: python docs/spin_systems/methods.py -->", "<!-- end of methods -->"


def system(feature, *, chain=False, vectors=True):
    """A system with one feature; a chain in collinear fields for methods that need one."""

    def random(*shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    dim = 3 if vectors and feature in ("D > 1", "matrices J_ij") else 1
    field = 0.5 * random(N, 1, seed=1) * torch.ones(dim)
    upper = 0.3 * random(N, N, seed=2)
    upper = torch.diag(upper.diagonal(1), 1) if chain else upper.triu(1)
    couplings = upper + upper.mT
    mask = None
    if feature == "asymmetric J":
        couplings = upper - 0.5 * upper.mT
    if feature == "matrices J_ij":
        turn = torch.eye(dim) + 0.2 * random(dim, dim, seed=3) * (1 - torch.eye(dim))
        turned = upper[..., None, None] * turn
        couplings = turned + turned.permute(1, 0, 3, 2)
    if feature == "a diagonal":
        couplings = couplings + torch.diag(torch.tensor([0.2, -0.3, 0.4]).double())
    if feature == "masks":
        mask = torch.tensor([True, True, False])
    return SpinSystem(Bonds.of(couplings) if feature == "bonds" else couplings, field, 0.8, mask=mask)


def systems(method, feature):
    """The systems of a feature, of which a method that supports it answers one."""
    vectors = feature == "D > 1" or answers(method, "D > 1")
    return [system(feature, chain=chain, vectors=vectors) for chain in (False, True)]


def answers(method, feature):
    """Whether the method supports the feature."""
    for one in systems(method, feature):
        try:
            return bool(magnetization(one, method).isfinite().all())
        except (TypeError, ValueError):
            continue
    return False


def chain(sites):
    """A chain of Ising spins on bonds."""
    first = torch.arange(sites - 1)
    return SpinSystem(Bonds(torch.stack([first, first + 1], -1), 0.1 * torch.ones(sites - 1), sites), torch.ones(sites))


def on_bonds(method):
    """The largest number of sites that a method takes bonds of; "yes" for any."""
    for sites, text in ((ALL_PAIRS + 1, "yes"), (ALL_PAIRS, f"N <= {ALL_PAIRS:,}"), (20, "N <= 20"), (2, "N <= 2")):
        try:
            method.check(chain(sites))
            return text
        except ValueError:
            continue
    return "no"


def table():
    """One line per method, and a sentence about the features that all of them support."""
    stated = [row for row in METHODS if row.error is not None]
    found = {name: [answers(row.method, name) for row in stated] for name in FEATURES}
    told = {name: ["yes" if yes else "no" for yes in column] for name, column in found.items() if not all(column)}
    told = {"log Z": ["no" if issubclass(row.kind, DynamicalMethod) else "yes" for row in stated], **told}
    told["bonds"] = [on_bonds(row.method) if yes else "no" for row, yes in zip(stated, found["bonds"], strict=True)]
    lines = [f"| method | {' | '.join(told)} | error of log Z |", "|---" * (len(told) + 2) + "|"]
    for row, *cells in zip(stated, *told.values(), strict=True):
        lines.append(f"| `{row.text}` | {' | '.join(cells)} | {row.error} |")
    *first, last = (name for name in FEATURES if name not in told)
    support = f"All methods support {', '.join(first)} and {last}."
    return "\n".join([*lines, "", support, "", LEGEND])


def classes():
    """The directives of the methods with a log Z; those of dynamics have a page of their own."""
    kinds = dict.fromkeys(row.kind for row in METHODS if not issubclass(row.kind, DynamicalMethod))
    return "\n".join(f"::: implicit_attention.spins.{kind.__name__}" for kind in kinds)


def main():
    stale = False
    for page, text in ((DOCS / "spin_systems.md", table()), (DOCS / "reference" / "spin_methods.md", classes())):
        old = page.read_text()
        before, rest = old.split(START)
        new = f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}"
        stale |= new != old
        if "--check" not in sys.argv:
            page.write_text(new)
    sys.exit(int(stale and "--check" in sys.argv))


if __name__ == "__main__":
    main()
