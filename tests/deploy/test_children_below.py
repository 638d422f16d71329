"""Which children of a front are forked: its workers, where there are several and none of them has a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from deploy import serve
from deploy.children import alike
from deploy.control.below import ChildProcesses
from deploy.runtime.settings import Settings, read_settings
from deploy.serve import PRELOAD, children_below
from serving.messages import Role

SEVERAL = {Role.PREFILL: 1, Role.DECODE: 1}


def forked(counts: dict[Role, int], nodes: int = 0) -> set[str]:
    """The words that commands of forked children begin with."""
    settings: Settings = read_settings({})
    below = children_below(settings, alike(counts, nodes, settings), Path("model"), "router:1", None)
    assert isinstance(below, ChildProcesses)
    return set(below.supervisor.forking)


def test_several_workers_are_forked_and_nodes_of_the_pool_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node needs no torch, which it would hold."""
    monkeypatch.setattr(serve, "visible_devices", lambda environ: [])
    assert forked(SEVERAL, nodes=2) == {"prefill", "decode", "mixed"}
    assert forked({Role.MIXED: 2}) == forked(SEVERAL)
    assert forked({Role.MIXED: 1}, nodes=2) == set(), "one has nobody to share with"


def test_none_is_forked_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that a module has spoken to before a fork is of no use after it."""
    monkeypatch.setattr(serve, "visible_devices", lambda environ: ["0"])
    assert forked(SEVERAL) == set()


def test_what_workers_import_is_there_to_be_imported() -> None:
    for name in PRELOAD:
        assert importlib.import_module(name)
