"""Models in the KV pool: their files as content-addressed blocks, and under each model's name a list of them.

A worker that finds a model here reads it from other hosts' memory instead of a disk or a hub. Nothing here knows what
the files mean.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePath

from kvcache.pool.block import KEY_BYTES, PoolBlock, make_block
from kvcache.pool.client import PoolClient
from serving.errors import CorruptChunk, NotFound, Unavailable

NAMESPACE = "models"
BLOCK_BYTES = 4 << 20
BATCH_BLOCKS = 8  # under way at a time
FORMAT = 1
RETRY_SECONDS = 0.25  # between tries to have a node take what it had no room for, or that did not answer
RETRIES = 20  # without a block stored, and it is given up

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model: its name in the folder, its bytes, and the keys of its blocks in order."""

    name: str
    size: int
    keys: tuple[bytes, ...]


def name_key(model: str) -> bytes:
    """Where the list of a model's files is kept."""
    return sha256(b"millrace-model\0" + model.encode()).digest()


def content_key(data: bytes | memoryview) -> bytes:
    """Where bytes of weights are kept: what is found there can be checked against the key itself."""
    return sha256(b"millrace-weights\0" + data).digest()


def model_files(path: Path) -> list[Path]:
    """The files of a model: the GGUF file, or what lies in its folder. Raises ValueError when there is none."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    if not files:
        raise ValueError(f"{path} holds no files")
    return files


async def push(pool: PoolClient, model: str, path: Path, progress: Progress = lambda done, total: None) -> int:
    """Store the model at `path` under this name; its bytes.

    Raises NotFound when the pool did not keep all of it, Unavailable when an earlier list of its files may be left.
    """
    files = model_files(path)
    total = sum(file.stat().st_size for file in files)
    done = 0
    listed: list[ModelFile] = []
    for file in files:
        keys: list[bytes] = []
        contents = _contents_of(file)
        while blocks := await asyncio.to_thread(_next_blocks, contents):
            if not await _stored(pool, blocks):
                raise _not_kept(model, total)
            keys += [block.key for block in blocks]
            done += sum(len(block.payload) for block in blocks)
            progress(done, total)
        listed.append(ModelFile(file.name, file.stat().st_size, tuple(keys)))
    every = [key for file in listed for key in file.keys]
    if await pool.lookup(every) < len(every):
        raise _not_kept(model, total)
    await _put_list(pool, model, listed)
    return total


async def _stored(pool: PoolClient, blocks: Sequence[PoolBlock]) -> bool:
    """True if the pool has all of them in the end. A node with a full backlog refuses more, and takes it later."""
    left, tries = list(blocks), 0
    while tries <= RETRIES:
        await pool.put(left)
        here = await pool.lookup([block.key for block in left])
        if here == len(left):
            return True
        left, tries = left[here:], 0 if here else tries + 1
        await asyncio.sleep(RETRY_SECONDS)
    return False


async def _put_list(pool: PoolClient, model: str, files: Sequence[ModelFile]) -> None:
    """In the place of an earlier push's list, which may have been of other files: a node keeps what it has."""
    key, listed = name_key(model), encode(files)
    for _ in range(RETRIES + 1):
        if await pool.evict([key]):
            break
        await asyncio.sleep(RETRY_SECONDS)
    else:
        raise Unavailable(f"a node that may hold an earlier {model} does not answer: push it again when all nodes do")
    if not await _stored(pool, [make_block(key, NAMESPACE, [listed])]) or await _whole(pool, key, model) != listed:
        raise Unavailable(f"the KV pool holds another {model}, pushed at the same time: push it again")


def _not_kept(model: str, total: int) -> NotFound:
    return NotFound(f"the KV pool did not keep all of {model}: it needs room for {total} bytes, and nodes that answer")


async def pull(pool: PoolClient, model: str, folder: Path, progress: Progress = lambda done, total: None) -> Path:
    """Write the model's files into `folder`; the path to load. Raises NotFound when the pool lacks some of them."""
    files = decode(await _whole(pool, name_key(model), model))
    total, done = sum(file.size for file in files), 0
    for file in files:
        with (folder / file.name).open("wb") as out:
            for start in range(0, len(file.keys), BATCH_BLOCKS):
                for data in await _contents(pool, file.keys[start : start + BATCH_BLOCKS], model):
                    await asyncio.to_thread(out.write, data)
                    done += len(data)
                    progress(done, total)
        if (folder / file.name).stat().st_size != file.size:
            raise NotFound(f"{file.name} of {model} is not whole in the KV pool")
    return folder / files[0].name if len(files) == 1 else folder


def encode(files: Sequence[ModelFile]) -> bytes:
    listed = [{"name": file.name, "size": file.size, "keys": b"".join(file.keys).hex()} for file in files]
    return json.dumps({"format": FORMAT, "files": listed}).encode()


def decode(data: bytes) -> list[ModelFile]:
    """Raises NotFound for a list of another format, or one that names files elsewhere."""
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise NotFound(f"the model was stored in format {found['format']}, not {FORMAT}: push it again")
        files = [ModelFile(one["name"], one["size"], tuple(_cut(bytes.fromhex(one["keys"])))) for one in found["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise NotFound("the KV pool's list of the model's files cannot be read: push it again") from error
    if not files or any(PurePath(file.name).name != file.name for file in files):
        raise NotFound("the KV pool's list of the model's files names no file, or one outside its folder")
    return files


def _cut(keys: bytes) -> Iterator[bytes]:
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


def _contents_of(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        while data := source.read(BLOCK_BYTES):
            yield data


def _next_blocks(contents: Iterator[bytes]) -> list[PoolBlock]:
    return [make_block(content_key(data), NAMESPACE, [data]) for data in islice(contents, BATCH_BLOCKS)]


async def _contents(pool: PoolClient, keys: Sequence[bytes], model: str) -> list[bytes]:
    """The bytes under these keys, in order, each checked against its key."""
    found = await _parts(pool, keys)
    if len(found) < len(keys):
        raise NotFound(f"the KV pool has only part of {model}")
    ordered = [found[index] for index in range(len(keys))]
    if await asyncio.to_thread(lambda: any(content_key(data) != key for key, data in zip(keys, ordered, strict=True))):
        raise CorruptChunk(f"bytes of {model} in the KV pool are not those of their key", code="digest")
    return ordered


async def _whole(pool: PoolClient, key: bytes, model: str) -> bytes:
    found = await _parts(pool, [key])
    if not found:
        raise NotFound(f"the KV pool does not have {model}; store it with `millrace cache push`")
    return found[0]


async def _parts(pool: PoolClient, keys: Sequence[bytes]) -> dict[int, bytes]:
    """What the pool has under these keys, by their indices."""
    async with aclosing(pool.get(keys, parts=1)) as slabs:
        return {index: bytes(data) async for slab in slabs for index, _, data in slab.parts()}
