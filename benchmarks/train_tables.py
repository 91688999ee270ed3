"""The tables of a run of the suite `train`."""

from __future__ import annotations

from typing import Any

from .attention_tables import evaluations, problem
from .block_forward import RATIOS as RATIOS_OF_FORWARD
from .block_memory import REVERSIBLE_TIME
from .decoding import BYTES
from .decoding import RATIOS as RATIOS_OF_DECODING
from .llama import RATIOS
from .report import Table, number, spread
from .targets import Row

TITLES = {"STEP": "training steps", "LENGTH": "training steps against sequence length"}


def tables(run: dict[str, Any]) -> list[Table]:
    """One table for every metric that was measured."""
    made = []
    for metric, title in TITLES.items():
        rows = [row for row in run["rows"] if row["metric"] == metric]
        if rows:
            made.append(_steps(metric, title, rows))
    per_metric = {
        "BLOCK": _blocks,
        "EQUILIBRIUM": _equilibria,
        "FORWARD": _forwards,
        "COMPILED": _compiled,
        "MEMORY": _memory,
        "DECODING": _decoding,
    }
    for metric, table in per_metric.items():
        rows = [row for row in run["rows"] if row["metric"] == metric]
        if rows:
            made.append(table(rows))
    return made + _llamas([row for row in run["rows"] if row["metric"] == "LLAMA"])


