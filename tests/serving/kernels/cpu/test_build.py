"""Building and caching the library: once for several at a time, and never a failure for want of a compiler."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import pytest

from serving.cache_folder import cache_folder
from serving.kernels.cpu import build as builder
from serving.kernels.cpu.build import BuildError, find_compiler
from serving.kernels.cpu.extension import amx_unused, forms, open_library
from serving.kernels.cpu.prebuild import prebuild


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache, and a copy of the sources that builds the plain form alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in (*builder.SOURCES.glob("*.h"), *builder.SOURCES.glob("*.cpp")):
        shutil.copy(source, sources)
    monkeypatch.setattr(builder, "SOURCES", sources)
    monkeypatch.setattr(builder, "forms", lambda: {"plain": ("-O0",)})
    return sources


def compiler() -> str:
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def test_builds_once_for_all_who_ask_together(small_sources: Path) -> None:
    lines: list[str] = []
    paths: list[Path] = []
    workers = [threading.Thread(target=lambda: paths.append(builder.build(compiler(), lines.append))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(paths)) == 1
    assert [line.split()[0] for line in lines] == ["building", "built"]
    assert paths[0].parent == cache_folder()
    library = open_library()
    assert library is not None and forms(library) == ["plain"]
    (small_sources / "threads.h").write_text((small_sources / "threads.h").read_text() + "\n")
    assert builder.library_path(compiler()) != paths[0]


def test_broken_sources_leave_no_library(small_sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    (small_sources / "threads.cpp").write_text("not C++")
    with pytest.raises(BuildError, match=r"threads\.cpp"):
        builder.build(compiler())
    assert not list(cache_folder().glob("*.so"))
    with caplog.at_level(logging.WARNING, "millrace.kernels"):
        assert open_library() is None
    assert len(caplog.records) == 1


def test_a_form_that_the_compiler_does_not_know_is_left_out(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a GCC from before its instructions: the others are built all the same."""
    older = tmp_path / "older-g++"
    refuse = 'for flag; do case "$flag" in -mnew*) echo "unrecognized option $flag" >&2; exit 1;; esac; done'
    older.write_text(f'#!/bin/sh\n{refuse}\nexec {compiler()} "$@"\n')
    older.chmod(0o755)
    monkeypatch.setattr(builder, "forms", lambda: {"avx512_amx": ("-mnewest",), "plain": ("-O0",)})
    library = builder.build(str(older))
    assert library.exists() and b"millrace_linear_plain" in library.read_bytes()
    assert b"avx512_amx" not in library.read_bytes()


ALL_OF_AMX = ("avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


def test_a_compiler_that_leaves_out_the_cpu_s_amx_is_told_of(
    small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    library = open_library()
    assert library is not None
    for missing in (*ALL_OF_AMX, None):
        flags = " ".join(name for name in ALL_OF_AMX if name != missing)
        monkeypatch.setattr(builder, "_cpu_flags", lambda flags=flags: f"flags : {flags}")
        reason = amx_unused(library)
        assert reason is None if missing else reason is not None and "the compiler that made the kernels" in reason


def test_no_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, "millrace.kernels"):
        assert open_library() is None
    assert [record.getMessage() for record in caplog.records] == [
        "no C++ compiler found: the CPU runs the slower torch kernels"
    ]


def test_a_library_that_came_with_the_sources_needs_no_compiler(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    monkeypatch.setattr(builder, "PREBUILT", tmp_path / "prebuilt")
    assert prebuild() == builder.prebuilt_path()
    assert open_library() is not None and not cache_folder().exists(), "nor is it built again where there is one"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    library = open_library()
    assert library is not None and forms(library) == ["plain"]
    assert not cache_folder().exists()
    (small_sources / "threads.h").write_text((small_sources / "threads.h").read_text() + "\n")
    assert open_library() is None, "a library of other sources is not theirs"
