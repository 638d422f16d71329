"""A session moves to the certificates of now lease by lease, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from serving.errors import WorkerLost
from serving.grpc_tls import GrpcTls
from tests.certificates import Authority, Files, replace
from tests.fakes.sequences import make_order
from tests.router.remote import PROMPT, Remote


@asynccontextmanager
async def remote_over(folder: Path) -> AsyncIterator[tuple[Remote, Authority, Files]]:
    """A worker, and the files of the router that calls it."""
    authority = Authority()
    files = authority.files(folder / "router")
    serving = GrpcTls(authority.files(folder / "worker").security(), look_seconds=0.0)
    made = Remote(serving, GrpcTls(files.security(), look_seconds=0.0))
    await made.start()
    try:
        yield made, authority, files
    finally:
        await made.stop()


def sessions(remote: Remote) -> set[str]:
    """By the worker's names for them."""
    return set(remote.worker.decode.sessions)


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


async def test_new_leases_go_to_the_new_connection_and_old_ones_stay(tmp_path: Path) -> None:
    async with remote_over(tmp_path) as (remote, authority, files):
        session = await remote.connect()
        first = sessions(remote)
        await session.open(make_order(PROMPT, lease=remote.worker.fence("r/0"), max_tokens=5))
        authority.renew(files)
        await session.open(make_order(PROMPT, lease=remote.worker.fence("r/1"), max_tokens=5))
        await until(lambda: len(sessions(remote)) == 2)
        await until(lambda: session._renewing is None)
        await session.open(make_order(PROMPT, lease=remote.worker.fence("r/2"), max_tokens=5))
        (second,) = sessions(remote) - first
        assert remote.worker.decode.table.by_session() == {next(iter(first)): 2, second: 1}
        session.cancel("r/0")
        await asyncio.sleep(0)
        assert first <= sessions(remote), "it still holds a lease"
        session.cancel("r/1")
        await until(lambda: sessions(remote) == {second})
        assert remote.lost == []
        await session.close()
        await remote.gone()
        assert len(remote.lost) == 1 and sessions(remote) == set()


async def test_the_end_of_one_stream_is_the_end_of_all(tmp_path: Path) -> None:
    async with remote_over(tmp_path) as (remote, authority, files):
        session = await remote.connect()
        await session.open(make_order(PROMPT, lease=remote.worker.fence("r/0"), max_tokens=5))
        authority.renew(files)
        await session.open(make_order(PROMPT, lease=remote.worker.fence("r/1"), max_tokens=5))
        await until(lambda: len(sessions(remote)) == 2 and session._renewing is None)
        await session._older[0].close()
        await until(lambda: len(remote.lost) == 1)
        await remote.gone()
        await until(lambda: sessions(remote) == set())
        assert len(remote.lost) == 1
        await session.close()


async def test_a_worker_that_does_not_take_the_new_one_keeps_the_old_session(tmp_path: Path) -> None:
    async with remote_over(tmp_path) as (remote, authority, files):
        session = await remote.connect()
        another = Authority("another")
        replace(files.authorities, authority.pem + another.pem)
        another.renew(files)
        for number in range(3):
            await session.open(make_order(PROMPT, lease=remote.worker.fence(f"r/{number}"), max_tokens=5))
            await until(lambda: session._renewing is None)
        assert len(sessions(remote)) == 1 and remote.lost == []
        await session.close()


async def test_without_a_worker_there_is_no_session(tmp_path: Path) -> None:
    async with remote_over(tmp_path) as (remote, _, _):
        await remote.server.stop(0)
        with pytest.raises(WorkerLost):
            await remote.connect()
