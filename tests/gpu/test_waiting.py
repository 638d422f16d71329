"""The guard against waiting, where torch warns of its mode as it does the first time; no device needed."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.gpu.waiting import no_waiting


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    def set_mode(mode: str) -> None:
        told.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return told


def test_that_torch_warns_of_its_mode_is_no_error(modes: list[str]) -> None:
    with no_waiting():
        assert modes == ["error"]
    assert modes == ["error", "default"]


def test_the_mode_ends_with_a_failing_part(modes: list[str]) -> None:
    with pytest.raises(KeyError), no_waiting():
        raise KeyError
    assert modes == ["error", "default"]
