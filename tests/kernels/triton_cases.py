"""Runs cases for the Triton kernels, for `test_triton.py`, in a process of their own.

`python triton_cases.py FILE DEVICE CASE...` writes {name of the case: what is wrong, or ""} to FILE: in Triton's
interpreter on the device cpu, or compiled and larger on cuda.
"""

import json
import sys
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import triton_accuracy_cases  # noqa: F401 - its cases register themselves
import triton_adjoint_cases  # noqa: F401
import triton_half_cases  # noqa: F401
import triton_harness as harness
import triton_solve_cases  # noqa: F401
import triton_trust_cases  # noqa: F401

CASES = harness.CASES
# Each takes a process; the name of a case begins with that of its part.
PARTS = (
    *("solve_shape", "solve_mask", "solve_listed", "solve"),
    *("adjoint_shape", "adjoint", "step", "gmres"),
    *("trust_that", "trust_broken", "trust"),
    *("half_random_fp16", "half_random_bf16", "half_accuracy", "half_function", "half"),
)


def part_of(name):
    return next(part for part in PARTS if name.startswith(part + "_"))


def usable():
    """Whether the context of the card is whole."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main(path, device, *names):
    harness.DEVICE = device
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    # NaN and infinite test data make the interpreter's numpy warn.
    warnings.simplefilter("ignore", RuntimeWarning)
    harness.shrink_tiles()
    if device == "cpu":
        harness.hasten()
    found = {}
    for name in names:
        try:
            CASES[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
        # After each case: a process that is ended has told of those before.
        unfinished = Path(f"{path}.part")
        unfinished.write_text(json.dumps(found))
        unfinished.rename(path)
        if found[name] and device == "cuda" and not usable():
            break  # what is wrong with the next ones is this case


if __name__ == "__main__":
    main(*sys.argv[1:])
