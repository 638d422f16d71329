"""Tiles over a restart: what one process has chosen the next does not time again, and nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.kernels.tuned_tiles import TunedTiles

KIND = {"device": "NVIDIA H100", "capability": "9.0", "triton": "3.6.0", "source": "ab12"}
KEY = (4096, 6144, 256, "torch.int8", "torch.bfloat16")
OTHER = (4096, 6144, 16, "torch.int8", "torch.bfloat16")


class PlayedTuner:
    def __init__(self, *configs: str) -> None:
        self.configs: list[Any] = list(configs)
        self.cache: dict[tuple[Any, ...], Any] = {}


def tuned(folder: Path, chosen: str | None = None, kind: dict[str, str] = KIND) -> tuple[TunedTiles, PlayedTuner]:
    tuner = PlayedTuner("small", "large")
    if chosen is not None:
        tuner.cache[KEY] = chosen
    return TunedTiles({"many": tuner}, kind, folder), tuner


def test_the_next_process_chooses_the_same(tmp_path: Path) -> None:
    tuned(tmp_path / "cache", "large")[0].keep()
    tiles, tuner = tuned(tmp_path / "cache")
    assert tiles.restore() == 1 and tuner.cache == {KEY: "large"}
    left = {file.name for file in (tmp_path / "cache").iterdir()}
    assert left == {tiles.path.name, tiles.path.with_suffix(".lock").name}, "nothing else is left there"


def test_processes_that_tune_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """Before: the last one's choices alone were kept."""
    first, _ = tuned(tmp_path, "large")
    second, tuner = tuned(tmp_path)
    tuner.cache[OTHER] = "small"
    first.keep()
    second.keep()
    tiles, tuner = tuned(tmp_path)
    assert tiles.restore() == 2 and tuner.cache == {KEY: "large", OTHER: "small"}
    own, tuner = tuned(tmp_path, "small")
    own.keep()
    assert tuner.cache == {KEY: "small", OTHER: "small"}, "of two choices its own"


@pytest.mark.parametrize("name", KIND)
def test_another_device_or_version_tunes_for_itself(tmp_path: Path, name: str) -> None:
    first, _ = tuned(tmp_path, "large")
    first.keep()
    other, tuner = tuned(tmp_path, kind=KIND | {name: "another"})
    assert other.restore() == 0 and not tuner.cache
    other.path.write_bytes(first.path.read_bytes())  # even under its name
    assert other.restore() == 0 and not tuner.cache


def test_a_choice_that_is_no_more_offered_is_made_anew(tmp_path: Path) -> None:
    tuned(tmp_path, "medium")[0].keep()
    tiles, tuner = tuned(tmp_path)
    assert tiles.restore() == 0 and not tuner.cache


ODD = {"kind": KIND, "choices": {"many": [1, [2], [3, 4], [[[1]], "large"], [[{}], "small"]]}}


@pytest.mark.parametrize("content", ["", "[]", "{", "[[1]]", json.dumps({"kind": KIND}), json.dumps(ODD)])
def test_a_damaged_file_counts_for_nothing(tmp_path: Path, content: str) -> None:
    tiles, tuner = tuned(tmp_path)
    assert tiles.restore() == 0
    tiles.path.write_text(content)
    assert tiles.restore() == 0 and not tuner.cache


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    tuned(tmp_path / "file", "large")[0].keep()
    assert "are not kept" in caplog.text


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a part of a file, nor a worker that does not start."""
    tiles, tuner = tuned(tmp_path, "large")
    tuner.cache[(object(),)] = "small"
    tiles.keep()
    lock = tiles.path.with_suffix(".lock")
    assert "are not kept" in caplog.text and list(tmp_path.iterdir()) == [lock]
    del tuner.cache[next(key for key in tuner.cache if key != KEY)]
    tiles.path.mkdir()  # it cannot be replaced by a file
    tiles.keep()
    assert set(tmp_path.iterdir()) == {tiles.path, lock}
