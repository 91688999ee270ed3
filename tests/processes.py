"""Processes for tests: several that share a gloo group, and fresh ones, none of which has to import torch."""

import atexit
import datetime
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

SECONDS = 60
# A server imports what takes seconds once, and every process is a copy of it.
multiprocessing.set_forkserver_preload(
    ["implicit_attention.layers", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
)


def spawn(work: Callable[..., Any], args: tuple[Any, ...], count: int, join: bool = True) -> Any:
    """`torch.multiprocessing.spawn`, whose processes do not import torch."""
    return multiprocessing.start_processes(work, args, nprocs=count, join=join, start_method="forkserver")


def together(work: Callable[..., Any], count: int, *args: Any, seconds: float = SECONDS) -> list[Any]:
    """What `work(rank, *args)` returned in each of `count` processes, which torch.save can hold.

    `work` is a function of a module. The first process to raise ends all; a group that waits ends after `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_one, (work, count, folder, seconds, args), count)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(count)]


def _one(rank: int, work: Callable[..., Any], count: int, folder: str, seconds: float, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=timeout)
    torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    # Nobody may leave while another still reads what it was sent.
    distributed.barrier()
    distributed.destroy_process_group()


# Runs every program that it is sent in a copy of itself.
SERVER = """
import json, os, sys, traceback
import torch
for line in iter(sys.stdin.readline, ""):
    code, path = json.loads(line)
    child = os.fork()
    if not child:
        wrong = 1
        try:
            os.dup2(os.open(path, os.O_WRONLY), 1)
            os.dup2(1, 2)
            exec(compile(code, "code", "exec"), {"__name__": "__main__"})
            wrong = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(wrong)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@functools.cache
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def fresh(code: str) -> str:
    """Prints of a program in an interpreter that has imported torch and nothing else."""
    with tempfile.NamedTemporaryFile("r") as file:
        server = _server()
        print(json.dumps([code, file.name]), file=server.stdin, flush=True)
        wrong, printed = int(server.stdout.readline()), file.read().strip()
    assert not wrong, printed
    return printed


def error_of(call: Callable[[], Any]) -> str:
    """The error that a call raises, as "kind: message", or "no error"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
