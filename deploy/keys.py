"""`millrace keys create|list|revoke`: the file of API keys that a server reads (--api-keys-file).

A new key is shown once; what is written is its hash. The file is replaced as a whole, so that a server reads the old
one or the new one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from bench.report import aligned
from deploy.runtime.key_file import PEPPER, read_keys, read_pepper
from kvcache.pool.block import namespace_of
from serving.api.keyring import PREFIX, KeyEntry, Keyring, key_digest, parse_keys, prefix_owner, write_keys
from serving.api.rate_limit import KeyLimits
from serving.messages import owned
from serving.options import ENV_PREFIX

FILE = ENV_PREFIX + "API_KEYS_FILE"
PEPPER_FILE = ENV_PREFIX + "KEY_PEPPER_FILE"
ID_BYTES, SECRET_BYTES = 6, 24  # random ones: 192 bits nobody guesses
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """What is stored, and what its user is given, once."""

    entry: KeyEntry
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace keys`."""
    add = parser.add_argument
    add("action", choices=("create", "list", "revoke"), help="make a key and show it once; show all; take one away")
    add("id", nargs="?", help="revoke: the key's id, which stands between the dashes of mr-ID-SECRET")
    add("--file", metavar="FILE", help=f"the file of keys (default: {FILE})")
    add("--key-pepper-file", metavar="FILE", help=f"file of the secret that keys are hashed with (default: {PEPPER})")
    add("--tenant", metavar="NAME", help="create: whose key it is; tenants share no cached prefixes")
    add("--requests-per-minute", type=int, metavar="N", help="create: at most (default: the server's)")
    add("--tokens-per-minute", type=int, metavar="N", help="create: of prompts and outputs (default: the server's)")
    add("--concurrent-requests", type=int, metavar="N", help="create: in progress at a time (default: any)")
    add("--classes", nargs="+", default=[], metavar="NAME", help="create: service classes it may name (default: all)")
    add("--priority", type=int, metavar="N", help="create: the most urgent a request may be, smaller is (default: any)")
    add(
        "--expires-in", metavar="TIME", help="create: how long it is valid, such as 90d or 12h (default: until revoked)"
    )
    add("--share-prefixes", default="", metavar="GROUP", help="create: share cached prefixes with tenants that name it")
    add("--operator", action="store_true", help="create: it may read /audit, /load and /v1/workers, of all tenants")


def run(arguments: argparse.Namespace) -> int:
    """The process's exit code. Raises ValueError for arguments that cannot be meant, ConfigError, OSError."""
    name = arguments.file or os.environ.get(FILE)
    if not name:
        raise ValueError(f"name the file of keys: --file FILE or {FILE}")
    if arguments.action != "revoke" and arguments.id is not None:
        raise ValueError(f"keys {arguments.action} takes no id, but {arguments.id!r} is given: ids are made")
    path = Path(name)
    pepper = read_pepper(arguments.key_pepper_file or os.environ.get(PEPPER_FILE), os.environ)
    Keyring(pepper, {})  # a pepper that no server takes makes no keys
    if arguments.action == "list":
        print(aligned(rows(read_keys(path), pepper), texts=9))
    elif arguments.action == "create":
        with changing(path) as entries:
            made = issue(arguments, pepper, time.time())
            entries[made.entry.id] = made.entry
        print(made.text)
    else:
        with changing(path) as entries:
            if entries.pop(arguments.id or "", None) is None:
                raise ValueError(f"revoke which key? There is no {arguments.id!r} in {path}")
    return 0


def issue(arguments: argparse.Namespace, pepper: bytes, now: float) -> IssuedKey:
    """A new key, at a time in Unix seconds. Raises ValueError."""
    if not arguments.tenant:
        raise ValueError("create a key for whom? Give --tenant NAME")
    key_id, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
    entry = KeyEntry(
        id=key_id,
        tenant=arguments.tenant,
        digest=key_digest(pepper, key_id, secret),
        limits=KeyLimits(
            requests=arguments.requests_per_minute,
            tokens=arguments.tokens_per_minute,
            concurrent=arguments.concurrent_requests,
        ),
        classes=tuple(arguments.classes),
        priority=arguments.priority,
        expires=None if arguments.expires_in is None else int(now) + seconds_of(arguments.expires_in),
        share_prefixes=arguments.share_prefixes,
        operator=arguments.operator,
    )
    parse_keys(write_keys({key_id: entry}), "the new key")
    return IssuedKey(entry, f"{PREFIX}-{key_id}-{secret}")


def seconds_of(text: str) -> int:
    """`90d`, `12h`, `30m` or `45s`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise ValueError(f"--expires-in {text}: give a time such as 90d, 12h, 30m or 45s")
    return int(match[1]) * _UNITS[match[2]]


@contextmanager
def changing(path: Path) -> Iterator[dict[str, KeyEntry]]:
    """The entries of the file, to be changed; it is written where the block ends well. One writer at a time.

    Raises ConfigError, also where no server would take the file, and OSError.
    """
    path = path.resolve()  # a link stays one, and a writer that names the file itself waits for the same lock
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        entries = read_keys(path) if path.exists() else {}
        yield entries
        data = write_keys(entries)
        parse_keys(data, str(path))
        replace_file(path, data)
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_file(path: Path, data: bytes) -> None:
    """All of it or nothing. A new file is for its owner's eyes alone; another stays its owner's, with its mode.

    Else root would take it away from a server, for which no key is revoked then.
    """
    was = path.stat() if path.exists() else None
    with NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}-", delete=False) as part:
        try:
            if was is not None:
                os.fchown(part.fileno(), was.st_uid, was.st_gid)
            os.fchmod(part.fileno(), 0o600 if was is None else stat.S_IMODE(was.st_mode))
            part.write(data)
            part.flush()
            os.fsync(part.fileno())
            Path(part.name).replace(path)
        except BaseException:
            Path(part.name).unlink()
            raise


def rows(entries: Mapping[str, KeyEntry], pepper: bytes) -> list[list[str]]:
    """A table of keys. The namespace is that of the tenant's blocks in a KV pool, for --quota."""
    found = [["id", "tenant", "group", "requests/min", "tokens/min", "at a time", "classes", "expires", "namespace"]]
    for entry in entries.values():
        numbers = (entry.limits.requests, entry.limits.tokens, entry.limits.concurrent)
        until = "-" if entry.expires is None else time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(entry.expires))
        shown = ["-" if number is None else f"{number}" for number in numbers]
        space = namespace_of(owned(prefix_owner(pepper, entry), ""))
        group, classes = entry.share_prefixes or "-", ",".join(entry.classes) or "all"
        found.append([entry.id, entry.tenant, group, *shown, classes, until, space])
    return found
