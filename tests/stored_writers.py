"""Stores of patterns under two writers, under writers that are killed, and under damage.

`python tests/stored_writers.py --interleavings 1000 --kills 100 --damages 500` writes what it found as JSON, and fails
if a row was lost or a damaged store answered with other rows; a part of it belongs to the suite
(`distributed/test_stored.py`).
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch

from implicit_attention.distributed import StoredPatterns

#: A writer appends so many pieces at most to a folder.
PIECES = 4


def piece(writer, number):
    """Keys (1 to 4, 3) and values that say who wrote them when."""
    rows = 1 + (writer + number) % 4
    keys = torch.stack([torch.tensor([writer, number, row], dtype=torch.float32) for row in range(rows)])
    return keys, keys[:, :1] / 8


def held(folder):
    """Pieces of a folder in their order, (writer, number) each, or what is wrong with a row."""
    try:
        keys, values = StoredPatterns(folder).load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not torch.equal(keys[:, :1] / 8, values):
        return "values of other keys"
    found = []
    while len(keys):
        writer, number = int(keys[0, 0]), int(keys[0, 1])
        whole, _ = piece(writer, number)
        if not torch.equal(keys[: len(whole)], whole):
            return f"a part of piece {number} of writer {writer}"
        found.append((writer, number))
        keys = keys[len(whole) :]
    return found


def in_turn(folder, seed):
    """Two objects append in a random order; what is wrong then, or None."""
    random, wanted = Random(seed), []
    try:
        stores = [StoredPatterns(folder), StoredPatterns(folder)]
        for _ in range(random.randint(2, 2 * PIECES)):
            writer = random.randrange(2)
            number = sum(other == writer for other, _ in wanted)
            stores[writer].append(*piece(writer, number))
            wanted.append((writer, number))
            if random.random() < 0.1:
                stores[random.randrange(2)] = StoredPatterns(folder)
    except Exception as error:
        return f"after {len(wanted)} appends {type(error).__name__}: {error}"
    found = held(folder)
    return None if found == wanted else f"{found} instead of {wanted}"


def appends(folder, writer, count, random):
    store = StoredPatterns(folder)
    for number in range(count):
        time.sleep(random.choice((0.0, 0.0, 1e-3 * random.random())))
        store.append(*piece(writer, number))


def writes(writer, folder, seeds, start, end):
    """A process of two: appends to a folder for each seed, at the same time as the other."""
    for seed in seeds:
        random = Random(f"{seed} {writer}")
        start.wait(60)
        try:
            appends(folder / str(seed), writer, random.randint(1, PIECES), random)
        except Exception as error:
            (folder / f"{seed} {writer}.txt").write_text(f"{type(error).__name__}: {error}")
        end.wait(60)


def at_once(folder, seeds):
    """Two processes append to one folder after the other; what is wrong, by seed."""
    context, wrong = multiprocessing.get_context("fork"), {}
    start, end = context.Barrier(3), context.Barrier(3)
    both = [context.Process(target=writes, args=(writer, folder, seeds, start, end)) for writer in range(2)]
    for process in both:
        process.start()
    for seed in seeds:
        start.wait(60)
        end.wait(60)
        found = held(folder / str(seed))
        for writer in range(2):
            wanted = [(writer, number) for number in range(Random(f"{seed} {writer}").randint(1, PIECES))]
            if isinstance(found, str) or [one for one in found if one[0] == writer] != wanted:
                told = "".join(file.read_text() for file in folder.glob(f"{seed} *.txt"))
                wrong[seed] = f"{found}, where {wanted} were appended; {told}"
    for process in both:
        process.join(60)
    return wrong


def kills(folder, seed):
    """A process that appends is killed; what is wrong with the folder then, or None."""
    random = Random(seed)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            store = StoredPatterns(folder)
            for number in range(10_000):
                store.append(*piece(0, number))
                os.write(writing, b".")
        finally:
            os._exit(1)
    os.close(writing)
    done = len(os.read(reading, 1))
    time.sleep(random.uniform(0.0, 0.02))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    while told := os.read(reading, 1 << 16):
        done += len(told)
    os.close(reading)
    found = held(folder)
    # An append whose end was not told of may be there, whole.
    if found not in ([(0, i) for i in range(done)], [(0, i) for i in range(done + 1)]):
        return f"{found} after {done} appends"
    StoredPatterns(folder).append(*piece(1, 0))
    return None if held(folder) == [*found, (1, 0)] else "the next append is lost"


def damaged(source, folder, seed):
    """A copy of a store with one random damage: (what was done, "right", "refused", or what is wrong)."""
    random = Random(seed)
    shutil.copytree(source, folder)
    whole = StoredPatterns(source).load()
    path = random.choice([file for file in sorted(folder.iterdir()) if file.suffix != ".lock"])
    opened = StoredPatterns(folder) if random.random() < 0.2 else None
    data = bytearray(path.read_bytes())
    how = random.choice(("flip", "flip", "flip", "truncate", "delete", "swap", "zero"))
    if how == "flip":
        # As many in the first kilobyte, where headers are, as anywhere.
        at = random.randrange(random.choice((min(1024, len(data)), len(data))))
        data[at] ^= 1 << random.randrange(8)
    elif how == "truncate":
        data = data[: random.randrange(len(data))]
    elif how == "zero":
        at = random.randrange(len(data))
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif how == "swap":
        other = random.choice(sorted(folder.iterdir()))
        data = bytearray(other.read_bytes())
    path.unlink() if how == "delete" else path.write_bytes(data)
    done = f"{how} {path.name}"
    try:
        store = opened or StoredPatterns(folder)
        start, stop = sorted(random.choices(range(len(whole.keys) + 1), k=2))
        rows = random.choice((slice(None), slice(start, stop)))
        found = store.load(rows)
        if len(store) != len(whole.keys):
            return done, f"{len(store)} rows"
        same = torch.equal(found.keys, whole.keys[rows]) and torch.equal(found.values, whole.values[rows])
        return done, "right" if same else "other rows"
    except ValueError as error:
        text = str(error)
        named = "index.json" in text or "patterns-" in text
        return done, "refused" if named and "; " in text else f"says too little: {text}"
    except Exception as error:
        return done, f"raised {type(error).__name__}: {error}"


def filled(folder):
    """A store of four files of different length."""
    for seed, rows in enumerate((40, 1, 700, 33)):
        keys = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
        StoredPatterns(folder).append(keys, keys[:, :2] + 1)
    return folder


def asked(interleavings, kill, damages):
    """What happened, as a dictionary; what is wrong is listed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wrong = {f"in turn, seed {seed}": in_turn(folder / f"turn{seed}", seed) for seed in range(interleavings)}
        (folder / "once").mkdir()
        at = at_once(folder / "once", range(interleavings))
        wrong |= {f"at once, seed {seed}": told for seed, told in at.items()}
        wrong |= {f"killed, seed {seed}": kills(folder / f"kill{seed}", seed) for seed in range(kill)}
        source, outcomes = filled(folder / "source"), {"right": 0, "refused": 0}
        for seed in range(damages):
            done, outcome = damaged(source, folder / f"damage{seed}", seed)
            if outcome in outcomes:
                outcomes[outcome] += 1
            else:
                wrong[f"damage, seed {seed}"] = f"{done}: {outcome}"
    wrong = {case: told for case, told in wrong.items() if told}
    return {
        "interleavings of two objects": interleavings,
        "interleavings of two processes": interleavings,
        "kills": kill,
        "damages": damages,
        "damaged stores": outcomes,
        "wrong": len(wrong),
        "examples": dict(list(wrong.items())[:5]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interleavings", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damages", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    summary = asked(options.interleavings, options.kills, options.damages)
    print(json.dumps(summary, indent=1))
    sys.exit(summary["wrong"] > 0)
