"""A sender without the cluster key is told so, however early the receiver refuses it."""

from __future__ import annotations

import pytest

from kvcache.handoff.chunk import Chunk
from kvcache.handoff.dialer import Dialer
from serving.errors import Unauthorized
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import server
from tests.fakes.refused_early import refusing_early
from tests.fakes.sequences import lease_id
from tests.kvcache.reaching import granted


def chunk() -> Chunk:
    return Chunk(
        lease=lease_id(),
        layout="layout",
        first_layer=0,
        last_layer=1,
        start=2,
        end=9,
        payload=bytes(10),
        digest=bytes(16),
    )


async def test_a_stranger_hears_that_he_is_one() -> None:
    guarded = server("sesame")
    port = guarded.add_insecure_port("127.0.0.1:0")
    stubs.add_DecodeServicer_to_server(stubs.DecodeServicer(), guarded)
    await guarded.start()
    dialer = Dialer(cluster_key="wrong")
    for _ in range(10):
        link = dialer.dial(granted(f"127.0.0.1:{port}"))
        with pytest.raises(Unauthorized):
            await link.push(chunk())
        await link.close()
    await dialer.close()
    await guarded.stop(0)


async def test_a_stranger_hears_that_he_is_one_though_the_stream_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with refusing_early(monkeypatch) as refusing:
        dialer = Dialer(cluster_key="wrong")
        link = dialer.dial(granted(refusing.address))
        with pytest.raises(Unauthorized):
            await link.push(chunk())
        await link.close()
        await dialer.close()
    assert refusing.hidden
