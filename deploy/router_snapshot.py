"""Keeps what a router has learned over a restart: its snapshot in a file of the cache folder, written now and then.

What cannot be read counts for nothing: the router begins without it. What is kept is router.snapshot's to say.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from router.placer import Placer
from router.snapshot import packed, parts, restore
from serving.background import BackgroundTasks
from serving.cache_folder import cache_folder
from serving.given_files import read_given

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
SAVE_SECONDS = 60.0
PAUSE_SECONDS = 0.01  # between two pieces, so that a snapshot of a million blocks takes three seconds and delays nobody


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A file at `path`."""

    path: Path

    def read(self) -> bytes | None:
        """What was kept; None, with a line in the log where there is something that cannot be read."""
        try:
            return read_given(self.path, MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read, the router begins with nothing learned: %s", self.path, error)
            return None

    def write(self, data: bytes) -> None:
        """All of it or nothing; where that fails a line in the log says so."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("wb", dir=self.path.parent, suffix=".part", delete=False) as part:
                try:
                    part.write(data)
                    part.flush()
                    Path(part.name).replace(self.path)
                except OSError:
                    Path(part.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            log.warning("what the router has learned cannot be kept: %s", error)


def snapshot_file(model: str, host: str, port: int) -> SnapshotFile:
    """Where the router that serves this model there keeps what it learns; several of a host do not share it."""
    digest = hashlib.sha256(json.dumps([model, host, port]).encode()).hexdigest()[:20]
    return SnapshotFile(cache_folder() / f"router-{digest}.snapshot")


class SnapshotKeeper:
    """The snapshots of one router. `load` before it takes requests, `start` then, `stop` when it has ended."""

    def __init__(self, placer: Placer, file: SnapshotFile):
        self.placer = placer
        self.file = file
        self._background = BackgroundTasks()
        self._kept = b""
        self._writing: asyncio.Future[None] | None = None  # a thread's: cancelling does not end it

    def load(self) -> None:
        """Go on from what an earlier life has kept, if there is any."""
        data = self.file.read()
        if data is None:
            return
        try:
            restored = restore(self.placer, data)
        except ValueError as error:
            log.warning("%s is no snapshot that can be used, the router begins with nothing: %s", self.file.path, error)
        else:
            index = self.placer.fleet.prefixes
            blocks = f", and {len(index)} of their blocks" if index is not None else ""
            log.info("%d workers are known from before%s", restored.workers, blocks)
            if restored.lost:
                told = ", ".join(restored.lost)
                log.warning("%s is of another version; the router begins without: %s", self.file.path, told)

    def start(self) -> None:
        """Save now and then from now on. Call on a running event loop."""
        self._background.start("snapshots", self._save_now_and_then)

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save(PAUSE_SECONDS)

    async def save(self, pause: float = 0.0) -> None:
        """Write what there is now, unless that is written already. Others run between its pieces."""
        pieces = []
        for piece in parts(self.placer):
            pieces.append(piece)
            await asyncio.sleep(pause)
        data = await asyncio.to_thread(packed, pieces)
        if data != self._kept:
            self._writing = asyncio.ensure_future(asyncio.to_thread(self.file.write, data))
            await asyncio.shield(self._writing)
            self._kept = data

    async def stop(self) -> None:
        """Save a last time; nothing is written afterwards."""
        await self._background.stop()
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self.save()
