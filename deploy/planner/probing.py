"""Measures rates of many placements at once, on several processes, and keeps each on disk so that nothing is lost.

It decides neither what to measure nor what the figures mean. A measurement depends on its arguments alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TextIO

import orjson

from deploy.planner.attainment import Attainment, AttainmentGoal, AttainmentModel, OfferedTraffic, merged
from deploy.planner.placements import CandidatePlacement, InstanceGroup
from deploy.planner.queueing import QueueingModel
from deploy.planner.rate_search import FoundGoodput, RateSearch

Measured = CandidatePlacement | InstanceGroup
"""A placement, or workers of one phase alone."""


@dataclass(frozen=True, slots=True)
class RateProbe:
    """One measurement: what a model says of something at a rate, over all seeds."""

    model: AttainmentModel
    what: Measured
    rate: float
    load: OfferedTraffic
    goal: AttainmentGoal
    seeds: tuple[int, ...]

    @property
    def key(self) -> str:
        """Of everything that the answer depends on."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()

    def measure(self) -> Attainment:
        """Seeds in order, none after the goal is out of reach."""
        runs: list[Attainment] = []
        for seed in self.seeds:
            if isinstance(self.what, InstanceGroup):
                assert isinstance(self.model, QueueingModel)
                runs.append(self.model.phase(self.what, self.load, self.rate, seed, self.goal))
            else:
                runs.append(self.model.attainment(self.what, self.load, self.rate, seed, self.goal))
            if runs[-1].given_up:
                break
        return merged(runs)


def _follow_parent() -> None:
    """Of a process that measures: Ctrl-C is the parent's to handle, and when that is gone nobody wants the answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _measure(probe: RateProbe) -> Attainment:
    logging.getLogger().setLevel(logging.CRITICAL)  # simulated routers tell of every request they place anew
    return probe.measure()


class ProbeStore(AbstractContextManager["ProbeStore"]):
    """A file of measurements, a line each, that a later run reads. Without a path nothing is kept.

    Lines that a kill has cut short are passed over. `resume` reads what is there; else the file begins anew. Raises
    ValueError where another process writes to it.
    """

    def __init__(self, path: Path | None, resume: bool = False):
        self._known: dict[str, Attainment] = {}
        self._file: TextIO | None = None
        self.reused = 0
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another plan writes to {path.parent}: give --output another folder") from None
        if not resume:
            self._file.truncate(0)
            return
        self._known = dict(_read(path))
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)  # nothing may go on with a line that was cut short

    def get(self, probe: RateProbe) -> Attainment | None:
        found = self._known.get(probe.key)
        self.reused += found is not None
        return found

    def put(self, probe: RateProbe, found: Attainment) -> None:
        if probe.key in self._known:
            return
        self._known[probe.key] = found
        if self._file is not None:
            self._file.write(orjson.dumps({"key": probe.key, **found.as_json()}).decode() + "\n")
            self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _read(path: Path) -> Iterable[tuple[str, Attainment]]:
    for line in path.read_bytes().splitlines():
        try:
            values = orjson.loads(line)
            yield values.pop("key"), Attainment.from_json(values)
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
            continue


class RateProber(AbstractContextManager["RateProber"]):
    """Runs searches side by side on `processes` processes; with 0 in this one. `told` hears of each measurement."""

    def __init__(
        self,
        load: OfferedTraffic,
        goal: AttainmentGoal,
        seeds: Sequence[int],
        store: ProbeStore,
        processes: int = 2,
        told: Callable[[], None] = lambda: None,
    ):
        self.load, self.goal, self.seeds, self.store, self.told = load, goal, tuple(seeds), store, told
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            self._pool = ProcessPoolExecutor(
                processes, mp_context=multiprocessing.get_context("spawn"), initializer=_follow_parent
            )

    def goodputs(
        self, model: AttainmentModel, wanted: Sequence[tuple[Measured, RateSearch]], load: OfferedTraffic | None = None
    ) -> list[FoundGoodput]:
        """Every search to its end, in the order given. What comes out does not depend on which ends first."""
        found = [FoundGoodput() for _ in wanted]
        running: dict[Future[Attainment], tuple[int, RateProbe]] = {}

        def go_on(index: int) -> None:
            what, search = wanted[index]
            while (rate := search.next_rate()) is not None:
                probe = RateProbe(model, what, rate, load or self.load, self.goal, self.seeds)
                known = self.store.get(probe) or (probe.measure() if self._pool is None else None)
                if known is None:
                    assert self._pool is not None
                    running[self._pool.submit(_measure, probe)] = index, probe
                    return
                self._note(found[index], search, probe, known)
            found[index].rate = search.answer

        for index in range(len(wanted)):
            go_on(index)
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                index, probe = running.pop(future)
                self._note(found[index], wanted[index][1], probe, future.result())
                go_on(index)
        return found

    def _note(self, found: FoundGoodput, search: RateSearch, probe: RateProbe, what: Attainment) -> None:
        self.store.put(probe, what)
        found.tried[probe.rate] = what
        search.record(probe.rate, probe.goal.of(what))
        self.told()

    def curve(
        self, model: AttainmentModel, what: Measured, rates: Sequence[float], load: OfferedTraffic | None = None
    ) -> list[Attainment]:
        """Whole runs at these rates, whatever they attain."""
        goal = replace(self.goal, share=0.0)
        probes = [RateProbe(model, what, rate, load or self.load, goal, self.seeds) for rate in rates]
        found = {probe.rate: known for probe in probes if (known := self.store.get(probe)) is not None}
        left = [probe for probe in probes if probe.rate not in found]
        measured = map(_measure, left) if self._pool is None else self._pool.map(_measure, left)
        for probe, each in zip(left, measured, strict=True):
            self.store.put(probe, each)
            found[probe.rate] = each
            self.told()
        return [found[rate] for rate in rates]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        if kind is not None:  # nobody waits for what is being measured
            for process in list(self._pool._processes.values()):
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
