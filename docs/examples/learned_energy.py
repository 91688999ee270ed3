"""Predict by minimising an energy that was learned, by steps that are unrolled and by implicit gradients.

python docs/examples/learned_energy.py

Two tasks: take noise off scikit-learn's digits, and say for every bit of a string whether the ones up to it are odd.
Each energy E(z, x) is a small network of the answer z and the input x. `--write` makes three full runs, and writes
`learned_energy.json` beside this file, and the tables and the picture of `docs/learned_energy.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _learned_energy import (
    BOTH,
    FAR,
    LENGTHS,
    QUICK,
    RATE,
    Denoiser,
    Images,
    Plan,
    answer,
    denoise,
    fit,
    images,
    noisy,
    parity,
)
from sklearn.datasets import load_sample_image
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "learned_energy.json", HERE.parent / "learned_energy.md"
PICTURE = HERE.parent / "learned_energy" / "digits.png"


def shuffled(x: Tensor, seed: int) -> Tensor:
    """The 16 patches of 2 x 2 pixels of every image in another order, one for each image."""
    generator = torch.Generator().manual_seed(seed)
    patches = x.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
    order = torch.rand(patches.shape[:2], generator=generator).argsort(-1)
    patches = patches.gather(1, order[..., None].expand_as(patches))
    return patches.reshape(-1, 4, 4, 2, 2).transpose(2, 3).reshape(-1, 64)


def strangers(test: Tensor, seed: int) -> dict[str, Tensor]:
    """As many images that are no digits: shuffled patches, shuffled pixels, and pieces of a photograph."""
    generator = torch.Generator().manual_seed(seed)
    pixels = test.gather(1, torch.rand(test.shape, generator=generator).argsort(-1))
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).float().mean(-1) / 255
    pieces = photo.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 64)
    drawn = torch.randperm(len(pieces), generator=generator)[: len(test)]
    return {"shuffled patches": shuffled(test, seed), "shuffled pixels": pixels, "photograph": pieces[drawn]}


@torch.no_grad()
def scores(energy: Denoiser, network: nn.Module, classifier: nn.Module, data: Images, x: Tensor) -> dict[str, Tensor]:
    """How strange every x is, by `score: setting`."""
    z = answer(energy, x, x).value
    logits = classifier(x)
    centred, spread = x - data.train.mean(0), torch.cov(data.train.T) + 0.01 * torch.eye(64)
    return {
        "energy: E at the answer": energy(z, x),
        "energy: its learned part at the answer": energy.prior(z),
        "energy: its learned part at the input": energy.prior(x),
        "reconstruction error: of the energy's answer": (z - x).square().sum(-1),
        "reconstruction error: of the feed-forward network": (network(x) - x).square().sum(-1),
        "softmax confidence: largest probability": -logits.softmax(-1).amax(-1),
        "softmax confidence: log-sum-exp of the logits": -logits.logsumexp(-1),
        "Gaussian of the training images: -log p": (centred * torch.linalg.solve(spread, centred.mT).mT).sum(-1),
        "nearest training image: distance": torch.cdist(x, data.train).amin(-1),
    }


def area(familiar: Tensor, strange: Tensor) -> float:
    truth = [0] * len(familiar) + [1] * len(strange)
    return round(float(roc_auc_score(truth, torch.cat([familiar, strange]).numpy())), 4)


def familiarity(
    plan: Plan, seed: int, data: Images, energy: Denoiser, network: nn.Module
) -> tuple[list[dict[str, Any]], float]:
    """Areas under the curve of every score, in the setting that is best on other images; and the classifier's accuracy.

    Settings: those of `scores`, each with and without noise on the image.
    """
    torch.manual_seed(seed)
    classifier = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))

    def loss() -> Tensor:
        drawn = torch.randint(len(data.train), (64,))
        return F.cross_entropy(classifier(data.train[drawn]), data.labels[drawn])

    fit(classifier, loss, plan.times * plan.digits, RATE)
    found: dict[str, dict[str, Any]] = {}
    for noise in (False, True):

        def of(x: Tensor, number: int, noise: bool = noise) -> dict[str, Tensor]:
            return scores(energy, network, classifier, data, noisy(x, number) if noise else x)

        known = of(data.chosen, seed)
        strange = of(shuffled(data.chosen, seed + 100), seed + 101)
        test = of(data.test, seed + 102)
        others = {kind: of(x, seed + 103) for kind, x in strangers(data.test, seed + 104).items()}
        for name in known:
            score, setting = name.split(": ")
            chosen = area(known[name], strange[name])
            if score not in found or chosen > found[score]["chosen"]:
                areas = {kind: area(test[name], values[name]) for kind, values in others.items()}
                told = setting + (", noise added" if noise else "")
                found[score] = {"score": score, "setting": told, "chosen": chosen, "areas": areas}
    return list(found.values())


def run(plan: Plan, seed: int) -> tuple[dict[str, Any], Denoiser, Images]:
    torch.set_num_threads(1)  # the seconds are those of one core
    begin, data = time.process_time(), images(seed)
    digits, energy, network = denoise(plan, seed, data)
    found = {"seed": seed, "digits": digits, "familiar": familiarity(plan, seed, data, energy, network)}
    found |= {"parity": parity(plan, seed), "seconds": round(time.process_time() - begin, 1)}
    return found, energy, data


def mean_and_error(values: Sequence[float], places: int = 1) -> str:
    """The mean over seeds and two standard errors of it."""
    text = f"{statistics.mean(values):.{places}f}"
    if len(values) < 2:
        return text
    return f"{text}±{2 * statistics.stdev(values) / math.sqrt(len(values)):.{places}f}"


def of_seeds(runs: Sequence[dict[str, Any]], part: str, index: int) -> list[dict[str, Any]]:
    return [each[part][index] for each in runs]


def markdown(lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    runs = results["runs"]
    noise = [each["digits"][0]["error"] for each in runs]

    def share(rows: list[dict[str, Any]], name: str) -> str:
        if name not in rows[0]:
            return "-"
        known = [100 * row[name] / base for row, base in zip(rows, noise, strict=True) if row[name] is not None]
        lost = f"diverges ({len(rows) - len(known)} of {len(rows)})"
        return ", ".join(([mean_and_error(known)] if known else []) + ([lost] if len(known) < len(rows) else []))

    def mean(rows: list[dict[str, Any]], name: str, scale: float = 1, places: int = 0) -> str:
        values = [row[name] for row in rows if row.get(name) is not None]
        return f"{scale * statistics.mean(values):.{places}f}" if values else "-"

    digits = [["model", "error", f"{FAR} steps", "bytes", "training, s"]]
    for index in range(len(runs[0]["digits"])):
        rows = of_seeds(runs, "digits", index)
        errors = [share(rows, name) for name in ("error", "far")]
        digits.append([rows[0]["model"], *errors, *(mean(rows, name) for name in ("bytes", "seconds"))])
    bits = [["model", "answer", *(f"{n} bits" for n in LENGTHS), "converged"]]
    for index in range(len(runs[0]["parity"])):
        rows = of_seeds(runs, "parity", index)
        for name in ("as trained", "solved", "by Anderson"):
            # Of the seeds whose training came to its end; all of them, as they differ.
            known = [row for row in rows if name in row and (name, row["model"]) != ("by Anderson", BOTH)]
            cells = [", ".join(f"{100 * row[name]['strings'][i]:.0f}" for row in known) for i in range(len(LENGTHS))]
            ended = [
                f"{100 * statistics.mean(s['converged'] for s in row['settled']):.0f}"
                for row in known
                if name == "solved"
            ]
            if known:
                bits.append([rows[0]["model"], name, *cells, ", ".join(ended) or "-"])
        if stops := [row["stopped"] for row in rows if row.get("stopped") is not None]:
            told = f"{len(stops)} of {len(rows)} stopped, at update {', '.join(map(str, stops))}"
            bits.append([rows[0]["model"], told, *["-"] * (len(LENGTHS) + 1)])
    kinds = [kind for kind in runs[0]["familiar"][0]["areas"] if kind != "shuffled pixels"]
    areas = [["score", *kinds]]
    for index in range(len(runs[0]["familiar"])):
        rows = of_seeds(runs, "familiar", index)
        assert len({row["score"] for row in rows}) == 1
        cells = [mean_and_error([row["areas"][kind] for row in rows], 3) for kind in kinds]
        areas.append([rows[0]["score"], *cells])
    return {"digits": markdown(digits), "parity": markdown(bits), "familiar": markdown(areas)}


def updated(page: str, results: dict[str, Any]) -> str:
    for name, table in tables(results).items():
        start = f"<!-- {name} of learned_energy: python docs/examples/learned_energy.py --write -->\n"
        end = f"<!-- end of {name} of learned_energy -->"
        before, rest = page.split(start)
        page = f"{before}{start}\n{table}\n\n{end}{rest.split(end)[1]}"
    return page


@torch.no_grad()
def picture(energy: Denoiser, data: Images, path: Path) -> None:
    """Images above their answers and energies: digits with noise, shuffled patches, and pieces of a photograph."""
    from matplotlib.figure import Figure

    others = strangers(data.test, 104)
    groups = {"digits": data.test[:4]} | {name: others[name][:4] for name in ("shuffled patches", "photograph")}
    figure = Figure(figsize=(11, 3.1), layout="constrained")
    for part, (name, clean) in zip(figure.subfigures(1, len(groups)), groups.items(), strict=True):
        x = noisy(clean, 1)
        z = answer(energy, x, x).value
        part.suptitle(f"{name}: with noise, answer, E", fontsize=10)
        for column, axes in enumerate(part.subplots(2, len(x)).T):
            for each, image in zip(axes, (x, z), strict=True):
                each.imshow(-image[column].reshape(8, 8).numpy(), cmap="gray", vmin=-1, vmax=0)
                each.set_xticks([]), each.set_yticks([])
            axes[1].set_xlabel(f"{float(energy(z, x)[column]):.2f}", fontsize=10)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: hardly any training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of all models each (default 0)")
    parser.add_argument("--write", action="store_true", help="three full runs, the tables of the page and the picture")
    parser.add_argument("--picture", type=Path, help="where to draw digits, answers and energies of the first seed")
    parser.add_argument("--check", action="store_true", help="only compare the tables of the page with the results")
    given = parser.parse_args(argv)
    if given.check:
        page, results = PAGE.read_text(), json.loads(RESULTS.read_text())
        if updated(page, results) != page:
            sys.exit(f"the tables of {PAGE.name} are not those of {RESULTS.name}: run with --write")
        return results
    plan = QUICK if given.quick and not given.write else Plan()
    seeds = [0, 1, 2] if given.write else given.seeds
    if len(seeds) > 1:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(run, [plan] * len(seeds), seeds))
    else:
        found = [run(plan, seeds[0])]
    _, energy, data = found[0]
    results = {"plan": plan._asdict(), "sha256": data.sha256, "runs": [each for each, *_ in found]}
    for table in tables(results).values():
        print(table, "\n")
    if where := PICTURE if given.write else given.picture:
        picture(energy, data, where)
    if given.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(updated(PAGE.read_text(), results))
    return results


if __name__ == "__main__":
    main()
