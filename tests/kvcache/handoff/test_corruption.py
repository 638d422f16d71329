"""Ten thousand random corruptions of a handoff: each is refused by name and counted, and none changes what is kept."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from decode.leases import Lease
from decode.worker import RouterSession
from kvcache.handoff.chunk import Chunk, Commit, encode, sealed_commit
from kvcache.memory.device import DeviceKV
from kvcache.memory.kv_dtype import choose_wire, converted
from serving.errors import Retryable
from serving.kvspec import LayerKV, gqa, gqa_int8
from serving.links import HandoffLink
from serving.messages import LeaseGrant, LeaseOrder, Role
from tests.decode.workers import FINGERPRINT, Worker
from tests.fakes.kv_layouts import same_parts
from tests.fakes.sequences import make_order
from tests.kvcache.corruptions import COMMITS, KINDS, Corruption, Traffic, corruption, harmed_commit
from tests.kvcache.reaching import TRANSPORTS, Way, way_to

TOKENS = 24
CUTS = (0, 9, 10, 20, TOKENS)
LAYERS = 3
BORDERS = (0, 2, LAYERS)
FLOAT, INT8 = (gqa(2, 6, "float32"),) * LAYERS, (gqa_int8(2, 6),) * LAYERS
ENDS: dict[str, tuple[tuple[LayerKV, ...], tuple[LayerKV, ...], str]] = {
    "equal ends": (FLOAT, FLOAT, "auto"),
    "float to INT8": (FLOAT, INT8, "auto"),
    "INT8 on the wire": (FLOAT, FLOAT, "int8"),
}
REASONS = {
    "digest",
    "range",
    "length",
    "heads",
    "encoding",
    "layout",
    "order",
    "lease",
    "epoch",
    "instance",
    "incomplete",
}
WHOLE = 4  # harmed commits when there is nothing else to refuse them for: all KV is there
CORRUPTIONS = {"local": 10_002, "nixl": 900}  # over all ends; 1,500 over any other transport


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every refusal is a line in the log."""
    monkeypatch.setattr(logging.getLogger("decode.worker"), "disabled", True)


class Receiver(Worker):
    """A decode worker whose engine does not run, and the way to it."""

    way: Way
    routed: RouterSession

    @property
    def refused(self) -> int:
        return sum(self.decode.refused.values())

    def lease_of(self, order: LeaseOrder) -> Lease:
        return self.decode.table.leases[order.lease.lease]


class Held:
    """What a receiver holds at some moment, to be compared with later."""

    def __init__(self, receiver: Receiver):
        self.receiver = receiver
        self.planes = [[plane.clone() for plane in planes] for planes in receiver.device_kv.planes]
        self.filled = self._filled()

    def _filled(self) -> dict[str, tuple[object, ...]]:
        leases = self.receiver.decode.table.leases
        return {name: (lease.fence, lease.state, *lease.filled) for name, lease in leases.items()}

    def check_unchanged(self) -> None:
        assert self._filled() == self.filled, "something counts as filled that was not before"
        planes = zip(self.planes, self.receiver.device_kv.planes, strict=True)
        same = all(same_bits(old, new) for one, other in planes for old, new in zip(one, other, strict=True))
        assert same, "a byte of the pool has changed"


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@dataclass
class Story:
    """A lease from its order to its last chunk, and the KV that is due to it."""

    order: LeaseOrder
    grant: LeaseGrant
    due: list[Chunk]
    blocks: list[int]  # of the source
    accepted: list[Chunk]


