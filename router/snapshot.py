"""What a router keeps over a restart, as bytes: its prefix index, link costs, output lengths and calibration.

Pure: the file is the caller's. A part that cannot be read changes nothing; what is kept of workers that do not come
back is dropped (router.returning).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from router.calibration import Calibration
from router.goodput import Goodput
from router.link_costs import LinkCosts
from router.output_lengths import OutputLengths
from router.placer import Placer
from router.prefix_index import KEY_BYTES, PrefixIndex
from router.trust import Ways

MAGIC = b"millrace router 1\n"
DIGEST = 32  # bytes
LENGTH = 4  # bytes of a count
WIDEST_MASK = 1 << 13  # bytes
MOST_MASKS = 65_536  # that are remembered while a snapshot is made
CALIBRATED = {  # the parts of a calibration, in words
    "first": "calibration of TTFT",
    "further": "calibration of TPOT",
    "usual": "usual TPOTs",
    "steps": "tokens a step",
    "texts": "tokens a step by kind of text",
}
RETURN_SILENCES = 3  # times the silence after which a worker is suspect: until then one that was kept may report


def parts(placer: Placer) -> Iterator[bytes]:
    """The snapshot piece by piece, each made in a few milliseconds: let others run in between.

    What changes between two pieces is in some of them: events are numbered before their blocks are read, so that the
    worker repeats those that came meanwhile.
    """
    fleet, index = placer.fleet, placer.fleet.prefixes
    here = {instance: entry.status.name for instance, entry in fleet.registry.workers.items()}
    names = {**fleet.returning.names, **here}
    numbers = {} if index is None else {name: found for name, found in index.numbers().items() if name in names}
    width, shards = (0, 0) if index is None else (index.mask_bytes, index.shards)
    learned = {
        "outputs": placer.outputs.kept(),
        "links": fleet.link_costs.kept(),
        "calibration": placer.policy.calibration.kept() if isinstance(placer.policy, Goodput) else None,
    }
    header = {"names": names, "numbers": numbers, "mask_bytes": width, "shards": shards, "learned": learned}
    yield _counted(orjson.dumps(header))
    masks = _Masks(width)
    for shard in range(shards):
        assert index is not None
        yield _shard(index.entries(shard), masks)


def _counted(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH, "little") + data


class _Masks(dict[int, bytes]):
    """Masks as `width` bytes, bits that are newer than the snapshot left out. Most blocks share theirs with others."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.bits = (1 << 8 * width) - 1

    def __missing__(self, mask: int) -> bytes:
        if len(self) >= MOST_MASKS:
            self.clear()
        found = self[mask] = (mask & self.bits).to_bytes(self.width, "little")
        return found


def _shard(entries: Mapping[bytes, int], masks: _Masks) -> bytes:
    """Their number, all keys, all masks."""
    keys = b"".join(entries)
    if len(keys) != KEY_BYTES * len(entries):  # none is longer
        entries = {key: mask for key, mask in entries.items() if len(key) == KEY_BYTES}
        keys = b"".join(entries)
    return b"".join((len(entries).to_bytes(LENGTH, "little"), keys, *map(masks.__getitem__, entries.values())))


def packed(pieces: Iterable[bytes]) -> bytes:
    """What a file holds. Takes time: a second for a million blocks."""
    body = zlib.compress(b"".join(pieces), level=1)
    return MAGIC + sha256(body).digest() + body


@dataclass(frozen=True, slots=True)
class Restored:
    """How many workers are waited for, and what of the snapshot was of another shape and is left out."""

    workers: int
    lost: tuple[str, ...]


def restore(placer: Placer, data: bytes) -> Restored:
    """Take in what an earlier router has kept, into one that has not begun. Parts of another shape are left out.

    Raises ValueError for bytes that are no whole snapshot.
    """
    fleet, policy = placer.fleet, placer.policy
    header, shards = _read(_unpacked(data))
    names: dict[str, str] = {}
    lost: list[str] = []
    with _part("workers and their blocks", lost):
        names = _workers(fleet.prefixes, header, shards)
    with _part("lengths of outputs", lost):
        placer.outputs = OutputLengths.from_kept(header["learned"]["outputs"])
    with _part("costs of handoffs", lost):
        fleet.link_costs = LinkCosts.from_kept(header["learned"]["links"])
        fleet.ways = Ways(fleet.trust, fleet.link_costs)
    if isinstance(policy, Goodput):
        with _part("calibration", lost):
            if (kept := header["learned"]["calibration"]) is not None:
                policy.calibration = _calibration(kept, lost)
    fleet.returning.expect(names, fleet.clock() + RETURN_SILENCES * fleet.config.silence)
    return Restored(len(names), tuple(lost))


@contextmanager
def _part(name: str, lost: list[str]) -> Iterator[None]:
    """A part that is not what this version keeps is lost, and the others are not."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        lost.append(name)


def _workers(index: PrefixIndex | None, header: Mapping[str, Any], shards: Iterable[memoryview]) -> dict[str, str]:
    """Names by instance; their blocks are in the index then."""
    names = {instance: str(name) for instance, name in header["names"].items()}
    numbers = {instance: (int(number), int(first)) for instance, (number, first) in header["numbers"].items()}
    if index is not None:
        index.restore(numbers, _entries(shards, header["mask_bytes"]))
    return names


def _calibration(kept: Mapping[str, Any], lost: list[str]) -> Calibration:
    """What can be read of it; the rest is as nothing was observed."""
    readable = Calibration().kept()
    for name, told in CALIBRATED.items():
        with _part(told, lost):
            Calibration.from_kept({**readable, name: kept[name]})
            readable[name] = kept[name]
    return Calibration.from_kept(readable)


def _unpacked(data: bytes) -> memoryview:
    body = data[len(MAGIC) + DIGEST :]
    if not data.startswith(MAGIC) or data[len(MAGIC) : len(MAGIC) + DIGEST] != sha256(body).digest():
        raise ValueError("damaged, or of another version")
    try:
        return memoryview(zlib.decompress(body))
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from error


def _read(body: memoryview) -> tuple[dict[str, Any], list[memoryview]]:
    """The header, and each shard's keys and masks."""
    end = LENGTH + _count(body, 0)
    header = orjson.loads(body[LENGTH:end])
    width = header.get("mask_bytes") if isinstance(header, dict) else None
    if not isinstance(width, int) or not 0 <= width <= WIDEST_MASK:
        raise ValueError("not what a router keeps")
    shards = []
    while end < len(body):
        start, size = end + LENGTH, _count(body, end) * (KEY_BYTES + width)
        end = start + size
        shards.append(body[start:end])
    if end != len(body) or len(shards) != header.get("shards"):
        raise ValueError("some of it is missing")
    return header, shards


def _count(body: memoryview, at: int) -> int:
    return int.from_bytes(body[at : at + LENGTH], "little")


def _entries(shards: Iterable[memoryview], width: int) -> Iterator[tuple[bytes, int]]:
    """Keys and masks; equal masks are one object."""
    known: dict[bytes, int] = {}
    for shard in shards:
        count = len(shard) // (KEY_BYTES + width)
        keys, masks = bytes(shard[: count * KEY_BYTES]), bytes(shard[count * KEY_BYTES :])
        for number in range(count):
            mask = masks[number * width : (number + 1) * width]
            if mask not in known:
                known[mask] = int.from_bytes(mask, "little")
            yield keys[number * KEY_BYTES : (number + 1) * KEY_BYTES], known[mask]