def _steps(metric: str, title: str, rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    solvers = [name for name in rows[0]["evidence"] if name != "sdpa_training"]
    header = [
        "keys, beta*sqrt(D), anchor",
        "N = M",
        "our evals mean/max",
        "max residual",
        "converged %",
        *columns,
        *(f"gradient error, {_short(name)}" for name in solvers),
        "spread",
    ]
    lines = [
        [
            problem(row),
            str(row["shape"]["length"]),
            *evaluations(row["evidence"]["ours_training"]),
            *(number(row["ratios"].get(name)) for name in columns),
            *(_error(row["evidence"].get(name, {})) for name in solvers),
            spread(row["seconds"]),
        ]
        for row in rows
    ]
    shape = rows[0]["shape"]
    sizes = f"B {shape['batch']}, H {shape['heads']}, D {shape['dim']}"
    return Table(title, f"{metric}: {title}, all to the same residual, {sizes}:", header, lines)


def _blocks(rows: list[Row]) -> Table:
    header = ["block", "evaluations mean/max", "equilibrium / one step", "spread"]
    lines = []
    for row in rows:
        found = row["evidence"]["equilibrium"]
        sizes = f"B {row['batch']}, N {row['length']}, width {row['dim']}, {row['heads']} heads"
        lines.append([sizes, evaluations(found)[0], number(row["ratios"]["block"]), spread(row["seconds"])])
    return Table("transformer block", "BLOCK: training step of a transformer block:", header, lines)


def _llamas(rows: list[Row]) -> list[Table]:
    header = ["tokens", "evaluations mean/max", "converged %", *RATIOS]
    lines, made = [], []
    for row in rows:
        if row["memory"]:
            made.append(_llama_memory(row))
            continue
        found = row["evidence"]["equilibrium"]
        ratios = map(row["ratios"].get, RATIOS)
        counts, _, converged = evaluations(found)
        lines.append([str(row["tokens"]), counts, converged, *map(number, ratios), spread(row["seconds"])])
    names = [row["name"] for row in rows if not row["memory"]]
    table = [Table("Llama", f"{names[0]}, beside torch's attention:", [*header, "spread"], lines)] if names else []
    return table + made


def _llama_memory(row: Row) -> Table:
    names = list(dict.fromkeys(name.split(",")[0] for name in row["evidence"]))
    lines = []
    for name in names:
        for kind in ("forward", "peak"):
            found = (row["evidence"][f"{name}, {tokens} tokens"] for tokens in row["memory"])
            cells = [f"{f[f'{kind}_bytes'] / 2**20:.0f}" if "peak_bytes" in f else "-" for f in found]
            lines.append([f"{name}, {'training' if kind == 'peak' else kind}", *cells])
    header = ["peak, MiB", *(f"{tokens} tokens" for tokens in row["memory"])]
    return Table("memory of a Llama", f"{row['name'].removeprefix('LLAMA: ')}, by tokens:", header, lines)


def _equilibria(rows: list[Row]) -> Table:
    header = ["block", "", "evaluations", "products", "residual, state", "adjoint", "ms", "peak MiB", "ours / it"]
    lines = []
    for row in rows:
        ratio = number(row["ratios"].get("ours / torchdeq"))
        lines.append([sizes_of_block(row), "our faster / torchdeq's faster", *["-"] * 6, ratio])
        for name in dict.fromkeys((*row["evidence"], *row["seconds"])):
            found, timing = row["evidence"].get(name, {}), row["seconds"].get(name)
            lines.append(
                [
                    sizes_of_block(row),
                    name,
                    *(str(found.get(what, "-")) for what in ("evaluations", "products")),
                    *(f"{found[r]:.1e}" if r in found else "-" for r in ("state_residual", "adjoint_residual")),
                    f"{1e3 * timing['median']:.1f}" if timing else "-",
                    _mebibytes(found),
                    number(row["ratios"].get(f"ours / {name}")),
                ]
            )
    return Table("blocks as fixed points", "EQUILIBRIUM: training steps of a block as a fixed point:", header, lines)


def _decoding(rows: list[Row]) -> Table:
    names = (*RATIOS_OF_DECODING, BYTES)
    header = ["token", "evaluations", *names, "spread"]
    lines = [
        [
            row["name"].removeprefix("DECODING: decoding a token, "),
            str(row["evaluations"]),
            *(number(row["ratios"].get(name)) for name in names),
            spread(row["seconds"]),
        ]
        for row in rows
    ]
    title = (
        "DECODING: a token of a causal block over as many plain one-token steps; bytes of caches, 16 evaluations / 1:"
    )
    return Table("decoding", title, header, lines)


def _forwards(rows: list[Row]) -> Table:
    header = ["block", "evaluations, picard", "anderson", *RATIOS_OF_FORWARD, "spread"]
    lines = [
        [
            sizes_of_block(row),
            *(str(row["evidence"].get(name, {}).get("evaluations", "-")) for name in ("picard", "anderson")),
            *(number(row["ratios"].get(name)) for name in RATIOS_OF_FORWARD),
            spread(row["seconds"]),
        ]
        for row in rows
    ]
    title = "FORWARD: the forward pass of a block as a fixed point over a bare loop of as many evaluations:"
    return Table("forwards of blocks", title, header, lines)


def sizes_of_block(row: Row) -> str:
    """Write the block of a row and its sizes."""
    return str(row["name"].removeprefix(f"{row['metric']}: ").removeprefix("forward of a ")).replace(
        " as a fixed point", ""
    )


def _compiled(rows: list[Row]) -> Table:
    header = ["block", "", "evaluations", "residual", "forward, ms", "/ eager", "step, ms", "/ eager"]
    lines = []
    for row in rows:
        for name, found in row["evidence"].items():
            line = [row["name"], name, str(found.get("evaluations", "-"))]
            line.append(f"{found['residual']:.1e}" if "residual" in found else "-")
            for way in ("forward", "step"):
                timing = row["seconds"].get(f"{name} {way}")
                line.append(f"{1e3 * timing['median']:.1f}" if timing else "-")
                line.append(number(row["ratios"].get(f"{name} {way} / eager")))
            lines.append(line)
    return Table("compiled blocks", "COMPILED: a block as a fixed point, compiled and eager:", header, lines)


def _memory(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["evidence"]))
    lines = [
        [
            row["name"],
            *(_mebibytes(row["evidence"].get(name, {})) for name in names),
            number(row["ratios"].get(REVERSIBLE_TIME)),
        ]
        for row in rows
    ]
    title = (
        "MEMORY: peak of a training step in MiB, by evaluations, and the time of 8 reversible steps over recorded ones:"
    )
    return Table("memory", title, ["block", *names, REVERSIBLE_TIME], lines)


def _mebibytes(found: dict[str, Any]) -> str:
    return f"{found['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in found else "-"


def _short(name: str) -> str:
    short = {
        "ours_training": "ours",
        "torchdeq_training_fixed_point_iter": "fpi",
        "torchdeq_training_anderson": "anderson",
    }
    return short.get(name, name)


def _error(found: dict[str, Any]) -> str:
    return f"{found['gradient_error']:.0e}" if "gradient_error" in found else "-"
