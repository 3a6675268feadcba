"""Builds lily._cpu: the kernels of kernels/cpu once an instruction set, and the runtime around them.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CPU = Path("kernels/cpu")
# Compiled once for all; every other .cc in kernels/cpu is a kernel family, compiled once an instruction set.
RUNTIME = ("runtime.cc", "memory.cc", "isa.cc")
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wno-psabi"]


@dataclass(frozen=True)
class InstructionSet:
    name: str
    width: int
    flags: tuple[str, ...] = ()


def instruction_sets() -> list[InstructionSet]:
    machine = os.environ.get("LILY_TARGET_MACHINE", platform.machine()).lower()
    sets = [InstructionSet("portable", 4)]
    if machine in ("x86_64", "amd64"):
        avx2 = ("-mavx2", "-mfma", "-mf16c")
        sets.append(InstructionSet("avx2", 8, avx2))
        sets.append(InstructionSet("avx512", 16, (*avx2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")))
        if os.environ.get("LILY_EMULATE_AVX512"):
            sets.append(InstructionSet("avx512_emulated", 16, avx2))
    elif machine in ("arm64", "aarch64"):
        sets.append(InstructionSet("neon", 4))
    return sets


class BuildExt(build_ext):
    """Compiles the kernel families into one folder an instruction set, then links everything into the extension."""

    def build_extension(self, ext: Extension) -> None:
        extra = os.environ.get("LILY_CXXFLAGS", "").split()
        include = [str(CPU)]
        families = sorted(str(path) for path in CPU.glob("*.cc") if path.name not in RUNTIME)
        objects: list[str] = []
        for isa in instruction_sets():
            objects += self._compile_parallel(
                families,
                Path(self.build_temp) / isa.name,
                [("LILY_ISA", isa.name), ("LILY_WIDTH", str(isa.width))],
                include,
                [*COMMON, *isa.flags, *extra],
            )
        ext.extra_objects = [*(ext.extra_objects or []), *objects]
        ext.extra_compile_args = [*COMMON, *extra]
        ext.extra_link_args = [*(ext.extra_link_args or []), *extra]
        if os.environ.get("LILY_EMULATE_AVX512"):
            ext.define_macros = [*ext.define_macros, ("LILY_EMULATE_AVX512", "1")]
        super().build_extension(ext)

    def _compile_parallel(
        self, sources: list[str], folder: Path, macros: list[tuple[str, str]], include: list[str], args: list[str]
    ) -> list[str]:
        from concurrent.futures import ThreadPoolExecutor

        def compile_one(source: str) -> list[str]:
            target = folder / (Path(source).stem + ".o")
            inputs = [Path(source), *CPU.glob("*.h"), Path("setup.py")]
            if not self.force and target.exists() and target.stat().st_mtime > max(p.stat().st_mtime for p in inputs):
                return [str(target)]
            target.parent.mkdir(parents=True, exist_ok=True)
            defines = [f"-D{name}={value}" for name, value in macros]
            folders = [f"-I{path}" for path in include]
            self.spawn([*self._compiler(), *args, *defines, *folders, "-c", source, "-o", str(target)])
            return [str(target)]

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return [name for names in pool.map(compile_one, sources) for name in names]

    def _compiler(self) -> list[str]:
        if cxx := os.environ.get("CXX"):
            return cxx.split()
        return list(getattr(self.compiler, "compiler_so_cxx", None) or ["c++"])


extension = Extension(
    "lily._cpu",
    ["lily/_cpu.pyx", *(str(CPU / name) for name in RUNTIME)],
    include_dirs=[str(CPU)],
    depends=[str(path) for path in CPU.glob("*.h")],
    language="c++",
    libraries=["dl"] if platform.system() == "Linux" else [],
    extra_link_args=["-pthread"] if platform.system() == "Linux" else [],
)

setup(
    packages=[*find_packages(include=["lily", "lily.*"]), "lily_builtin", "lily.kernels"],
    # kernels/ and plugins/ stand beside lily/ in the repository and inside the wheel under these names.
    package_dir={"lily_builtin": "plugins/lily_builtin/lily_builtin", "lily.kernels": "kernels"},
    package_data={
        "lily": ["py.typed", "*.pyi", "policies/**/*.yaml", "models/**/*"],
        "lily.kernels": ["cpu/*.h", "cpu/*.cc", "metal/*"],
    },
    ext_modules=cythonize([extension], language_level=3),
    cmdclass={"build_ext": BuildExt},
)
