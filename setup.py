"""The native operations, compiled where there is a compiler; everything else is said in pyproject.toml."""

import hashlib
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("implicit_attention", "kernels", "native")
# Contraction into fused multiply-adds is written out where it is meant, so that all ways to a number make the same one.
FLAGS = (
    "-O3 -g0 -std=c++17 -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-fvisibility=hidden -fno-exceptions -fno-rtti"
)
X86 = {
    "avx512": "-mavx512f -mavx512vl -mavx512dq -mavx512bw -mprefer-vector-width=512 -Wno-uninitialized",
    "avx2": "-mavx2 -mfma",
}
# A library for each instruction set of the processor's family; which one answers is chosen when it is loaded.
SETS = {"x86_64": X86, "aarch64": {"neon": ""}, "arm64": {"neon": ""}}


class Libraries(build_ext):
    """Shared libraries behind a C interface: no modules of Python, whose suffixes they must not have."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")).with_suffix(".library"))

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception:
            # Nor may what was compiled of other sources answer.
            for folder in (Path(), Path(self.build_lib)):
                (folder / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
            raise
        path = Path(self.get_ext_fullpath(ext.name))
        made = path.read_bytes()
        # The loader asks for a checksum: the system loads a damaged library, and crashes. Other systems sign theirs.
        if made[:4] == b"\x7fELF" and made[-32:] != hashlib.sha256(made[:-32]).digest():
            path.write_bytes(made + hashlib.sha256(made).digest())


class Wheel(bdist_wheel):
    """One wheel for all versions of Python and torch: the libraries link neither, and ask for a platform only."""

    def get_tag(self):
        # A wheel asks after all was laid here; without a compiler there is no library, and every platform is served.
        self.root_is_pure = not any(Path(self.bdist_dir).rglob("*.library"))
        return "py3", "none", super().get_tag()[2]


def library(isa, flags):
    return Extension(
        f"implicit_attention.kernels.native.{isa}",
        sources=[str(FOLDER / "kernels.cpp")],
        depends=["setup.py", *sorted(str(path) for path in FOLDER.glob("*.h"))],
        extra_compile_args=[*FLAGS.split(), *flags.split(), f'-DIA_ISA="{isa}"'],
        language="c++",
        # Without a compiler the package is installed all the same, and says so where it matters.
        optional=True,
    )


# The kernels are written with the vector extensions of GCC and clang, so not for MSVC; `native_status()` says so there.
sets = {} if sys.platform == "win32" else SETS.get(platform.machine(), {})
setup(ext_modules=[library(*each) for each in sets.items()], cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel})
