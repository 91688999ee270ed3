import ctypes, os, functools, torch, glob
from typing import NamedTuple, Any


class Library(NamedTuple):
    isa: str
    solve: Any
    adjoint: Any
    parallel_for: int


@functools.cache
def library():
    from .operands import ARGUMENTS

    h = ctypes.CDLL(os.environ.get("IA_LIB", "/tmp/ia_avx512.so"))
    h.ia_solve.argtypes = ARGUMENTS
    h.ia_solve.restype = ctypes.c_int64
    if hasattr(h, "ia_adjoint"):
        h.ia_adjoint.argtypes = ARGUMENTS
        h.ia_adjoint.restype = ctypes.c_int64
    cpu = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    return Library(
        "x", h.ia_solve, getattr(h, "ia_adjoint", None), ctypes.cast(cpu.torch_parallel_for, ctypes.c_void_p).value
    )


def unavailable():
    return None


def warn_once():
    pass
