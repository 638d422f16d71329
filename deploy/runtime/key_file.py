"""The file of API keys of a running server: read when it starts, and again whenever it has changed.

A file that cannot be read changes nothing: the last good keys stay, and the log and the metrics say so.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Mapping
from pathlib import Path

from serving.api.keyring import KeyEntry, Keyring, parse_keys
from serving.given_files import read_given
from serving.options import ENV_PREFIX, ConfigError
from serving.service_config import ServiceConfig

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
MOST_BYTES = 16 << 20
PEPPER = ENV_PREFIX + "KEY_PEPPER"

_Stamp = tuple[int, int, int, int] | None  # what changes with a file: None where there is none


class UnreadableKeys(ConfigError):
    """The file is not there, or may not be read now: that may change with nothing to be seen at the file."""


def read_pepper(path: str | None, environ: Mapping[str, str]) -> bytes:
    """From the file, or else the environment; without the white space around it. Raises ConfigError."""
    if path is not None:
        try:
            return read_given(path).strip()
        except OSError as error:
            raise ConfigError(f"--key-pepper-file {path}: {error.strerror}", param="key_pepper_file") from None
    given = environ.get(PEPPER, "").strip()
    if not given:
        told = f"API keys need a pepper: set {PEPPER}, or name its file with --key-pepper-file"
        raise ConfigError(told, param="key_pepper_file")
    return given.encode("utf-8", "surrogateescape")


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """Raises ConfigError, and UnreadableKeys, which is one."""
    try:
        data = read_given(path, MOST_BYTES)
    except OSError as error:
        kind = ConfigError if error.errno == errno.EFBIG else UnreadableKeys
        raise kind(f"--api-keys-file {path}: {error.strerror}", param="api_keys_file") from None
    return parse_keys(data, str(path))


def key_file(service: ServiceConfig, environ: Mapping[str, str]) -> KeyFile | None:
    """None where none is configured. Raises ConfigError."""
    if service.api_keys_file is None:
        return None
    return KeyFile(Path(service.api_keys_file), read_pepper(service.key_pepper_file, environ))


class KeyFile:
    """Keeps `keyring` as the file at `path` is. Raises ConfigError where that cannot be read at first."""

    def __init__(self, path: Path, pepper: bytes):
        self.path = path
        self._seen = self._stamp()
        self._unread = False  # the last time: a host that has no room for another file has it a moment later
        self.keyring = Keyring(pepper, read_keys(path))
        self.loads = 1
        self.failures = 0

    def _stamp(self) -> _Stamp:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    async def watch(self) -> None:
        """Look at the file again and again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Read it if it has changed since it was looked at last, or could not be read then."""
        stamp = await asyncio.to_thread(self._stamp)
        changed, again = stamp != self._seen, self._unread
        if not changed and not again:
            return
        self._seen = stamp
        try:
            entries = await asyncio.to_thread(read_keys, self.path)
        except ConfigError as error:
            self._unread = isinstance(error, UnreadableKeys)
            if changed:
                self.failures += 1
                log.error("API keys stay as they were: %s", error)
            return
        self._unread = False
        self.keyring.replace(entries)
        self.loads += 1
        log.info("%d API keys read from %s", len(entries), self.path)
