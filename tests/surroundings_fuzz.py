"""Random calls where something around them goes wrong or is unusual, each compared with a reference in float64.

`python tests/surroundings_fuzz.py --calls 1000 --out FILE` asks every kind of call that often: interrupted solves,
native libraries that are damaged, exported programs in new processes, compiled functions, 100,000 to 1,000,000 keys.
A part of them belongs to the suite (`test_surroundings.py`).
"""

import argparse
import gc
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
from layout_reference import attention_map, fixed_point, through, weights

import implicit_attention as ia
from implicit_attention.kernels import kernel_checks, native_status
from implicit_attention.kernels.native import library


def problem(seed, lead=(2,), n=8, m=64, d=8, dtype=torch.float32):
    """(query, keys, values, beta, anchor) of a contraction."""
    numbers = torch.Generator().manual_seed(seed)
    query, keys, values = (
        torch.randn(*lead, rows, d, generator=numbers, dtype=torch.float64).to(dtype) for rows in (n, m, m)
    )
    return query, keys, values, 0.5 / float(keys.square().sum(-1).max()), 0.5


def differs(output, query, keys, values, beta, anchor, allowed=1e-4):
    """What is wrong with the output of `equilibrium_attention`, or None."""
    query, keys, values = (t.detach().double() for t in (query, keys, values))
    z = fixed_point(lambda z: attention_map(z, query, keys, beta, anchor), query)
    error = float((output.detach().double() - weights(z, keys, beta) @ values).abs().max())
    return None if error <= allowed else f"off by {error:.3g}"


class Alarm(Exception):
    """What a handler of a signal raises, as a time limit does."""


#: Whether the next signal raises: of two that come together, the second would meet the lines that handle the first.
_awaited = threading.Event()


def _raise(number, frame):
    if _awaited.is_set():
        _awaited.clear()
        raise KeyboardInterrupt if number == signal.SIGINT else Alarm


def _import_everything():
    """Solves by every implementation: a module whose import is interrupted is Python's matter, not the library's."""
    for impl in ("auto", "reference"):
        query, keys, values, beta, anchor = problem(0)
        keys.requires_grad_()
        ia.equilibrium_attention(query, keys, values, scale=beta, anchor=anchor, impl=impl).sum().backward()


def interrupted(rng, calls):
    """Ctrl-C, or a time limit, at any moment of a training step: it reaches the caller, and the next call is right."""
    wrong, reached = [], 0
    _import_everything()
    before = {kind: signal.signal(kind, _raise) for kind in (signal.SIGINT, signal.SIGALRM)}
    try:
        for index in range(calls):
            asked = problem(rng.randrange(2**31), lead=(rng.choice((1, 4)),), m=rng.choice((64, 512)))
            asked[1].requires_grad_()
            try:
                _awaited.set()
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
                for again in range(1000):
                    options = {"impl": rng.choice(("auto", "auto", "reference"))}
                    found = ia.equilibrium_attention(*asked[:3], scale=asked[3], anchor=asked[4], **options)
                    found.sum().backward()
                    if again == 2 and index % 2:
                        os.kill(os.getpid(), signal.SIGINT)
                wrong.append("the signal did not reach the caller")
            except (Alarm, KeyboardInterrupt):
                reached += 1
                # An exception between the lines of `torch.no_grad.__enter__` leaves torch without gradients.
                torch.set_grad_enabled(True)
            except RuntimeError:
                # The same, of a signal that came where Python ignores exceptions, as in a finalizer.
                if torch.is_grad_enabled():
                    raise
                reached += 1
                torch.set_grad_enabled(True)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            found = ia.equilibrium_attention(*asked[:3], scale=asked[3], anchor=asked[4])
            message = differs(found, *asked)
            refused = [str(check) for check in kernel_checks() if check.verdict == "refused"]
            if message or refused:
                wrong.append(message or f"refused: {refused}")
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)
        # A guard of `torch.inference_mode` that was entered and not left puts back the modes of an autograd function,
        # without gradients and without forward mode, once it is collected.
        gc.collect()
        torch.set_grad_enabled(True)
        torch._C._set_fwd_grad_enabled(True)
    assert reached or wrong or not calls
    return wrong