class Campaign:
    """Leases that fill up side by side, with harm in between; what is over becomes material for replays."""

    def __init__(self, receiver: Receiver, own: tuple[LayerKV, ...], kv_wire: str, seed: int):
        self.receiver = receiver
        self.chance = random.Random(seed)
        self.source = numbered_pool(own, seed)
        self.wire = choose_wire(own, receiver.device_kv.specs, kv_wire)
        self.stories: list[Story] = []
        self.stale: list[Chunk] = []
        self.link: HandoffLink
        self.count = 0

    async def open(self) -> Story:
        self.count += 1
        prompt = [self.chance.randrange(1000) for _ in range(TOKENS)]
        order = make_order(prompt, lease=self.receiver.fence(f"lease-{self.count}"))
        story = self.story(order, await self.receiver.routed.open(order))
        self.stories.append(story)
        return story

    def story(self, order: LeaseOrder, grant: LeaseGrant) -> Story:
        blocks = self.chance.sample(range(self.source.num_blocks), -(-TOKENS // self.source.block_size))
        due = [
            encode(self.source, grant.lease, FINGERPRINT, range(*layers), blocks, *tokens, wire=self.wire)
            for tokens, layers in product(pairwise(CUTS), pairwise(BORDERS))
        ]
        return Story(order, grant, due, blocks, [])

    async def begin_anew(self, story: Story) -> None:
        """The next epoch of the lease: all that was sent and made for this one is stale."""
        fence = story.grant.lease
        order = make_order(story.order.request.prompt, lease=self.receiver.fence(fence.lease, fence.epoch + 1))
        self.stale += story.due + story.accepted
        again = self.story(order, await self.receiver.routed.advance(order))
        self.stories[self.stories.index(story)] = again

    def traffic(self, story: Story) -> Traffic:
        others = [chunk for other in self.stories if other is not story for chunk in other.due]
        return Traffic(
            due=story.due[0],
            later=story.due[1:],
            accepted=story.accepted,
            stale=self.stale[-40:],
            others=others,
            layers=LAYERS,
            tokens=TOKENS,
        )

    async def harm(self, story: Story) -> Corruption:
        """Send something wrong; it must come back as a refusal with a reason, and leave no trace but the count."""
        wrong = corruption(self.traffic(story), self.chance)
        await self.refused(wrong, wrong.commit or sealed_commit(story.grant.lease, 1))
        return wrong

    async def refused(self, wrong: Corruption, commit: Commit) -> None:
        before, refused = Held(self.receiver), self.receiver.refused
        link = self.receiver.way.dial()
        try:
            with pytest.raises(Retryable) as refusal:
                if wrong.chunk is not None:
                    await link.push(wrong.chunk)
                await link.commit(commit)
        finally:
            await link.close()
        assert refusal.value.code in REASONS, (wrong.name, refusal.value)
        assert wrong.chunk is None or refusal.value.code != "incomplete", f"{wrong.name} was taken: {wrong.chunk}"
        assert (wrong.name == "harmed commit") <= (refusal.value.code == "digest"), "refused for another reason"
        assert self.receiver.refused == refused + 1, wrong.name
        before.check_unchanged()

    async def send(self, story: Story) -> None:
        """The next chunk as it should be; it must be taken in spite of all that came before it."""
        chunk = story.due.pop(0)
        lease = self.receiver.lease_of(story.order)
        before = list(lease.filled)
        await self.link.push(chunk)
        while lease.filled == before:
            await asyncio.sleep(0)
        story.accepted.append(chunk)

    async def finish(self, story: Story) -> None:
        """The KV that is there at the end is the KV that was meant, and so is the token that follows."""
        token = self.chance.randrange(1000)
        await self.link.commit(sealed_commit(story.grant.lease, token))
        lease = self.receiver.lease_of(story.order)
        assert lease.seq.tokens == [*story.order.request.prompt, token]
        theirs, ours = self.receiver.device_kv, self.source
        for layer, (own, stored) in enumerate(zip(ours.specs, theirs.specs, strict=True)):
            sent = converted(ours.read(layer, ours.slots(story.blocks, 0, TOKENS)), own, self.wire.layers[layer])
            got = theirs.read(layer, theirs.slots(lease.seq.blocks, 0, TOKENS))
            assert same_parts(got, converted(sent, self.wire.layers[layer], stored))
        self.stories.remove(story)
        self.stale += story.accepted
        self.receiver.routed.cancel(story.order.lease.lease)

    async def run(self, count: int) -> Counter[str]:
        """How many of each kind there were."""
        kinds: Counter[str] = Counter()
        while kinds.total() < count:
            story = self.stories[0] if self.stories else await self.open()
            if len(self.stories) == 1:
                await self.open()
            self.link = self.receiver.way.dial()
            anew = self.chance.random() < 0.3
            while story.due and kinds.total() < count:
                for _ in range(min(self.chance.randint(1, 12), count - kinds.total())):
                    kinds[(await self.harm(self.chance.choice(self.stories))).name] += 1
                await self.send(story)
            if anew or story.due:
                await self.begin_anew(story)
            else:
                for _ in range(min(WHOLE, count - kinds.total())):
                    wrong = harmed_commit(sealed_commit(story.grant.lease, 1), self.chance)
                    await self.refused(Corruption("harmed commit", None, wrong), wrong)
                    kinds["harmed commit"] += 1
                await self.finish(story)
            await self.link.close()
        return kinds


def numbered_pool(specs: Sequence[LayerKV], seed: int) -> DeviceKV:
    """Random numbers in every plane."""
    device_kv = DeviceKV(specs, 16, 5)
    generator = torch.Generator().manual_seed(seed)
    for plane in (plane for planes in device_kv.planes for plane in planes):
        plane.copy_(torch.randn(plane.shape, generator=generator))
    return device_kv


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=list(ENDS))
async def campaign(request: pytest.FixtureRequest, transport: str) -> AsyncIterator[Campaign]:
    own, theirs, kv_wire = ENDS[request.param]
    receiver = Receiver(Role.DECODE, specs=theirs)
    async with way_to(transport, receiver.decode) as way:
        receiver.way, receiver.routed = way, await receiver.session()
        yield Campaign(receiver, own, kv_wire, seed=list(ENDS).index(request.param))
        await receiver.routed.close()
    assert receiver.idle() and receiver.kv.unaccounted([]) == 0


@pytest.mark.thorough
async def test_every_corruption_is_refused_counted_and_without_effect(campaign: Campaign, transport: str) -> None:
    count = CORRUPTIONS.get(transport, 1_500) // len(ENDS)
    kinds = await campaign.run(count)
    assert kinds.total() == count == campaign.receiver.refused
    assert kinds.keys() == {*KINDS, *COMMITS}, "every kind of harm was done"
