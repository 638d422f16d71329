"""Models in the pool: what comes out is what went in, or it is not there."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from kvcache.pool import models
from kvcache.pool.block import make_block
from kvcache.pool.client import PoolClient
from kvcache.pool.links import BlockSelection
from kvcache.pool.models import NAMESPACE, content_key, decode, encode, name_key, pull, push
from serving.errors import CorruptChunk, NotFound, Overloaded, Unavailable
from tests.kvcache.pool.nodes import KINDS, Cluster, patient_client

NAME = "owner/model"


@pytest.fixture(params=KINDS)
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[PoolClient]:
    async with Cluster(request.param, 3) as nodes:
        client = patient_client(nodes.link, replication=2)
        client.set_nodes(nodes.addresses)
        yield client
        await client.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(models, "RETRY_SECONDS", 0.01)


def make_model(folder: Path, seed: int = 0, *, files: int = 3) -> Path:
    folder.mkdir()
    contents = random.Random(seed)
    for number in range(files):
        (folder / f"part-{number}.safetensors").write_bytes(contents.randbytes(contents.choice([0, 1, 1000, 12_345])))
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_a_folder_comes_back_as_it_was(pool: PoolClient, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    seen: list[tuple[int, int]] = []
    size = await push(pool, NAME, source, lambda done, total: seen.append((done, total)))
    assert size == sum(map(len, bytes_of(source).values())) and seen[-1] == (size, size)
    (tmp_path / "target").mkdir()
    assert await pull(pool, NAME, tmp_path / "target") == tmp_path / "target"
    assert bytes_of(tmp_path / "target") == bytes_of(source)


async def test_a_single_file_is_the_path_to_load(pool: PoolClient, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 20)
    await push(pool, NAME, tmp_path / "model.gguf")
    (tmp_path / "target").mkdir()
    found = await pull(pool, NAME, tmp_path / "target")
    assert found == tmp_path / "target/model.gguf"
    assert found.read_bytes() == (tmp_path / "model.gguf").read_bytes()


async def test_pushed_again_it_is_the_new_one(pool: PoolClient, tmp_path: Path) -> None:
    await push(pool, NAME, make_model(tmp_path / "old", 1))
    await push(pool, NAME, make_model(tmp_path / "new", 2))
    (tmp_path / "target").mkdir()
    await pull(pool, NAME, tmp_path / "target")
    assert bytes_of(tmp_path / "target") == bytes_of(tmp_path / "new")


async def test_a_model_of_which_a_block_is_gone_is_not_there(pool: PoolClient, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    await push(pool, NAME, source)
    (tmp_path / "target").mkdir()
    with pytest.raises(NotFound, match="cache push"):
        await pull(pool, "owner/other", tmp_path / "target")
    await pool.evict([content_key((source / "config.json").read_bytes())])
    with pytest.raises(NotFound, match="only part"):
        await pull(pool, NAME, tmp_path / "target")


async def test_bytes_that_are_not_their_keys_are_refused(pool: PoolClient, tmp_path: Path) -> None:
    """Even where whoever wrote them made a digest that fits."""
    source = make_model(tmp_path / "source")
    await push(pool, NAME, source)
    key = content_key((source / "config.json").read_bytes())
    await pool.evict([key])
    await pool.put([make_block(key, NAMESPACE, [b"something else"])])
    (tmp_path / "target").mkdir()
    with pytest.raises(CorruptChunk):
        await pull(pool, NAME, tmp_path / "target")


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b"[]",
        b'{"format": 1, "files": []}',
        b'{"format": 2, "files": []}',
        b'{"format": 1, "files": [{"name": "../../etc/passwd", "size": 1, "keys": ""}]}',
        b'{"format": 1, "files": [{"name": "x", "size": 1, "keys": "zz"}]}',
    ],
)
async def test_lists_that_make_no_sense_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        decode(data)


def test_a_list_comes_back_as_it_was() -> None:
    files = [models.ModelFile("a", 3, (name_key("x"), name_key("y"))), models.ModelFile("b", 0, ())]
    assert decode(encode(files)) == files


async def test_a_pool_without_room_says_so(tmp_path: Path) -> None:
    async with Cluster("local", 1, ram_bytes=5_000) as nodes:
        client = patient_client(partial(nodes.link))
        client.set_nodes(nodes.addresses)
        (tmp_path / "model.gguf").write_bytes(random.Random(0).randbytes(20_000))
        with pytest.raises(NotFound, match="did not keep"):
            await push(client, NAME, tmp_path / "model.gguf")
        await client.close()


async def test_a_node_that_writes_slowly_takes_all_of_it_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "RETRIES", 1000)
    disk = {"ram_bytes": 0, "disk_path": tmp_path / "disk", "disk_bytes": 1 << 20, "backlog": 3}
    source = make_model(tmp_path / "source")
    (source / "weights").write_bytes(random.Random(0).randbytes(50_000))
    async with Cluster("local", 1, **disk) as nodes:
        client = patient_client(nodes.link)
        client.set_nodes(nodes.addresses)
        await push(client, NAME, source)
        assert client.stats.failures["Overloaded"] or nodes.served[0].store.refused
        (tmp_path / "target").mkdir()
        await pull(client, NAME, tmp_path / "target")
        assert bytes_of(tmp_path / "target") == bytes_of(source)
        await client.close()


@pytest.mark.parametrize("failures", [1, 1000])
async def test_a_push_does_not_end_well_while_an_earlier_list_may_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """A node that does not answer when it should forget the list would go on with the old one."""
    async with Cluster("local", 3) as nodes:
        client = patient_client(nodes.link, replication=2)
        client.set_nodes(nodes.addresses)
        await push(client, NAME, make_model(tmp_path / "old", 1))
        second = nodes.by_address[client.rendezvous.owners(name_key(NAME), 2)[1]]
        evict, failed = second.node.evict, []

        async def failing(what: BlockSelection) -> int:
            if len(failed) < failures:
                failed.append(what)
                raise Overloaded("not now")
            return await evict(what)

        monkeypatch.setattr(second.node, "evict", failing)
        new = make_model(tmp_path / "new", 2)
        if failures > 1:
            with pytest.raises(Unavailable, match="push it again"):
                await push(client, NAME, new)
        else:
            await push(client, NAME, new)
            client.set_nodes([second.address])
            listed = decode(await models._whole(client, name_key(NAME), NAME))
            keys = {file.name: file.keys for file in listed}
            assert keys["config.json"] == (content_key((new / "config.json").read_bytes()),)
        await client.close()
