"""A folder of blocks on disk, one file each: written aside and renamed, verified whenever it is read.

    FORMAT                          the version of all this, as text
    lock                            held for as long as a node uses the folder
    aside/                          files being written; whatever a node finds here at its start is left over
    blocks/<namespace>/<ab>/<key>   keys in hex, <ab> being their first byte

It knows nothing of capacity or eviction. Any thread may call; two threads must
not write and remove the same key at the same time.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvcache.pool.block import KEY_BYTES, PoolBlock
from kvcache.pool.blockfile import FIRST_READ, FORMAT_VERSION, FileHeader, decode_header, encode_header, header_bytes
from serving.errors import CorruptChunk

NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")  # names a folder as it is
_BEFORE_FORMAT = {"lock", "aside"}  # what a node that died at its very first start may have left
_FORMAT = f"millrace KV pool, format {FORMAT_VERSION}\n"
_DAMAGE = {errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR}  # of opening or reading: the block is lost


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """A block's file as a scan finds it; what is in it has not been looked at."""

    key: bytes
    namespace: str
    bytes: int
    written_at: float  # seconds since the epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRange:
    """Parts first..last (exclusive) of a block, verified; `payload` is those parts alone."""

    header: FileHeader
    first: int
    last: int
    payload: bytes

    def part(self, index: int) -> memoryview:
        """The bytes of one part; no copy."""
        start = sum(self.header.sizes[self.first : index])
        return memoryview(self.payload)[start : start + self.header.sizes[index]]


class BlockFolder:
    """Raises ValueError when another node uses the folder, when it is not one of this format, or cannot be made one."""

    def __init__(self, root: Path):
        self._root = root
        self._numbers = itertools.count()
        self._folders = threading.Lock()  # no empty folder is removed while a file is about to come into it
        with _advising(root):
            root.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(root)
        try:
            with _advising(root):
                _check_format(root)
                (root / "aside").mkdir(exist_ok=True)
                (root / "blocks").mkdir(exist_ok=True)
                for left_over in (root / "aside").iterdir():
                    left_over.unlink()
        except BaseException:
            os.close(self._lock)
            raise

    def scan(self) -> list[FoundFile]:
        """Every block's file, oldest first; files that cannot be a block's are removed."""
        found: dict[bytes, FoundFile] = {}
        for path, status in _files(self._root / "blocks"):
            key = _key_named(path)
            if key is None or key in found:
                Path(path).unlink()
                continue
            namespace = Path(path).parts[-3]
            found[key] = FoundFile(key=key, namespace=namespace, bytes=status.st_size, written_at=status.st_mtime)
        for folder in (*(self._root / "blocks").glob("*/*"), *(self._root / "blocks").iterdir()):
            _remove_empty(folder)
        return sorted(found.values(), key=lambda file: file.written_at)

    def write(self, block: PoolBlock) -> None:
        """The file is there as a whole or not at all, whenever the process dies. Raises OSError.

        A power failure may lose or damage the last ones, and the damage is found when they are read.
        """
        path = self._path(block.key, block.namespace)
        aside = self._root / "aside" / str(next(self._numbers))
        try:
            with aside.open("xb") as file:
                file.write(encode_header(block))
                file.write(block.payload)
            with self._folders:
                try:
                    aside.rename(path)
                except FileNotFoundError:  # the first block of its folder
                    path.parent.mkdir(parents=True, exist_ok=True)
                    aside.rename(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise

    def read(self, key: bytes, namespace: str, first: int = 0, last: int = 0, most: int | None = None) -> PartRange:
        """Parts first..last (0: all) of a block, fewer if they would be more than `most` bytes, but at least one.

        A `first` beyond the last part gives an empty range. Raises CorruptChunk when the file is gone or not as it
        was written, OSError when it cannot be read now.
        """
        with _opened(self._path(key, namespace)) as descriptor:
            length = os.fstat(descriptor).st_size
            head = os.pread(descriptor, FIRST_READ, 0)
            if header_bytes(head, length) > len(head):
                head = os.pread(descriptor, header_bytes(head, length), 0)
            header = decode_header(head, key, length)
            if header.namespace != namespace:
                raise CorruptChunk("a file holds the block of another namespace", code="key")
            first = min(first, header.parts)
            last = _last_part(header, first, last, most)
            start, wanted = header.span(first, last)
            payload = head[start : start + wanted]
            if len(payload) < wanted:
                payload = _read_all(descriptor, start, wanted)
        header.verify(first, last, payload)
        return PartRange(header=header, first=first, last=last, payload=payload)

    def remove(self, key: bytes, namespace: str) -> None:
        """Also if it is not there. Tenants come and go by the thousand: the last block takes its folders along."""
        path = self._path(key, namespace)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        with self._folders:
            _remove_empty(path.parent)
            _remove_empty(path.parent.parent)

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, key: bytes, namespace: str) -> Path:
        return self._root / "blocks" / namespace / key[:1].hex() / key.hex()


@contextmanager
def _advising(root: Path) -> Iterator[None]:
    """What the system says against using the folder, as ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        why = "it is not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise ValueError(f"{root} cannot hold blocks: {why}: give the node a folder that it may write to") from error


def _locked(root: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed, or the process is gone."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise ValueError(
            f"{root} is in use by another pool node (process {owner or 'unknown'}): stop it, or give each node a "
            "folder of its own"
        ) from None
    with suppress(OSError):  # the lock holds without a name in it, on a full disk too
        os.pwrite(descriptor, f"{os.getpid():<10}\n".encode(), 0)
    return descriptor


def _check_format(root: Path) -> None:
    """Claim an empty folder, accept one of this format, refuse any other."""
    marker = root / "FORMAT"
    if marker.exists():
        found = marker.read_text(encoding="utf-8", errors="replace")
        if found != _FORMAT:
            raise ValueError(
                f"{root} says {found.strip()[:80]!r}, this build writes {_FORMAT.strip()!r}: give the node another "
                "folder, or delete this one (its blocks will be computed again)"
            )
        return
    others = sorted(path.name for path in root.iterdir() if path.name not in _BEFORE_FORMAT)
    if others:
        raise ValueError(f"{root} holds other files ({others[0]}, …) and no pool: give the node a folder of its own")
    (root / "aside").mkdir(exist_ok=True)
    fresh = root / "aside" / "FORMAT"
    fresh.write_text(_FORMAT, encoding="utf-8")
    fresh.rename(marker)


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below a folder. Folders are walked with scandir, which is what makes a million files bearable."""
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not
        folder.rmdir()


def _key_named(path: str) -> bytes | None:
    """The key a file is named after; None when it does not lie where that key belongs."""
    *_, blocks, namespace, first_byte, name = Path(path).parts
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    named = len(key) == KEY_BYTES and name == key.hex() and first_byte == name[:2]
    return key if named and blocks == "blocks" and NAMESPACE.fullmatch(namespace) else None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor to read from; damage that the system reports is CorruptChunk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _DAMAGE:
            raise CorruptChunk(f"a block on disk cannot be read: {error.strerror}", code="unreadable") from error
        raise


def _last_part(header: FileHeader, first: int, last: int, most: int | None) -> int:
    last = max(first, min(last or header.parts, header.parts))
    if most is None:
        return last
    end, total = first, 0
    while end < last and (end == first or total + header.sizes[end] <= most):
        total += header.sizes[end]
        end += 1
    return end


def _read_all(descriptor: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes: fewer at the end of the file."""
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
