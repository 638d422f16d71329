"""Keeps which tiles kernels were found to be quickest with over a restart: a small file for each device and version.

A file that cannot be read, or is of another kind, counts for nothing: the kernels are then tuned as they are first
used. It knows tuners by what they have chosen, and nothing of kernels.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from serving.cache_folder import cache_folder, one_at_a_time, written_whole

log = logging.getLogger(__name__)


class Tuner(Protocol):
    """As much of Triton's Autotuner as is kept: of `configs` it has chosen one for each key in `cache`."""

    configs: list[Any]
    cache: dict[tuple[Any, ...], Any]


class TunedTiles:
    """The choices of `tuners`, by name, for `kind`: device, versions and source, which a file repeats in clear."""

    def __init__(self, tuners: Mapping[str, Tuner], kind: Mapping[str, str], folder: Path | None = None):
        digest = hashlib.sha256(json.dumps(sorted(kind.items())).encode()).hexdigest()[:16]
        self.path = (folder or cache_folder()) / f"tiles-{digest}.json"
        self.tuners = tuners
        self.kind = dict(kind)

    @property
    def chosen(self) -> int:
        """How many choices the tuners have made."""
        return sum(len(tuner.cache) for tuner in self.tuners.values())

    def restore(self) -> int:
        """Let the tuners choose what was kept, and time nothing for it; how many choices those are."""
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s cannot be read, kernels are tuned anew: %s", self.path, error)
            return 0
        restored = 0
        for name, tuner in self.tuners.items():
            known = {str(config): config for config in tuner.configs}
            for key, chosen in _choices(content, self.kind, name):
                if chosen in known:
                    tuner.cache.setdefault(key, known[chosen])
                    restored += 1
        return restored

    def keep(self) -> None:
        """Write what is chosen, beside what other processes have kept meanwhile; where that fails the log says so.

        All of it is written or nothing.
        """
        with one_at_a_time(self.path):
            self.restore()  # for the same key our own choice stays
            choices = {
                name: [[key, str(config)] for key, config in tuner.cache.items()] for name, tuner in self.tuners.items()
            }
            try:
                written_whole(self.path, json.dumps({"kind": self.kind, "choices": choices}))
            except (OSError, TypeError) as error:  # TypeError: a key that JSON has no word for
                log.warning("the tiles of kernels are not kept in %s: %s", self.path, error)


def _choices(content: Any, kind: Mapping[str, str], name: str) -> Sequence[tuple[tuple[Any, ...], str]]:
    """Of one tuner, as pairs of a key and a configuration; none where anything is not as it should be."""
    if not isinstance(content, dict) or content.get("kind") != dict(kind):
        return []
    choices = content.get("choices")
    pairs = choices.get(name) if isinstance(choices, dict) else None
    if not isinstance(pairs, list):
        return []
    return [
        (tuple(pair[0]), pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and isinstance(pair[1], str)
        if all(isinstance(part, str | int | float) for part in pair[0])
    ]
