"""Files that flags name: what is none of the regular ones is an error at once, whoever reads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.chat_template import read_chat_template
from deploy.placement.given import load_placement
from deploy.router_snapshot import SnapshotFile
from deploy.runtime.key_file import KeyFile, read_keys, read_pepper
from deploy.runtime.tls import server_context
from serving.certificate import read_certificate
from serving.config import HttpConfig
from serving.errors import MillraceError
from serving.given_files import read_given, read_given_text
from serving.grpc_tls import grpc_tls
from serving.options import load_file
from serving.reloaded import ReloadedFiles
from serving.security_config import SecurityConfig
from serving.service_config import read_service_classes

PEPPER = b"pepper of the tests"
READERS: dict[str, Callable[[str], object]] = {
    "any": read_given,
    "--config": lambda path: load_file(Path(path), ()),
    "--placement": load_placement,
    "--service-classes": read_service_classes,
    "--chat-template": read_chat_template,
    "--api-keys-file": lambda path: read_keys(Path(path)),
    "--key-pepper-file": lambda path: read_pepper(path, {}),
    "--ssl-certfile": lambda path: server_context(HttpConfig(ssl_certfile=path)),
    "a certificate": lambda path: read_certificate(path, path, path),
    "--grpc-tls-certfile": lambda path: grpc_tls(SecurityConfig(grpc_tls_certfile=path, grpc_tls_ca=path)),
}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A reader that waits for ever fails its test."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["fifo", "folder", "device", "link"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    return {"fifo": str(fifo), "folder": str(tmp_path), "device": "/dev/zero", "link": str(link)}[request.param]


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_an_error_at_once(reader: str, no_file: str) -> None:
    with pytest.raises((OSError, ValueError, MillraceError), match=r"regular file|directory"):
        READERS[reader](no_file)


def test_a_snapshot_that_is_none_counts_for_nothing(no_file: str, caplog: pytest.LogCaptureFixture) -> None:
    assert SnapshotFile(Path(no_file)).read() is None and "cannot be read" in caplog.text


async def test_a_file_that_becomes_a_fifo_changes_nothing(tmp_path: Path) -> None:
    """Before: the thread that looked at it stood still, and no key was revoked any more."""
    path = tmp_path / "keys"
    path.write_bytes(b"")
    keys, files = KeyFile(path, PEPPER), ReloadedFiles([str(path)], lambda: read_given(path), look_seconds=0)
    path.unlink()
    os.mkfifo(path)
    await keys.refresh()
    assert keys.failures == 1 and files.current() == b"" and files.failures == 0


def test_a_regular_one_is_read_whole_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("é" * 10)
    assert read_given(path, 20) == path.read_bytes() and read_given_text(path, 20) == "é" * 10
    with pytest.raises(OSError, match="larger than 19 bytes"):
        read_given(path, 19)
