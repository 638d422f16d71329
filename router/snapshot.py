"""What a router keeps over a restart, as bytes: its prefix index, link costs, output lengths and calibration.

Pure: the file is the caller's. What cannot be read changes nothing; what is kept of workers that do not come back is
dropped (router.returning).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import orjson

from router.calibration import Calibration
from router.goodput import Goodput
from router.link_costs import LinkCosts
from router.output_lengths import OutputLengths
from router.placer import Placer
from router.prefix_index import KEY_BYTES

MAGIC = b"millrace router 1\n"
DIGEST = 32  # bytes
LENGTH = 4  # bytes of a count
WIDEST_MASK = 1 << 13  # bytes
MOST_MASKS = 65_536  # that are remembered while a snapshot is made
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


def restore(placer: Placer, data: bytes) -> int:
    """Take in what an earlier router has kept, into one that has not begun; how many workers are waited for.

    Raises ValueError for bytes that are no whole snapshot of this version.
    """
    fleet, policy = placer.fleet, placer.policy
    header, shards = _read(_unpacked(data))
    try:
        names, learned = {name: str(found) for name, found in header["names"].items()}, header["learned"]
        numbers = {name: (int(number), int(first)) for name, (number, first) in header["numbers"].items()}
        outputs, links = OutputLengths.from_kept(learned["outputs"]), LinkCosts.from_kept(learned["links"])
        calibration = Calibration.from_kept(learned["calibration"]) if learned["calibration"] is not None else None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not what a router keeps: {error!r}") from error
    if fleet.prefixes is not None:
        fleet.prefixes.restore(numbers, _entries(shards, header["mask_bytes"]))
    placer.outputs = outputs
    fleet.link_costs = fleet.ways.costs = links
    if calibration is not None and isinstance(policy, Goodput):
        policy.calibration = calibration
    fleet.returning.expect(names, fleet.clock() + RETURN_SILENCES * fleet.config.silence)
    return len(names)


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
    if not isinstance(header, dict) or header.get("mask_bytes") not in range(WIDEST_MASK + 1):
        raise ValueError("not what a router keeps")
    shards = []
    while end < len(body):
        start, size = end + LENGTH, _count(body, end) * (KEY_BYTES + header["mask_bytes"])
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
