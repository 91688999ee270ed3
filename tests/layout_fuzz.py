"""Random calls of every public door with tensors in random layouts, each compared with a reference written out.

`python tests/layout_fuzz.py --calls 20000 --out FILE` makes many of them and writes what it found as JSON; a part of
them belongs to the suite (`test_layouts.py`).
"""

import argparse
import collections
import functools
import json
import multiprocessing
import time
import traceback

import layout_attention_doors  # noqa: F401 - its doors register themselves
import layout_coupled_doors  # noqa: F401 - its doors register themselves
import layout_direct_doors  # noqa: F401 - its doors register themselves
import layout_doors
import layout_key_doors  # noqa: F401 - its doors register themselves
import torch
from layout_doors import DOORS
from layouts import Layouts

NAMES = list(DOORS)

LOWERED = {
    "block",
    "cached_tokens",
    "grouped_heads",
    "layer",
    "memory_of_half_known",
    "multihead",
    "pooling",
    "pooling_by_heads",
    "spin_layer",
    "transformer",
}
DTYPES = (torch.float64,) * 4 + (torch.float32,) * 2 + (torch.bfloat16, torch.float16)


def call(seed, names=NAMES):
    """(door, layouts, what is wrong with its answer or None) of the random call with this seed."""
    door = names[seed % len(names)]
    draw = Layouts(seed)
    draw.dtype = draw.rng.choice(DTYPES)
    wrong = None
    # Layers with weights and blocks of one's own are lowered by autocast, as torch's are; all else is not.
    layout_doors.LOWERED = (lowered := draw.rng.random() < 0.5) and door in LOWERED
    draw.used += ["autocast"] * lowered
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowered):
            DOORS[door](draw)
    except Exception:
        wrong = traceback.format_exc(limit=-3)
    return door, draw.used, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--doors", nargs="+", choices=NAMES, default=NAMES, metavar="DOOR")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out")
    options = parser.parse_args()
    doors, layouts, wrong = collections.Counter(), collections.Counter(), []
    began = time.perf_counter()
    seeds, asked = range(options.seed, options.seed + options.calls), functools.partial(call, names=options.doors)
    with multiprocessing.Pool(options.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for seed, (door, used, message) in zip(seeds, pool.imap(asked, seeds, chunksize=20), strict=True):
            doors[door] += 1
            layouts.update(used)
            if message is not None:
                wrong.append({"seed": seed, "door": door, "layouts": used, "message": message})
    summary = {
        "calls": options.calls,
        "seed": options.seed,
        "mismatches": len(wrong),
        "doors": dict(sorted(doors.items())),
        "layouts": dict(sorted(layouts.items())),
        "seconds": round(time.perf_counter() - began, 1),
        "torch": torch.__version__,
        "wrong": wrong[:50],
    }
    text = json.dumps(summary, indent=1)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
