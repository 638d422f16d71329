"""What holds for every test: property tests are not timed, since the machine they run on may be busy.

Threads of torch that have nothing to do sleep: spinning, they would take the cores from the test beside them.
`--hypothesis-profile=fast`, as `make test-fast` asks for, tries few examples, whatever number a test asks for itself.
Processes of pytest-xdist share a run: one has all tests of real servers, the other or others begin with the rest.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from serving import logs

FEW = 15
ROOT = Path(__file__).parents[1]
FLOW = ROOT / "tests" / "flow"
REAL_SERVERS = re.compile(r"from tests\.flow\.(server|services|chaos)\b")

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is first imported, here and in child processes
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a hundred child processes would each compile all of our source

hypothesis.settings.register_profile("millrace", deadline=None)
hypothesis.settings.register_profile("fast", deadline=None, max_examples=FEW)
hypothesis.settings.load_profile("millrace")


def pytest_configure(config: pytest.Config) -> None:
    """Test files, which are read after this, ask for numbers of examples of their own: few have to do."""
    if config.getoption("--hypothesis-profile") != "fast":
        return
    make = hypothesis.settings.__init__

    def few(self: hypothesis.settings, *given: Any, **named: Any) -> None:
        if isinstance(named.get("max_examples"), int):
            named["max_examples"] = min(named["max_examples"], FEW)
        make(self, *given, **named)

    hypothesis.settings.__init__ = few  # type: ignore[method-assign]


@cache
def starts_processes(file: Path) -> bool:
    """True for the flow tests of real servers, which wait much and would measure each other."""
    return file.parent == FLOW and REAL_SERVERS.search(file.read_text()) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of pytest-xdist the longest first: the tests of real servers, then files with any that is slow."""
    if hasattr(config, "workerinput"):
        servers = {item.path for item in items if starts_processes(item.path)}
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path not in servers, item.path not in slow))


class ProcessesApart(LoadFileScheduling):
    """Gives a file's tests to one process, and all that start servers to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "processes" if starts_processes(ROOT / file) else file


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What a test has had set up of logging, as by a command in this process, ends with it."""
    root, formatter = logging.getLogger(), logs._formatter[0]
    level, handlers = root.level, root.handlers[:]
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    if logs._formatter[0] is not formatter:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
        logs._formatter[0] = formatter
    root.setLevel(level)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ProcessesApart:
    return ProcessesApart(config, log)
