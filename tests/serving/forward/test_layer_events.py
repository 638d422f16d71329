"""Each layer is notified in turn once its event has come, and none after the step."""

from __future__ import annotations

import threading

import pytest
import torch

from serving.forward.layer_events import EventNotifier, layer_notifier


class Mark:
    """A device's event, passed when the test says so."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        assert self.passed.wait(20)


def test_layers_are_notified_as_the_device_passes_them() -> None:
    marks = [Mark() for _ in range(3)]
    notifier, heard = EventNotifier(marks), threading.Semaphore(0)
    told: list[int] = []

    def layer_done(layer: int) -> None:
        told.append(layer)
        heard.release()

    with notifier(layer_done) as written:
        for layer in range(3):
            written(layer)  # launching waits for nothing
        assert told == []
        marks[1].passed.set()
        marks[0].passed.set()
        assert heard.acquire(timeout=20) and heard.acquire(timeout=20)
        assert told == [0, 1]
        marks[2].passed.set()
    assert told == [0, 1, 2], "all have been notified when the step is over"


def test_a_step_that_leaves_notifies_what_it_has_launched() -> None:
    marks = [Mark() for _ in range(3)]
    for mark in marks:
        mark.passed.set()
    notifier, told = EventNotifier(marks), []
    for _ in range(2):
        with notifier(told.append) as written:
            written(0)
    assert told == [0, 0]


def test_a_listener_that_fails_fails_the_step() -> None:
    mark = Mark()
    mark.passed.set()

    def fail(_layer: int) -> None:
        raise OSError("no listener")

    with pytest.raises(OSError, match="no listener"), EventNotifier([mark])(fail) as written:
        written(0)


def test_on_the_cpu_a_launch_is_a_result() -> None:
    notifier, told = layer_notifier(2, torch.device("cpu")), []
    with notifier(told.append) as written:
        written(0)
        assert told == [0]