def _damaged(data, rng):
    data, kind = bytearray(data), rng.choice(("bits", "cut", "zeros", "head", "text", "nothing", "missing", "longer"))
    if kind == "bits":
        for _ in range(rng.choice((1, 10, 1000))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "zeros":
        start = rng.randrange(len(data))
        end = min(start + rng.choice((16, 4096, 10**6)), len(data))
        data[start:end] = bytes(end - start)
    elif kind == "head":
        data[rng.randrange(64)] ^= rng.randrange(1, 256)
    elif kind == "text":
        data = bytearray(rng.choice((b"", b"not a library", b"\x7fELF", rng.randbytes(5000))))
    elif kind == "longer":
        data += rng.randbytes(rng.choice((1, 100)))
    return kind, None if kind == "missing" else bytes(data)


def _asked_of_damaged(folder, seed):
    library.FOLDER = Path(folder)
    for cache in (library.found, library.warn_once):
        cache.cache_clear()
    from implicit_attention.kernels import trust

    trust._found.clear()
    warnings.simplefilter("ignore")
    asked = problem(seed)
    found = ia.equilibrium_attention(*asked[:3], scale=asked[3], anchor=asked[4])
    message = differs(found, *asked)
    # 9: wrong; 8: a library that was not as it had been made answers; 0: right.
    os._exit(9 if message else 0)


def damaged_libraries(rng, calls):
    """Bits that flipped, files that were cut, of other makers, or gone: torch answers, and the process lives."""
    if native_status().isa is None:
        return []
    wrong, fork = [], multiprocessing.get_context("fork")
    _import_everything()
    torch.set_num_threads(1)
    for _ in range(calls):
        with tempfile.TemporaryDirectory() as folder:
            kinds = []
            for path in Path(library.__file__).parent.glob("*.library"):
                kind, data = _damaged(path.read_bytes(), rng)
                kinds.append(f"{path.name}: {kind}")
                if data is not None:
                    Path(folder, path.name).write_bytes(data)
            process = fork.Process(target=_asked_of_damaged, args=(folder, rng.randrange(2**31)))
            process.start()
            process.join(60)
            if process.exitcode != 0:
                wrong.append(f"{kinds}: the process ended with {process.exitcode}")
                process.kill()
    return wrong


def many_keys(rng, calls):
    """Sums over 100,000 to 1,000,000 keys, in solves and in gradients, in float32."""
    return [message for _ in range(calls) for message in _wrong_over_many_keys(rng)]


def _wrong_over_many_keys(rng):
    count = rng.choice((100_000,) * 8 + (300_000, 1_000_000))
    size = {"lead": (), "n": rng.choice((1, 3, 8)), "m": count, "d": rng.choice((2, 4))}
    query, keys, values, _, anchor = problem(rng.randrange(2**31), **size)
    if rng.random() < 0.3:
        keys = (keys * 1000).round() / 1000 + rng.choice((0.0, 3.0))
    beta = rng.uniform(0.2, 0.9) / (1 - anchor) / float(keys.square().sum(-1).max())
    leaves = [t.requires_grad_() for t in (query, keys, values)]
    options = {"scale": beta, "anchor": anchor, "solver": ia.Anderson(rtol=1e-5, atol=1e-9)}
    output, solution = ia.equilibrium_attention(*leaves, return_solution=True, on_failure="raise", **options)

    def step(z, query, keys, values):
        return attention_map(z, query, keys, beta, anchor)

    def read(z, query, keys, values):
        return weights(z, keys, beta) @ values

    held = [t.detach().double() for t in leaves]
    z = fixed_point(lambda z: step(z, *held), held[0])
    cotangent = torch.randn(output.shape)
    got = [solution.value, output, *torch.autograd.grad(output, leaves, cotangent)]
    want = [z, read(z, *held), *through(step, read, z, held, cotangent.double())]
    for name, left, right in zip(("state", "output", "query", "keys", "values"), got, want, strict=True):
        # A gradient by a key is of the size of its weight, a mean of random values of that of their spread.
        worst, largest = float((left.detach().double() - right).abs().max()), float(right.abs().max())
        if not worst <= 1e-3 * max(largest, 1e-2 if name == "output" else 0.0):
            yield f"{size}: {name} is off by {worst:.3g} of {largest:.3g}"


class Function(torch.nn.Module):
    """A budget of steps of `equilibrium_attention`, as a program."""

    def __init__(self, solver, is_causal, mask):
        super().__init__()
        self.solver, self.is_causal, self.mask = solver, is_causal, mask

    def forward(self, query, keys, values):
        return ia.equilibrium_attention(
            query, keys, values, self.mask, solver=self.solver, is_causal=self.is_causal, scale=0.05, anchor=0.5
        )


def _exported(rng, path):
    steps = rng.choice((1, 4, 40))
    solver = rng.choice((ia.Picard, ia.Anderson))(max_steps=steps, rtol=0, atol=0)
    lead, n, m, d = rng.choice(((), (2,), (2, 3))), rng.choice((3, 8)), rng.choice((5, 64)), rng.choice((4, 8))
    causal = rng.random() < 0.3
    mask = None if causal or rng.random() < 0.5 else torch.arange(m) != 1
    module = Function(solver, causal, mask)
    shapes = [(*lead, n, d), (*lead, m, d), (*lead, m, 3)]
    program = torch.export.export(module, tuple(torch.randn(shape) for shape in shapes))
    torch.export.save(program, f"{path}.pt2")
    torch.save(
        {
            "module": vars(module) | {},
            "shapes": shapes,
            "solver": type(solver).__name__,
            "steps": steps,
            "causal": causal,
            "mask": mask,
        },
        f"{path}.info",
    )


def loaded(path, seed, calls):
    """In a new process: the program alone, held against plain steps in float64. Prints what is wrong as JSON."""
    import implicit_attention  # noqa: F401 - its operations

    program = torch.export.load(f"{path}.pt2").module()
    info = torch.load(f"{path}.info", weights_only=False)
    wrong, numbers = [], torch.Generator().manual_seed(seed)
    for _ in range(calls):
        query, keys, values = (torch.randn(shape, generator=numbers) for shape in info["shapes"])
        found = program(query, keys, values).double()
        q, k, v = (t.double() for t in (query, keys, values))
        n, m = q.shape[-2], k.shape[-2]
        pairs = torch.zeros(n, m, dtype=torch.float64)
        if info["causal"]:
            pairs = pairs.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1), -torch.inf)
        if info["mask"] is not None:
            pairs = pairs.masked_fill(~info["mask"], -torch.inf)
        z, exact = q, info["solver"] == "Picard"
        for _ in range(info["steps"] if exact else 200):
            z = attention_map(z, q, k, 0.05, 0.5, pairs)
        # An accelerated budget is judged where it has settled, and on the way only for being near.
        allowed = 1e-4 if exact or info["steps"] == 40 else 0.3
        error = float((found - weights(z, k, 0.05, pairs) @ v).abs().max())
        if not error <= allowed:
            wrong.append(f"{info['solver']}({info['steps']}), {info['shapes']}: off by {error:.3g}")
    print(json.dumps(wrong))


