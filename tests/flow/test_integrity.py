"""KV that is damaged, late, replayed or misplaced is refused, counted and survived: never attended to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from kvcache.handoff.chunk import Chunk, Commit, encode, sealed, sealed_commit
from kvcache.handoff.dialer import Dialer
from kvcache.handoff.grpc_stream import GrpcHandoff
from kvcache.handoff.local import LOCAL, LocalHandoff
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.errors import CorruptChunk, MillraceError, StaleLease
from serving.links import HandoffLink, LeaseEvent
from serving.loader.loading import LoadedModel
from serving.messages import LeaseGrant, LeaseId, LeaseOrder, Request, Role, SamplingParams
from tests.fakes.flipping_proxy import FlippingProxy
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.remote import KEY, RemoteCluster

pytestmark = pytest.mark.thorough

TOKENS = 16
SPLIT = [Role.PREFILL, Role.DECODE]


def request(prompt: list[int]) -> Request:
    return Request(request_id="r", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=TOKENS, temperature=0.0))


def cluster_of(model: LoadedModel, kind: type[LocalCluster] = RemoteCluster) -> LocalCluster:
    return kind(model, ModelConfig(), EngineConfig(num_kv_blocks=256), RouterConfig(patience=10.0), roles=SPLIT)


@pytest.mark.parametrize("flips", [1, 3])
async def test_a_bit_flipped_on_the_wire_is_refused_and_survived(
    tiny_model: LoadedModel, tiny_path: Path, flips: int
) -> None:
    """In each of the first `flips` tries. A flip in the KV fails its digest, one in a frame ends the call."""
    prompt = prompts(1, shortest=400, longest=400, seed=20)[0]
    async with cluster_of(tiny_model) as started:
        cluster = Cluster(started)
        decode = started.workers[1].decode
        assert decode is not None
        proxy = FlippingProxy(decode.address)
        decode.address = await proxy.start()  # what leases are granted with: KV goes through the proxy
        try:
            proxy.armed = (
                1_000_000  # every large piece, while tries are to fail: what is left of an ended one passes too
            )

            def harm_again(error: MillraceError) -> None:
                if len(cluster.seen.replacements) == flips:
                    proxy.armed = 0

            cluster.seen.on_replaced = harm_again
            assert await cluster.tokens(request(prompt)) == greedy_tiny(tiny_path, prompt, TOKENS)
            assert len(cluster.seen.replacements) == flips
            digests = sum(error.code == "digest" for error in cluster.seen.replacements)
            assert decode.refused.get("digest", 0) >= digests, "counted where it was refused, told or not"
            await cluster.idle()
        finally:
            await proxy.stop()


@pytest.mark.parametrize("kind", [LocalCluster, RemoteCluster])
async def test_a_first_token_with_a_flipped_bit_is_refused_and_survived(
    tiny_model: LoadedModel, tiny_path: Path, kind: type[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is harmed on its way in the first two tries: the text must not go on from another token."""
    prompt = prompts(1, shortest=50, longest=50, seed=21)[0]
    async with cluster_of(tiny_model, kind) as started:
        cluster = Cluster(started)
        decode = started.workers[1].decode
        assert decode is not None
        as_sent = decode.commit

        async def harmed(commit: Commit, via: str = LOCAL) -> range | None:
            if len(cluster.seen.replacements) < 2:
                commit = replace(commit, first_token=commit.first_token ^ 4)
            return await as_sent(commit, via)

        monkeypatch.setattr(decode, "commit", harmed)
        assert await cluster.tokens(request(prompt)) == greedy_tiny(tiny_path, prompt, TOKENS)
        assert [error.code for error in cluster.seen.replacements] == ["digest", "digest"]
        assert decode.refused == {"digest": 2}
        await cluster.idle()


class Lease:
    """A lease opened by hand on a decode worker, and the chunks of a sequence for it."""

    def __init__(self, cluster: LocalCluster, prompt: list[int]):
        self.cluster = cluster
        self.prompt = prompt
        self.worker = cluster.workers[1]
        assert self.worker.decode is not None
        self.decode = self.worker.decode
        self.events: list[LeaseEvent] = []

    async def open(self) -> LeaseGrant:
        self.session = await self.decode.connect("test", self.events.extend, lambda error: None)
        fence = LeaseId(lease="lease", epoch=0, instance=self.worker.identity.instance)
        self.grant = await self.session.open(LeaseOrder(lease=fence, request=request(self.prompt)))
        return self.grant

    def chunk(self, layers: range, start: int, end: int) -> Chunk:
        """Bytes out of the prefill worker's pool: any will do."""
        source = self.cluster.workers[0].context
        blocks = list(range(source.device_kv.num_blocks))
        return encode(source.device_kv, self.grant.lease, self.worker.identity.fingerprint, layers, blocks, start, end)


def dial(cluster: LocalCluster, lease: Lease) -> HandoffLink:
    if isinstance(cluster, RemoteCluster):
        return Dialer(cluster_key=KEY).dial(lease.grant, lease.worker.identity.generation)
    return LocalHandoff(lease.decode, generation=lease.worker.identity.generation)


