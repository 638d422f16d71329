"""Compiles the C++ sources of this folder into one shared library, once per source, compiler and CPU, and caches it.

It may not know what the library does. Several processes may build at once: one compiles, the others wait for it. Where
a library of the same sources came with the package (`prebuild`), as in the container image, that one is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.cache_folder import cache_folder
from serving.temporary import temporary_folder

log = logging.getLogger("millrace.kernels")

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
COMMON = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same formula gives the same bits wherever it is inlined
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma")
AMX = (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16")
X86_FORMS = {
    "avx512_amx": AMX,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "avx512_vnni": AVX512,
    "avx2": ("-mavx2", "-mfma"),
}


class BuildError(RuntimeError):
    """The compiler refused the sources; the message carries its first lines."""


def find_compiler() -> str | None:
    """`$CXX`, else g++ or clang++ on the path; None when there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def forms() -> dict[str, tuple[str, ...]]:
    """Compiler flags of each form built for this architecture."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {**(X86_FORMS if x86 else {}), "plain": ()}


def library_path(compiler: str) -> Path:
    """Where the library for these sources, this compiler and this CPU lies once built."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout  # noqa: S603
    return cache_folder() / _library_name(version, _cpu_flags())


def prebuilt_path() -> Path:
    """Where a library of these sources lies if it came with them. It has every form that its compiler knew."""
    return PREBUILT / _library_name(b"", "")


def sources_digest() -> str:
    """Hex of the sources: kernels of other ones may give other bits."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _library_name(compiler: bytes, cpu: str) -> str:
    digest = hashlib.sha256(compiler + sources_digest().encode())
    digest.update(repr((COMMON, forms(), platform.machine(), cpu)).encode())
    return f"cpu-kernels-{digest.hexdigest()[:20]}.so"


def build(compiler: str, progress: Callable[[str], None] = log.info) -> Path:
    """The library's path, compiled first when it is not cached. Raises BuildError or OSError."""
    target = library_path(compiler)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            started = time.monotonic()
            progress(f"building the CPU kernels with {compiler} (once; cached in {target.parent})")
            compile_library(compiler, target)
            progress(f"built the CPU kernels in {time.monotonic() - started:.0f} s")
    return target


def compile_library(compiler: str, target: Path) -> None:
    """Compile every form that the compiler knows into one library at `target`, whose folder exists.

    Raises BuildError or OSError.
    """
    built = {name: flags for name, flags in forms().items() if not flags or _takes(compiler, name, flags)}
    units = [(SOURCES / "form.cpp", name, (*flags, f"-DMILLRACE_FORM={name}")) for name, flags in built.items()]
    units += [(SOURCES / f"{name}.cpp", name, ()) for name in ("threads", "exchange")]
    units += [(SOURCES / "exports.cpp", "exports", tuple(f"-DMILLRACE_HAS_{name}" for name in built))]
    with temporary_folder(target.parent) as folder:
        objects = [str(folder / f"{name}.o") for _, name, _ in units]
        commands = [
            [compiler, *COMMON, *flags, "-c", str(source), "-o", output]
            for (source, _, flags), output in zip(units, objects, strict=True)
        ]
        _run(commands)
        library = str(folder / "library.so")
        _run([[compiler, "-shared", "-pthread", "-o", library, *objects]])
        Path(library).replace(target)  # atomic: another process sees all of it or nothing


def _takes(compiler: str, form: str, flags: Sequence[str]) -> bool:
    """Whether the compiler, and its assembler, know a form's instructions. Older ones lack the newest."""
    assembly = 'asm("tilerelease");' if "-mamx-tile" in flags else ""
    command = [compiler, *flags, "-x", "c++", "-c", "-", "-o", "/dev/null"]
    asked = subprocess.run(command, input=assembly, capture_output=True, text=True, check=False)  # noqa: S603
    if asked.returncode:
        log.info("%s does not know the instructions of form %s, which is left out", compiler, form)
    return asked.returncode == 0


def _run(commands: list[list[str]]) -> None:
    """Runs the commands side by side; raises BuildError for the first that fails, once all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603
        for command in commands
    ]
    errors = [(process.communicate()[1], process.returncode) for process in running]
    for (text, code), command in zip(errors, commands, strict=True):
        if code != 0:
            raise BuildError(f"{' '.join(command)} failed: {text[:2000]}")


def cpu_name() -> str:
    """The model of this CPU, as the kernel tells it."""
    return _cpu_line("model name").partition(":")[2].strip()


def cpu_has_amx() -> bool:
    """True if the kernel tells all that the form `avx512_amx` needs; it may refuse a process some of it even so."""
    return {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"} <= set(_cpu_flags().split())


def _cpu_flags() -> str:
    return _cpu_line("flags", "Features")


def _cpu_line(*names: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(names)), "")