def exported(rng, calls):
    """Programs of `torch.export`, each loaded in a process of its own and asked 40 times."""
    wrong, each = [], 40
    with tempfile.TemporaryDirectory() as folder:
        for index in range(-(-calls // each)):
            path = f"{folder}/{index}"
            _exported(rng, path)
            command = [
                sys.executable,
                __file__,
                "--load",
                path,
                "--seed",
                str(rng.randrange(2**31)),
                "--calls",
                str(each),
            ]
            found = subprocess.run(command, capture_output=True, text=True, timeout=300)
            lines = found.stdout.strip().splitlines()
            wrong += json.loads(lines[-1]) if found.returncode == 0 and lines else [found.stderr[-2000:]]
    return wrong


def compiled(rng, calls):
    """Functions that inductor compiled, states and gradients, each asked 25 times."""
    return [message for _ in range(-(-calls // 25)) for message in _wrong_in_compiled(rng, 25)]


def _wrong_in_compiled(rng, calls):
    torch._dynamo.reset()
    lead, n, m, d = rng.choice(((), (2,), (2, 2))), rng.choice((1, 3, 8)), rng.choice((6, 64)), rng.choice((4, 8))
    dtype, anchor = rng.choice((torch.float32, torch.float32, torch.float64)), rng.choice((0.5, 0.8))
    solver = rng.choice((ia.Anderson, ia.Picard))(rtol=1e-5, atol=1e-9, max_steps=300)
    causal, beta = rng.random() < 0.3, 0.1 / d
    above = torch.ones(n, m, dtype=torch.bool).triu(1)
    rule = torch.zeros(n, m, dtype=torch.float64).masked_fill(above & causal, -torch.inf)

    @torch.compile(fullgraph=True)
    def asked(query, keys, values):
        options = {"scale": beta, "anchor": anchor, "solver": solver, "is_causal": causal}
        return ia.equilibrium_attention(query * 1.0, keys, values, **options).tanh()

    def step(z, query, keys, values):
        return attention_map(z, query, keys, beta, anchor, rule)

    def read(z, query, keys, values):
        return (weights(z, keys, beta, rule) @ values).tanh()

    for _ in range(calls):
        leaves = [t.requires_grad_() for t in problem(rng.randrange(2**31), lead, n, m, d, dtype)[:3]]
        found = asked(*leaves)
        held = [t.detach().double() for t in leaves]
        z = fixed_point(lambda z: step(z, *held), held[0])  # noqa: B023 - called at once
        cotangent = torch.randn(found.shape, dtype=torch.float64)
        got = [found, *torch.autograd.grad(found, leaves, cotangent.to(dtype))]
        want = [read(z, *held), *through(step, read, z, held, cotangent)]
        for name, left, right in zip(("output", "query", "keys", "values"), got, want, strict=True):
            worst, largest = float((left.detach().double() - right).abs().max()), float(right.abs().max())
            if not worst <= 1e-3 * max(largest, 0.1):
                yield f"{lead} {n} {m} {d} {dtype} {solver}: {name} is off by {worst:.3g} of {largest:.3g}"


KINDS = {kind.__name__: kind for kind in (interrupted, damaged_libraries, exported, compiled, many_keys)}


def ask(kind, seed, calls):
    """What was wrong in that many calls of a kind."""
    torch.manual_seed(seed)
    try:
        return KINDS[kind](random.Random(seed), calls)
    except Exception:
        return [traceback.format_exc()]
    finally:
        # Whatever an interrupt left, the next test begins as it should.
        torch.set_grad_enabled(True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--out")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        return loaded(options.load, options.seed, options.calls)
    summary = {"torch": torch.__version__, "seed": options.seed, "calls": options.calls}
    for kind in options.kinds:
        began = time.perf_counter()
        wrong = ask(kind, options.seed, options.calls)
        summary[kind] = {
            "mismatches": len(wrong),
            "seconds": round(time.perf_counter() - began, 1),
            "wrong": wrong[:20],
        }
        print(kind, json.dumps(summary[kind], indent=1), flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
