"""Random damage to KV on its way: bits, lengths, mix-ups, replays, and chunks that are whole but not meant to be here.

A generator for campaigns over any transport: it makes what must be refused and knows nothing of who refuses it. The
harm to bare bytes is of use wherever bytes are kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvcache.handoff.chunk import Chunk, Commit, sealed, sealed_commit
from serving.messages import LeaseId

FENCE = ("lease", "epoch", "instance")
NUMBERS = ("first_layer", "last_layer", "first_head", "last_head", "start", "end")


@dataclass(frozen=True, slots=True)
class Corruption:
    """`chunk` is to be pushed, or, if there is none, `commit` to be committed. `name` tells the kind of harm."""

    name: str
    chunk: Chunk | None
    commit: Commit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What there is to harm: for one lease that still waits for KV, the chunks that could be sent and that were."""

    due: Chunk  # would be accepted as it is
    later: Sequence[Chunk] = ()  # would be accepted after `due`
    accepted: Sequence[Chunk] = ()  # of this lease and epoch
    stale: Sequence[Chunk] = ()  # of earlier epochs, of leases that are over
    others: Sequence[Chunk] = ()  # of other leases that are open
    layers: int  # of the model
    tokens: int  # of the lease's sequence


# ---- bare bytes ----------------------------------------------------------------------------------------------------


