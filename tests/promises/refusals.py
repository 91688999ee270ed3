"""One row of the table of refusals, run: what a call raises, in words that do not vary."""

import contextlib
import enum
import inspect
import io
import json
import re
import signal
import sys
import tempfile
import time
import typing
import warnings
from typing import Any

import lists
import torch


def words(error: BaseException) -> str:
    """The message, without what varies from run to run and from processor to processor.

    Addresses, temporary folders, directions, computed numbers of three decimals or more and those of rounding; of a
    solve that failed all numbers.
    """
    text = re.sub(r"0x[0-9a-f]+", "0x...", str(error))
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/[^\s'\"`]*/", "", text)
    text = re.sub(r"along \[[^]]*\]", "along #", text)
    text = re.sub(r"-?\b\d+\.(?:\d{3,}(?:e[+-]?\d+)?|\d+e-1\d)", "#", text)
    if type(error).__name__ in ("ConvergenceError", "ConvergenceWarning"):
        text = re.sub(r"-?\d[\d.]*(?:e[+-]?\d+)?(?:, \d+)*(?:, \.\.\.)?", "#", text)
    return text


def refused(row: dict[str, Any]) -> tuple[str, str] | None:
    """Kind and words of the error that a row's call raises, or None."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), lists.elsewhere():
        warnings.simplefilter("ignore")
        try:
            lists.evaluate(row["call"], row.get("given", ()))
        except Exception as error:
            return type(error).__name__, words(error)
    return None


def reason(value: Any) -> str:
    """Why a public value refuses nothing, as far as its kind says it."""
    if not isinstance(value, type):
        return "" if callable(value) else "a constant"
    if issubclass(value, enum.Enum):
        return "an enumeration"
    if issubclass(value, BaseException):
        return "an exception"
    if typing.Protocol in value.__bases__ or inspect.isabstract(value):
        return "a protocol or an abstract base"
    return "a record" if issubclass(value, tuple) else ""


def first_that_refuses(row: dict[str, Any]) -> dict[str, Any] | None:
    """Of a raw record the first of its calls that raises what was recorded, in time for a quick test."""
    for call, given in row["calls"]:
        made = {"door": row["door"], "call": call, "given": given, "kind": row["kind"], "message": row["message"]}
        begin = time.perf_counter()
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
            found = refused(made)
        if found == (row["kind"], row["message"]) and time.perf_counter() - begin < 0.4:
            return made if given else {name: each for name, each in made.items() if name != "given"}
    return None


if __name__ == "__main__":
    # Asked of a fresh process by write.py, which starts another where a call ends this one.
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("too long")))
    for line in sys.stdin:
        signal.alarm(5)
        print(json.dumps(first_that_refuses(json.loads(line))), flush=True)
        signal.alarm(0)