async def push(cluster: LocalCluster, lease: Lease, *chunks: Chunk) -> None:
    """Send chunks and commit on a handoff of their own."""
    link = dial(cluster, lease)
    try:
        for chunk in chunks:
            await link.push(chunk)
        await link.commit(sealed_commit(chunks[-1].lease, 5))
    finally:
        await link.close()
        if isinstance(link, GrpcHandoff):
            await link.caller.close()


WHOLE = range(4)


@pytest.mark.parametrize("kind", [LocalCluster, RemoteCluster])
@pytest.mark.parametrize(
    ("harm", "error", "reason"),
    [
        (lambda c: replace(c, payload=bytes([c.payload[0] ^ 1]) + bytes(c.payload[1:])), CorruptChunk, "digest"),
        (lambda c: replace(c, payload=bytes(c.payload)[:-1]), CorruptChunk, "digest"),
        (lambda c: sealed(replace(c, payload=bytes(c.payload)[:-4])), CorruptChunk, "length"),
        (lambda c: replace(c, first_layer=1, last_layer=5), CorruptChunk, "digest"),
        (lambda c: sealed(replace(c, first_layer=1, last_layer=5)), CorruptChunk, "range"),
        (lambda c: sealed(replace(c, start=16, end=66)), CorruptChunk, "order"),
        (lambda c: sealed(replace(c, layout="another")), StaleLease, "layout"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, epoch=7))), StaleLease, "epoch"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, instance="past life"))), StaleLease, "instance"),
        (lambda c: sealed(replace(c, lease=replace(c.lease, lease="unknown"))), StaleLease, "lease"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_chunk_is_refused_by_name(
    tiny_model: LoadedModel, kind: type[LocalCluster], harm: object, error: type[MillraceError], reason: str
) -> None:
    assert callable(harm)
    async with cluster_of(tiny_model, kind) as cluster:
        lease = Lease(cluster, prompts(1, shortest=50, longest=50)[0])
        await lease.open()
        with pytest.raises(error) as raised:
            await push(cluster, lease, harm(lease.chunk(WHOLE, 0, 50)))
        assert raised.value.code == reason
        assert lease.decode.refused == {reason: 1}
        assert not lease.events, "nothing was decoded"
        await lease.session.close()
        assert lease.worker.audit_now().idle


@pytest.mark.parametrize("kind", [LocalCluster, RemoteCluster])
async def test_a_chunk_of_an_old_epoch_is_refused_and_the_new_one_goes_on(
    tiny_model: LoadedModel, kind: type[LocalCluster]
) -> None:
    async with cluster_of(tiny_model, kind) as cluster:
        lease = Lease(cluster, prompts(1, shortest=50, longest=50)[0])
        old = await lease.open()
        replay = lease.chunk(WHOLE, 0, 50)
        fence = replace(old.lease, epoch=1)
        lease.grant = await lease.session.advance(LeaseOrder(lease=fence, request=request(lease.prompt)))
        with pytest.raises(StaleLease):
            await push(cluster, lease, replay)
        assert lease.decode.refused == {"epoch": 1}
        await push(cluster, lease, lease.chunk(WHOLE, 0, 50))
        async with asyncio.timeout(60):
            while not any(event.delta and event.delta.finish for event in lease.events):
                await asyncio.sleep(0.01)
        await lease.session.close()
        assert lease.worker.audit_now().idle


@pytest.mark.parametrize("kind", [LocalCluster, RemoteCluster])
async def test_a_handoff_with_a_hole_is_refused(tiny_model: LoadedModel, kind: type[LocalCluster]) -> None:
    async with cluster_of(tiny_model, kind) as cluster:
        lease = Lease(cluster, prompts(1, shortest=50, longest=50)[0])
        await lease.open()
        with pytest.raises(CorruptChunk) as raised:
            await push(cluster, lease, lease.chunk(range(3), 0, 50))
        assert raised.value.code == "incomplete"
        await lease.session.close()
        assert lease.worker.audit_now().idle


async def test_the_end_of_a_session_frees_everything(tiny_model: LoadedModel) -> None:
    async with cluster_of(tiny_model) as cluster:
        lease = Lease(cluster, prompts(1, shortest=50, longest=50)[0])
        await lease.open()
        assert lease.worker.audit_now().counts["blocks"] > 0
        await lease.session.close()
        assert lease.worker.audit_now().idle


async def test_without_the_cluster_key_nothing_is_answered(tiny_model: LoadedModel) -> None:
    from router.clients import RemoteWorker
    from serving.errors import Unauthorized
    from serving.rpc import Caller

    async with cluster_of(tiny_model) as cluster:
        link = RemoteWorker(Caller(cluster.workers[1].address, "wrong"))
        with pytest.raises(Unauthorized):
            await link.audit()
        with pytest.raises(Unauthorized):
            await link.connect("intruder", lambda events: None, lambda error: None)
        await link.close()
