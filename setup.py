"""Builds lily._cpu: the kernels of kernels/cpu once an instruction set, and the runtime around them.

Everything else about the package is in pyproject.toml. Read from the environment:

- ``CXX``: the compiler; ``LILY_CXXFLAGS``: further flags, after the build's own.
- ``LILY_TARGET_MACHINE``: the machine to build for, where it isn't this one (a cross compiler).
- ``LILY_EMULATE_AVX512``: if set, also builds the 16-lane kernels for AVX2, so that they can be tested without AVX-512.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import Cython
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

CPU = Path("kernels/cpu")
BUILD = Path("build")
# Compiled once for all; every other .cc in kernels/cpu is a kernel family, compiled once an instruction set.
RUNTIME = ("runtime.cc", "memory.cc", "isa.cc")
# Python's own flags ask for debug information, which would double the time and the size.
COMMON = ("-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wno-psabi")
MACHINE = os.environ.get("LILY_TARGET_MACHINE", platform.machine()).lower()
EMULATE_AVX512 = bool(os.environ.get("LILY_EMULATE_AVX512"))
EXTRA = tuple(os.environ.get("LILY_CXXFLAGS", "").split())

if sys.platform == "darwin":
    # A universal Python would have every source compiled for both machines at once.
    os.environ.setdefault("ARCHFLAGS", f"-arch {MACHINE}")


@dataclass(frozen=True)
class InstructionSet:
    name: str
    width: int
    flags: tuple[str, ...] = ()

    @property
    def compile_flags(self) -> tuple[str, ...]:
        return (*self.flags, f"-DLILY_ISA={self.name}", f"-DLILY_WIDTH={self.width}")


def instruction_sets() -> list[InstructionSet]:
    sets = [InstructionSet("portable", 4)]
    if MACHINE in ("x86_64", "amd64"):
        avx2 = ("-mavx2", "-mfma", "-mf16c")
        sets.append(InstructionSet("avx2", 8, avx2))
        sets.append(InstructionSet("avx512", 16, (*avx2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")))
        if EMULATE_AVX512:
            sets.append(InstructionSet("avx512_emulated", 16, avx2))
    elif MACHINE in ("arm64", "aarch64"):
        sets.append(InstructionSet("neon", 4))
    return sets


class BuildExt(build_ext):
    """Compiles every source by itself, in parallel and only where it changed, then links.

    Objects are kept under build/objects in folders named for instruction set and command, whatever temporary folder a
    front end asks for: installing again after an edit, for another Python or into a wheel, compiles what changed.
    """

    def build_extension(self, ext: Extension) -> None:
        native, bridge = self._commands()
        jobs = [
            (source, isa.name, [*native, *isa.compile_flags])
            for source in sorted(CPU.glob("*.cc"))
            if source.name not in RUNTIME
            for isa in instruction_sets()
        ]
        once = ["-DLILY_EMULATE_AVX512"] if EMULATE_AVX512 else []
        jobs += [(CPU / name, "runtime", [*native, *once]) for name in RUNTIME]
        jobs += [(Path(source), "bridge", bridge) for source in ext.sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda job: self._compile(*job), jobs))
        ext.sources = []
        ext.extra_objects = objects
        ext.extra_link_args = [*ext.extra_link_args, *EXTRA]
        self.force = True  # links the objects of these flags even where a library of others is newer
        super().build_extension(ext)

    def _commands(self) -> tuple[list[str], list[str]]:
        """What compiles our sources, which Python's own flags don't touch, and what compiles Cython's output."""
        python = list(self.compiler.compiler_so_cxx)
        compiler = os.environ["CXX"].split() if "CXX" in os.environ else python[:1]
        architecture = ["-arch", MACHINE] if sys.platform == "darwin" else []
        native = [*compiler, *architecture, "-pthread", *COMMON, f"-I{CPU}", *EXTRA]
        folders = [f"-I{path}" for path in (CPU, *self.include_dirs)]
        # Warnings in generated code are nobody's to mend.
        bridge = [*compiler, *python[1:], *COMMON, *folders, *EXTRA, "-w"]
        return native, bridge

    def _compile(self, source: Path, name: str, command: list[str]) -> str:
        folder = f"{name}-{hashlib.sha256(' '.join(command).encode()).hexdigest()[:8]}"
        target = BUILD / "objects" / folder / f"{source.stem}.o"
        # By content: installers unpack, copy and install anew, and times of files tell nothing then.
        inputs = [path.read_bytes() for path in [source, *sorted(CPU.glob("*.h"))]]
        if source.suffix == ".pyx":
            inputs.append(Cython.__version__.encode())
        content = hashlib.sha256(b"".join(inputs)).hexdigest()
        stamp = target.with_suffix(".sha256")
        if not target.exists() or not stamp.exists() or stamp.read_text() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            stamp.unlink(missing_ok=True)
            self.spawn([*command, "-c", self._translated(source), "-o", str(target)])
            stamp.write_text(content)
        return str(target)

    def _translated(self, source: Path) -> str:
        """The C++ of a Cython source; of another, itself."""
        if source.suffix != ".pyx":
            return str(source)
        module = Extension("lily._cpu", [str(source)], language="c++")
        return str(cythonize([module], build_dir=BUILD, language_level=3, force=True)[0].sources[0])


extension = Extension(
    "lily._cpu",
    ["lily/_cpu.pyx"],
    language="c++",
    libraries=["dl"] if sys.platform == "linux" else [],
    extra_link_args=["-pthread"] if sys.platform == "linux" else [],
)

setup(
    packages=[*find_packages(include=["lily", "lily.*"]), "lily_builtin", "lily.kernels"],
    # kernels/ and plugins/ stand beside lily/ in the repository and inside the wheel under these names.
    package_dir={"lily_builtin": "plugins/lily_builtin/lily_builtin", "lily.kernels": "kernels"},
    package_data={
        "lily": ["py.typed", "*.pyi", "policies/**/*.yaml", "models/**/*"],
        "lily.kernels": ["cpu/*.h", "cpu/*.cc", "metal/*"],
    },
    ext_modules=[extension],
    include_package_data=False,  # what the sdist holds beyond the above is no use to a wheel
    cmdclass={"build_ext": BuildExt},
)