def flipped(data: bytes | memoryview, chance: random.Random, bits: int = 1) -> bytes:
    """With so many different bits changed."""
    harmed = bytearray(data)
    for bit in chance.sample(range(8 * len(harmed)), min(bits, 8 * len(harmed))):
        harmed[bit // 8] ^= 1 << bit % 8
    return bytes(harmed)


def truncated(data: bytes | memoryview, chance: random.Random) -> bytes:
    """With some bytes missing at one end, perhaps all."""
    kept = chance.randrange(len(data))
    return bytes(data[:kept]) if chance.random() < 0.5 else bytes(data[len(data) - kept :])


def extended(data: bytes | memoryview, chance: random.Random) -> bytes:
    """With a few bytes more at one end."""
    more = chance.randbytes(chance.choice((1, 2, 4, 64)))
    return bytes(data) + more if chance.random() < 0.5 else more + bytes(data)


def displaced(data: bytes | memoryview, chance: random.Random) -> bytes:
    """The same bytes in another order: two runs of them have changed places. Equal runs cannot be told apart."""
    data = bytes(data)
    for _ in range(100):
        size = chance.randint(1, max(1, len(data) // 2))
        first, second = sorted((chance.randrange(len(data) - size + 1), chance.randrange(len(data) - size + 1)))
        if second - first >= size and data[first : first + size] != data[second : second + size]:
            middle = data[first + size : second]
            return (
                data[:first]
                + data[second : second + size]
                + middle
                + data[first : first + size]
                + data[second + size :]
            )
    return flipped(data, chance)


BYTE_HARM: dict[str, Callable[[bytes | memoryview, random.Random], bytes]] = {
    "a bit": flipped,
    "some bits": lambda data, chance: flipped(data, chance, chance.randint(2, 40)),
    "truncated": truncated,
    "extended": extended,
    "displaced": displaced,
}


# ---- chunks --------------------------------------------------------------------------------------------------------


def harmed_payload(traffic: Traffic, chance: random.Random) -> Chunk:
    harm = chance.choice(list(BYTE_HARM.values()))
    return replace(traffic.due, payload=harm(traffic.due.payload, chance))


def harmed_digest(traffic: Traffic, chance: random.Random) -> Chunk:
    harm = chance.choice((flipped, truncated, extended))
    return replace(traffic.due, digest=harm(traffic.due.digest, chance))


def harmed_text(text: str, chance: random.Random) -> str:
    """A bit of one of its characters flipped, or a letter where there was no text."""
    if not text:
        return chance.choice("abc")
    place = chance.randrange(len(text))
    return text[:place] + chr(ord(text[place]) ^ 1 << chance.randrange(7)) + text[place + 1 :]


def harmed_header(traffic: Traffic, chance: random.Random) -> Chunk:
    """A bit flipped in any field."""
    chunk = traffic.due
    field = chance.choice((*FENCE, "layout", "encoding", *NUMBERS))
    if field in ("layout", "encoding"):
        return replace(chunk, **{field: harmed_text(getattr(chunk, field), chance)})
    if field in FENCE:
        return replace(chunk, lease=harmed_fence(chunk.lease, field, chance))
    return replace(chunk, **{field: getattr(chunk, field) ^ 1 << chance.randrange(31)})


def harmed_fence(fence: LeaseId, field: str, chance: random.Random) -> LeaseId:
    if field == "epoch":
        return replace(fence, epoch=fence.epoch ^ 1 << chance.randrange(31))
    return replace(fence, **{field: harmed_text(getattr(fence, field), chance)})


def wrong_place(traffic: Traffic, chance: random.Random) -> Chunk:
    """Other layers, tokens or heads than it was sealed for, though they may be due as well."""
    chunk = traffic.due
    if chance.random() < 0.2:
        return replace(chunk, first_head=0, last_head=chance.randint(1, 8))
    fields = chance.choice((("first_layer", "last_layer"), ("start", "end")))
    by = chance.choice((-2, -1, 1, 2, 5))
    moved = {field: max(0, getattr(chunk, field) + by) for field in fields}
    return replace(chunk, **moved)


def swapped_payload(traffic: Traffic, chance: random.Random) -> Chunk:
    """The bytes of another chunk, perhaps with the digest that is theirs."""
    candidates = [*traffic.later, *traffic.accepted, *traffic.stale, *traffic.others]
    unlike = [chunk for chunk in candidates if bytes(chunk.payload) != bytes(traffic.due.payload)]
    if not unlike:
        return harmed_payload(traffic, chance)
    other = chance.choice(unlike)
    digest = chance.choice((traffic.due.digest, other.digest))
    return replace(traffic.due, payload=other.payload, digest=digest)


def replay(traffic: Traffic, chance: random.Random) -> Chunk:
    """Something that was right once: accepted already, or of an epoch or lease that is over."""
    past = [*traffic.accepted, *traffic.stale]
    return chance.choice(past) if past else stale_epoch(traffic, chance)


def stale_epoch(traffic: Traffic, chance: random.Random) -> Chunk:
    """Sealed for a try that is over, or for one that has not begun."""
    epoch = traffic.due.lease.epoch
    other = chance.choice([e for e in range(epoch + 3) if e != epoch])
    return sealed(replace(traffic.due, lease=replace(traffic.due.lease, epoch=other)))


def another_life(traffic: Traffic, chance: random.Random) -> Chunk:
    """Sealed for another instance, or for another lease that nobody holds."""
    field = chance.choice(("instance", "lease"))
    text = harmed_text(getattr(traffic.due.lease, field), chance)
    if text in {chunk.lease.lease for chunk in traffic.others}:
        text += "?"
    return sealed(replace(traffic.due, lease=replace(traffic.due.lease, **{field: text})))


def another_layout(traffic: Traffic, chance: random.Random) -> Chunk:
    return sealed(replace(traffic.due, layout=harmed_text(traffic.due.layout, chance)))


def out_of_order(traffic: Traffic, chance: random.Random) -> Chunk:
    """Sealed well, but tokens before it are missing."""
    due = traffic.due
    ahead = [chunk for chunk in traffic.later if chunk.start > due.start and chunk.first_layer == due.first_layer]
    if ahead and chance.random() < 0.5:
        return chance.choice(ahead)
    by = chance.randint(1, 2 * traffic.tokens)
    return sealed(replace(due, start=due.start + by, end=due.end + by))


def out_of_range(traffic: Traffic, chance: random.Random) -> Chunk:
    """Sealed with layers or tokens that do not exist."""
    chunk, layers = traffic.due, traffic.layers
    changes = (
        {"first_layer": layers, "last_layer": layers + 1},
        {"last_layer": layers + chance.randint(1, 1 << 20)},
        {"last_layer": chunk.first_layer},
        {"end": chunk.start},
        {"end": traffic.tokens + chance.randint(1, 1 << 20)},
    )
    return sealed(replace(chunk, **chance.choice(changes)))


def wrong_heads(traffic: Traffic, chance: random.Random) -> Chunk:
    """Sealed as a piece of the heads where all are due."""
    first = chance.randint(0, 3)
    return sealed(replace(traffic.due, first_head=first, last_head=chance.randint(max(first, 1), 9)))


def wrong_encoding(traffic: Traffic, chance: random.Random) -> Chunk:
    """Sealed as numbers of two bytes, which none of these are, or of a kind nobody knows."""
    name = chance.choice(("bfloat16", "float16", "float64", "int4", "INT8", "\0", harmed_text("int8", chance)))
    return sealed(replace(traffic.due, encoding=name))


def wrong_length(traffic: Traffic, chance: random.Random) -> Chunk:
    """Bytes missing or added before it was sealed."""
    harm = chance.choice((truncated, extended))
    return sealed(replace(traffic.due, payload=harm(traffic.due.payload, chance)))


KINDS: dict[str, Callable[[Traffic, random.Random], Chunk]] = {
    "payload": harmed_payload,
    "digest": harmed_digest,
    "header": harmed_header,
    "place": wrong_place,
    "swap": swapped_payload,
    "replay": replay,
    "epoch": stale_epoch,
    "life": another_life,
    "layout": another_layout,
    "order": out_of_order,
    "range": out_of_range,
    "heads": wrong_heads,
    "encoding": wrong_encoding,
    "length": wrong_length,
}


# ---- commits -------------------------------------------------------------------------------------------------------


COMMITS = ("early commit", "harmed commit")


def early_commit(traffic: Traffic, chance: random.Random) -> Commit:
    """The end is announced while KV is missing, or by whom nobody asked."""
    fence = traffic.due.lease
    past = [chunk.lease for chunk in traffic.stale]
    wrong = (fence, replace(fence, epoch=fence.epoch + 1), replace(fence, instance=harmed_text(fence.instance, chance)))
    return sealed_commit(chance.choice((*wrong, *past)), 1)


def harmed_commit(commit: Commit, chance: random.Random) -> Commit:
    """A bit flipped in any field, or the digest of another length."""
    field = chance.choice((*FENCE, "first_token", "digest"))
    if field == "first_token":
        return replace(commit, first_token=commit.first_token ^ 1 << chance.randrange(32))
    if field == "digest":
        return replace(commit, digest=chance.choice((flipped, truncated, extended))(commit.digest, chance))
    return replace(commit, lease=harmed_fence(commit.lease, field, chance))


def corruption(traffic: Traffic, chance: random.Random) -> Corruption:
    """One of any kind."""
    name = chance.choice((*KINDS, *COMMITS))
    if name == "early commit":
        return Corruption(name, None, early_commit(traffic, chance))
    if name == "harmed commit":
        return Corruption(name, None, harmed_commit(sealed_commit(traffic.due.lease, 1), chance))
    return Corruption(name, KINDS[name](traffic, chance))


def corruptions(traffic: Traffic, count: int, seed: int) -> Iterator[Corruption]:
    """`count` of them, each of a random kind; the same for the same seed."""
    chance = random.Random(seed)
    return (corruption(traffic, chance) for _ in range(count))
