"""`millrace keys` writes what a server reads, and a running server follows its file: the whole one or the last good."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.keys import changing, seconds_of
from deploy.runtime.key_file import PEPPER, KeyFile, read_keys
from serving.api.keyring import PREFIX
from serving.options import ConfigError

SECRET_PEPPER = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PEPPER, SECRET_PEPPER)
    monkeypatch.setenv("MILLRACE_API_KEYS_FILE", str(tmp_path / "keys.jsonl"))
    return tmp_path / "keys.jsonl"


def keys(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, data: bytes | None) -> None:
    """As an editor would, in place; None takes the file away."""
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


def create(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    return keys(capsys, "create", "--tenant", "acme", *words).strip()


def test_a_key_is_shown_once_stored_as_a_hash_and_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--requests-per-minute", "60", "--classes", "batch", "--expires-in", "90d", "--share-prefixes", "team")
    shown, plain = create(capsys, *words), create(capsys)
    prefix, key_id, secret = shown.split("-")
    assert prefix == PREFIX and len(bytes.fromhex(secret)) * 8 >= 128 and shown != plain
    stored = path.read_text()
    assert key_id in stored and secret not in stored and SECRET_PEPPER not in stored
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file = KeyFile(path, SECRET_PEPPER.encode())
    found = file.keyring.find(shown, 0.0)
    assert found is not None and found.limits.requests == 60 and found.classes == ("batch",)
    assert found.share_prefixes == "team" and not found.operator
    assert file.keyring.find(plain, 1e12) is not None and file.keyring.find(shown, 1e12) is None
    told = keys(capsys, "list")
    assert key_id in told and secret not in told and found.digest.hex() not in told
    keys(capsys, "revoke", key_id)
    assert list(read_keys(path)) == [plain.split("-")[1]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["create"], "--tenant"),
        (["create", "--tenant", "a b"], "tenant"),
        (["create", "--tenant", "a", "--requests-per-minute", "0"], "requests_per_minute"),
        (["create", "--tenant", "a", "--expires-in", "soon"], "90d"),
        (["revoke"], "which key"),
        (["revoke", "zzzz"], "no 'zzzz'"),
        (["list", "--file", "/nowhere/keys"], "/nowhere/keys"),
        (["create", "--tenant", "a", "--key-pepper-file", "/nowhere/pepper"], "/nowhere/pepper"),
    ],
)
def test_what_cannot_be_meant_changes_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    create(capsys)
    before = path.read_bytes()
    assert main(["keys", *words]) == 2
    assert told in capsys.readouterr().err
    assert path.read_bytes() == before and [found.name for found in path.parent.iterdir()] == [path.name]


def test_without_a_pepper_nothing_starts(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    create(capsys)
    for value in ("", "short"):
        monkeypatch.setenv(PEPPER, value)
        assert main(["keys", "list"]) == 2
        assert main(["serve", "--api-keys-file", str(path), "nowhere"]) == 2
        assert "pepper" in capsys.readouterr().err


def test_a_server_does_not_start_with_a_broken_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("{}\n")
    assert main(["router", "--api-keys-file", str(path), "nowhere"]) == 2
    assert "line 1" in capsys.readouterr().err


def test_of_several_writers_none_is_lost(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [first] = [create(capsys)]
    [entry] = read_keys(path).values()

    def add(number: int) -> None:
        with changing(path) as entries:
            name = f"writer{number}"
            entries[name] = type(entry)(id=name, tenant="acme", digest=entry.digest)

    writers = [threading.Thread(target=add, args=(number,)) for number in range(16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_keys(path)) == 17 and first.split("-")[1] in read_keys(path)


def test_a_file_stays_its_owners_and_a_link_a_link(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a server under another user could not read it any more, and no key would be revoked."""
    real = path.parent / "mounted" / "real.jsonl"
    real.parent.mkdir()
    path.symlink_to(real)
    first = create(capsys)
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 12345, 54321)
    before = real.stat()
    keys(capsys, "revoke", first.split("-")[1])
    after = real.stat()
    assert path.is_symlink() and read_keys(real) == {} and after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_no_file_is_written_that_no_server_takes(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.api.keyring.MOST_KEYS", 2)
    create(capsys)
    create(capsys)
    before = path.read_bytes()
    assert main(["keys", "create", "--tenant", "acme"]) == 2
    assert "more than 2 keys" in capsys.readouterr().err and path.read_bytes() == before


async def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no other file can be opened: what has been revoked meanwhile would be valid for ever."""
    shown = create(capsys)
    file = KeyFile(path, SECRET_PEPPER.encode())
    keys(capsys, "revoke", shown.split("-")[1])
    with monkeypatch.context() as full:

        def no_room(*_: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        full.setattr("deploy.runtime.key_file.read_given", no_room)
        await file.refresh()
        await file.refresh()
    assert file.failures == 1 and file.keyring.find(shown, 0.0) is not None
    await file.refresh()
    assert file.keyring.find(shown, 0.0) is None and file.loads == 2


async def test_a_running_server_follows_its_file_and_keeps_the_last_good(
    path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = create(capsys)
    file = KeyFile(path, SECRET_PEPPER.encode())
    second = create(capsys)
    assert file.keyring.find(second, 0.0) is None
    await file.refresh()
    assert file.keyring.find(second, 0.0) is not None and (file.loads, file.failures) == (2, 0)
    good = read(path)
    with caplog.at_level(logging.ERROR):
        for number, broken in enumerate((good[:-40], b"\xff", b"x" * 100_000), 1):
            write(path, broken)
            await file.refresh()
            await file.refresh()
            assert (file.loads, file.failures) == (2, number), "told once for each"
        write(path, None)
        await file.refresh()
    assert file.failures == 4 and file.keyring.find(first, 0.0) is not None
    assert caplog.text.count("API keys stay as they were") == 4
    assert first.split("-")[2] not in caplog.text and SECRET_PEPPER not in caplog.text
    write(path, b"")
    await file.refresh()
    assert file.keyring.find(first, 0.0) is None, "an empty file is a good one: nobody may come in"


def test_a_pepper_file_goes_before_the_environment(path: Path, tmp_path: Path, capsys: Any) -> None:
    pepper = tmp_path / "pepper"
    pepper.write_text("another pepper of the tests\n")
    shown = create(capsys, "--key-pepper-file", str(pepper))
    assert KeyFile(path, b"another pepper of the tests").keyring.find(shown, 0.0) is not None
    assert KeyFile(path, SECRET_PEPPER.encode()).keyring.find(shown, 0.0) is None


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none")


def test_times_of_validity() -> None:
    assert [seconds_of(text) for text in ("90d", "12h", "30m", "45s")] == [7_776_000, 43_200, 1800, 45]


@pytest.mark.parametrize("action", ["create", "list"])
def test_an_id_where_none_is_taken_is_refused(action: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before: `keys create mine` made a key of another id, and said nothing."""
    assert main(["keys", action, "mine", "--tenant", "acme"]) == 2
    assert f"keys {action} takes no id, but 'mine' is given" in capsys.readouterr().err and not path.exists()
