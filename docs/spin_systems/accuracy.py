"""How far each method is from the truth: `python docs/spin_systems/accuracy.py` measures and rewrites the tables of
spin_systems.md (some minutes); `--table` rewrites them from accuracy.json alone, `--check` says whether it would."""

import json
import sys
from pathlib import Path

import torch

from implicit_attention.spins import Enumeration, SpinSystem, thermodynamics
from implicit_attention.spins.methods import METHODS as TABLE
from implicit_attention.spins.sampling import heat_bath

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "accuracy.json", HERE.parent / "spin_systems.md"
BETAS = (0.25, 0.5, 1.0, 2.0)
METHODS = {row.text: row.method for row in TABLE if row.compared}
SAMPLES = 32
#: The methods and temperatures on the page, and a family that is not; accuracy.json has all.
COLUMNS = ("MeanField()", "TAP(order=3)", "AdaTAP()", "Bethe()", "SaddlePoint(one_loop=True)")
SHOWN = (0.5, 1.0)
LEFT_OUT = "Ising, open 3 x 3 lattice"
BETWEEN = "The method with the smallest error of F per spin, and that error, where states can be summed:"
START, END = "<!-- table: python docs/spin_systems/accuracy.py -->", "<!-- end of table -->"


def families():
    """name -> (couplings, field): 32 systems each, fields of size .5.

    Random couplings have the variance 1/N or 1/neighbours; those of lattices are 1 or -1 between neighbours.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def symmetric(x):
        return x.triu(1) + x.triu(1).mT

    def of(n, dim, couplings):
        return couplings, 0.5 * normal(SAMPLES, n, dim)

    def bonds(width, height, *, closed=False):
        """1 between neighbours of a lattice, open unless it is a closed ring."""
        near = torch.zeros(width * height, width * height, dtype=torch.float64)
        for site in range(width * height):
            if (site + 1) % width:
                near[site, site + 1] = 1
            if site + width < width * height:
                near[site, site + width] = 1
        if closed:
            near[0, width - 1] = 1
        return (near + near.mT).expand(SAMPLES, -1, -1)

    some = symmetric((torch.rand(SAMPLES, 14, 14, generator=generator, dtype=torch.float64) < 3 / 13).double())
    return {
        "Ising, all coupled, N = 14": of(14, 1, symmetric(normal(SAMPLES, 14, 14)) / 14**0.5),
        "Ising, 3 neighbours, N = 14": of(14, 1, some * symmetric(normal(SAMPLES, 14, 14)) / 3**0.5),
        "Ising, ferromagnet, N = 14": of(14, 1, symmetric(torch.ones(SAMPLES, 14, 14, dtype=torch.float64)) / 13),
        "Ising, open 3 x 3 lattice": of(9, 1, bonds(3, 3)),
        "Ising, open 4 x 4 lattice": of(16, 1, bonds(4, 4)),
        "Ising, antiferromagnet, open 3 x 3": of(9, 1, -bonds(3, 3)),
        "Ising, ring, N = 12": of(12, 1, bonds(12, 1, closed=True)),
        "Ising, antiferromagnet, ring, N = 11": of(11, 1, -bonds(11, 1, closed=True)),
        "D = 3, all coupled, N = 10": of(10, 3, symmetric(normal(SAMPLES, 10, 10)) / 10**0.5),
        "D = 16, all coupled, N = 10": of(10, 16, symmetric(normal(SAMPLES, 10, 10)) / 10**0.5),
    }


def measure():
    rows = []
    for name, (couplings, field) in families().items():
        n, dim = field.shape[-2:]
        for beta in BETAS:
            system = SpinSystem(couplings, field, beta)
            if dim == 1:
                exact = thermodynamics(system, Enumeration())
                truth, free, error = exact.magnetization, exact.free_energy, 0.0
            else:
                drawn = heat_bath(
                    system, chains=64, burn_in=300, sweeps=1500, generator=torch.Generator().manual_seed(1)
                )
                truth, free = drawn.magnetization, None
                error = float(drawn.magnetization_error.square().mean().sqrt()) / dim**0.5
            for text, method in METHODS.items():
                try:
                    found = thermodynamics(system, method, on_failure="ignore")
                except ValueError:
                    continue
                good = found.report.status == 0
                off = (found.magnetization - truth).square().sum(-1).mean(-1)[good] / dim
                row = {
                    "family": name,
                    "beta": beta,
                    "method": text,
                    "solved": float(good.double().mean()),
                    "magnetization": float(off.mean().sqrt()) if good.any() else None,
                    "truth_error": error,
                }
                if free is not None and good.any():
                    row["free_energy"] = float((found.free_energy - free)[good].abs().mean()) / n
                rows.append(row)
            print(name, beta, flush=True)
    RESULTS.write_text(json.dumps({"samples": SAMPLES, "rows": rows}, indent=1) + "\n")


def table(rows):
    """One line per family (named in its first line) and beta, one column per method."""
    lines = ["| systems | beta | " + " | ".join(f"`{m}`" for m in COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for family in dict.fromkeys(row["family"] for row in rows):
        for beta in SHOWN:
            found = {r["method"]: r for r in rows if (r["family"], r["beta"]) == (family, beta)}
            found = {method: found[method] for method in COLUMNS if method in found}
            best = min(r["magnetization"] for r in found.values() if solved(r))
            cells = [cell(found[method], best) if method in found else "-" for method in COLUMNS]
            lines.append(f"| {family if beta == SHOWN[0] else ''} | {beta:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def solved(row, key="magnetization"):
    """Whether a method is to be compared: nearly all systems have a solution, whose error is known."""
    return row.get(key) is not None and row["solved"] > 0.9


def cell(row, best):
    value, share = row["magnetization"], f"({100 * row['solved']:.0f} %)"
    if value is None or row["solved"] < 0.5:
        return share
    text = number(value)
    text = f"**{text}**" if value <= max(1.1 * best, row["truth_error"]) else text
    return text if row["solved"] == 1 else f"{text} {share}"


def number(value):
    return f"{value:.1g}" if value < 0.1 else f"{value:.2f}"


def winners(rows):
    """One line per family, one column per beta: the method whose F is nearest."""
    lines = ["| systems | " + " | ".join(f"beta {b:g}" for b in SHOWN) + " |", "|---" * (1 + len(SHOWN)) + "|"]
    known = [row for row in rows if solved(row, "free_energy")]
    for family in dict.fromkeys(row["family"] for row in known):
        cells = []
        for beta in SHOWN:
            same = [row for row in known if (row["family"], row["beta"]) == (family, beta)]
            best = min(same, key=lambda row: row["free_energy"])
            cells.append(f"`{best['method']}` {number(best['free_energy'])}")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    if "--table" not in sys.argv and "--check" not in sys.argv:
        measure()
    page = PAGE.read_text()
    before, rest = page.split(START)
    after = rest.split(END)[1]
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["family"] != LEFT_OUT]
    tables = f"{table(rows)}\n\n{BETWEEN}\n\n{winners(rows)}"
    new = f"{before}{START}\n\n{tables}\n\n{END}{after}"
    if "--check" in sys.argv:
        sys.exit(int(new != page))
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
