"""Several processes on this machine that share a gloo group, for tests of what is distributed."""

import datetime
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


def error_of(call: Callable[[], Any]) -> str:
    """The error that a call raises, as "kind: message", or "no error"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
