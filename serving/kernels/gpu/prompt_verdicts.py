"""Keeps what FlashInfer was found to be worth, and why it is not used, by device, versions, source and shape.

One process tries and measures while others that start beside it wait, and all of them then hold to what it found. A
file that cannot be read counts for nothing. A process that ends while it tries leaves a mark, which nobody holds any
more: a library can end it without a word. Where one end takes several with it, that is one. It knows no kernels.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from serving.cache_folder import cache_folder, one_at_a_time, written_whole
from serving.temporary import gone_at_the_end

log = logging.getLogger(__name__)

TRYING = ".trying"


@dataclass(frozen=True, slots=True)
class LibraryVerdict:
    """FlashInfer attends steps of `least` new tokens and more; with None no step, for this reason."""

    least: int | None
    reason: str
    failed: bool = False  # it did not run, or gave other numbers; it was not measured


@dataclass(slots=True)
class Verdicts:
    """Of one device, its versions and our source (`kind`), in one file that repeats them in clear."""

    path: Path
    kind: dict[str, str]

    @staticmethod
    def of(kind: Mapping[str, str], folder: Path | None = None) -> Verdicts:
        digest = hashlib.sha256(json.dumps(sorted(kind.items())).encode()).hexdigest()[:16]
        return Verdicts((folder or cache_folder()) / f"prompts-{digest}.json", dict(kind))

    @contextmanager
    def held(self) -> Iterator[dict[str, LibraryVerdict]]:
        """By work; no other process has them meanwhile. What has changed is kept, where nothing is raised or not."""
        with one_at_a_time(self.path):
            before = self._read()
            kept = dict(before)
            try:
                yield kept
            finally:
                if kept != before:
                    self._write(kept)

    @contextmanager
    def trying(self, work: str) -> Iterator[None]:
        """A mark says meanwhile that this process tries FlashInfer for this work. Enter it while they are `held`.

        One that leaves on a signal has not crashed, and takes its mark with it.
        """
        with ExitStack() as marked:
            with suppress(OSError):  # a folder that cannot be written keeps no verdicts either
                folder, prefix = self.path.parent, f"{self._mark(work)}{self.crashes(work)}-"
                mark = marked.enter_context(NamedTemporaryFile(dir=folder, prefix=prefix, suffix=TRYING, delete=False))
                marked.enter_context(gone_at_the_end(Path(mark.name)))
                fcntl.flock(mark, fcntl.LOCK_EX)  # let go of as the process ends, however it does
            yield

    def crashes(self, work: str) -> int:
        """How often processes have ended while they tried: those that began after as many crashes are one."""
        return len({mark.name.removeprefix(self._mark(work)).partition("-")[0] for mark in self._left(work)})

    def forget_crashes(self, work: str) -> None:
        for mark in self._left(work):
            with suppress(OSError):  # what cannot be removed here is another user's to forget
                mark.unlink()

    def _left(self, work: str) -> list[Path]:
        """The marks of processes that have ended while they tried."""
        return [mark for mark in self.path.parent.glob(f"{self._mark(work)}*{TRYING}") if _nobody_holds(mark)]

    def _mark(self, work: str) -> str:
        return f"{self.path.stem}-{hashlib.sha256(work.encode()).hexdigest()[:16]}-"

    def _read(self) -> dict[str, LibraryVerdict]:
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s cannot be read, FlashInfer is tried anew: %s", self.path, error)
            return {}
        if not isinstance(content, dict) or content.get("kind") != self.kind:
            return {}
        told = content.get("verdicts")
        found = {work: _verdict(entry) for work, entry in told.items()} if isinstance(told, dict) else {}
        return {work: verdict for work, verdict in found.items() if verdict is not None}

    def _write(self, kept: Mapping[str, LibraryVerdict]) -> None:
        content = {"kind": self.kind, "verdicts": {work: asdict(verdict) for work, verdict in kept.items()}}
        try:
            written_whole(self.path, json.dumps(content))
        except OSError as error:
            log.warning("what FlashInfer is worth is not kept in %s: %s", self.path, error)


def _nobody_holds(mark: Path) -> bool:
    with suppress(OSError), mark.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _verdict(entry: Any) -> LibraryVerdict | None:
    """None where anything is not as it should be."""
    if not isinstance(entry, dict) or entry.keys() != {"least", "reason", "failed"}:
        return None
    least, reason, failed = entry["least"], entry["reason"], entry["failed"]
    counted = least is None or (type(least) is int and least > 0 and not failed)
    return LibraryVerdict(least, reason, failed) if counted and type(reason) is str and type(failed) is bool else None
