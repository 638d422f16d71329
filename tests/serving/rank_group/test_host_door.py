"""Who may join a leader's group: hosts with its key, certificates, version, model and sizes, and nobody else."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from serving.rank_group import host_door
from serving.rank_group.host_door import (
    ComingHost,
    HostIdentity,
    HostNotYet,
    HostRefused,
    HostSecurity,
    HostUnproven,
    Meeting,
    greeted,
    joined,
)
from serving.rank_group.host_line import _LENGTHS, MOST_STRANGERS_BYTES, HostGone, HostLine
from serving.rank_group.host_plan import HostPlace
from tests.certificates import SERVICE, Authority, Files

OWN = HostIdentity(version="1.2.3", model="0" * 32, dtype="float32", ranks=4, kernels="2" * 64)
PLACE = HostPlace(2, 2)
KEY = HostSecurity(cluster_key="the key")
SECONDS = 60.0


class Door:
    """A leader's, by which one host after the other comes; `decides` about those that have shown who they are."""

    def __init__(self, security: HostSecurity, decides: Callable[[ComingHost], object]) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listening.getsockname()[1]
        self.security, self.decides = security, decides
        self.refused: list[str] = []
        self.lines: list[HostLine] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            found = greeted(connection, self.security, OWN)
            self.lines.append(found.line)
            self.decides(found)
        except (HostRefused, HostGone) as error:
            self.refused.append(str(error))

    def join(self, security: HostSecurity, identity: HostIdentity = OWN) -> HostLine:
        return joined("127.0.0.1", self.port, security, identity, PLACE, SECONDS)

    def close(self) -> None:
        """Safe to repeat."""
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self._thread.join()
        for line in self.lines:
            line.close()


@pytest.fixture
def door() -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def make(security: HostSecurity = KEY, decides: Callable[[ComingHost], object] = ComingHost.take) -> Door:
        made.append(Door(security, decides))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("security", [KEY, HostSecurity()])
def test_a_host_that_is_taken_and_its_leader_talk(security: HostSecurity, door: Callable[..., Door]) -> None:
    made = door(security)
    line = made.join(security)
    line.send("word", {"number": 3}, SECONDS, [memoryview(b"bytes")])
    [theirs] = made.lines
    word, found = theirs.answer("word", SECONDS), bytearray(5)
    theirs.bytes_into(word, memoryview(found), SECONDS)
    assert (word.number("number", 3), found) == (3, b"bytes")
    assert line.sent == theirs.received
    line.close()


@pytest.mark.parametrize(
    ("security", "identity", "told"),
    [
        (HostSecurity(), OWN, "the cluster key is missing or wrong"),
        (KEY, replace(OWN, version="1.2.4"), r"it is millrace '1\.2\.4' .*the leader '1\.2\.3'"),
        (KEY, replace(OWN, protocol=99), "protocol 99"),
        (KEY, replace(OWN, ranks=5), "--data-parallel-size is 5 there and 4 at the leader"),
        (KEY, replace(OWN, dtype="bfloat16"), "--dtype is 'bfloat16' there and 'float32' at the leader"),
        (KEY, replace(OWN, kernels="3" * 64), "its compiled kernels are of the sources '3+', the leader's of '2+'"),
        (KEY, replace(OWN, model="1" * 32), "its model's files are others than the leader's"),
    ],
)
def test_who_is_refused_is_told_why(
    security: HostSecurity, identity: HostIdentity, told: str, door: Callable[..., Door]
) -> None:
    """Whoever lacks the key is told of nothing else."""
    made = door()
    with pytest.raises(HostRefused, match=told):
        made.join(security, identity)
    assert made.lines == []


@pytest.mark.parametrize("identity", [OWN, replace(OWN, ranks=5)])
def test_who_has_another_key_is_told_of_nothing_else(identity: HostIdentity, door: Callable[..., Door]) -> None:
    """And has no proof that it is the leader who says so, since both have keys that the other one lacks."""
    made = door()
    with pytest.raises(HostUnproven, match="the cluster key is missing or wrong"):
        made.join(HostSecurity(cluster_key="another"), identity)
    assert made.lines == []


@given(st.text(max_size=40), st.text(max_size=40), st.booleans())
def test_a_refusal_is_proven_by_the_key_for_its_own_words_and_meeting_alone(
    reason: str, other: str, again: bool
) -> None:
    meeting = Meeting(KEY, "leader's", "host's", "{}")
    proof = meeting.refusing(reason, again=again)
    assert proof == meeting.refusing(reason, again=again)
    others = [
        meeting.refusing(reason, again=not again),
        replace(meeting, security=HostSecurity(cluster_key="another")).refusing(reason, again=again),
        replace(meeting, hosts="another").refusing(reason, again=again),
        replace(meeting, leaders="another").refusing(reason, again=again),
        meeting.proof("leader"),
        meeting.proof("host"),
    ]
    assert proof not in others
    assert (proof == meeting.refusing(other, again=again)) is (reason == other)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ({"reason": "go away", "again": False, "proof": ""}, "'go away'"),
        ({"reason": "x" * 9000, "again": False, "proof": "0" * 64}, "xxx"),
    ],
)
def test_a_refusal_of_somebody_without_the_key_is_not_the_leaders(
    says: Mapping[str, Any], told: str, door: Callable[..., Door]
) -> None:
    """Whoever answers in the leader's place while it is away would end its hosts. A log gets little of their words."""

    def refuse(coming: ComingHost) -> None:
        coming.line.send("refused", says, SECONDS)
        coming.line.close()

    made = door(decides=refuse)
    with pytest.raises(HostUnproven, match=told) as raised:
        made.join(KEY)
    assert len(str(raised.value)) < 100


@pytest.mark.parametrize(
    "says", [{"reason": "it is millrace 2, and the leader 1", "again": False}, {"reason": "no", "proof": None}], ids=str
)
def test_a_refusal_of_a_leader_that_proves_nothing_yet_names_what_to_look_at(
    says: Mapping[str, Any], door: Callable[..., Door]
) -> None:
    """So leaders of the protocol before refuse: a host that asked on for ever would hide why."""

    def refuse(coming: ComingHost) -> None:
        coming.line.send("refused", says, SECONDS)
        coming.line.close()

    with pytest.raises(HostUnproven, match=f"'{says['reason']}'; .*all hosts of a group run one version"):
        door(decides=refuse).join(KEY)
    with pytest.raises(HostRefused, match=says["reason"]):
        door(HostSecurity(), refuse).join(HostSecurity())


@pytest.mark.parametrize("name", ["version", "protocol", "ranks", "dtype"])
@pytest.mark.parametrize("said", ["x" * 9000, "line\nafter line", {"x" * 9000: 0}], ids=["long", "lines", "table"])
def test_a_leaders_log_has_little_of_what_a_host_says(name: str, said: object) -> None:
    """Without a key anybody may say it."""
    reason = host_door._unlike(json.dumps(asdict(OWN) | {name: said}), OWN)
    assert reason is not None and len(reason) < 300 and "\n" not in reason


def test_who_is_put_off_by_somebody_without_the_key_comes_again(door: Callable[..., Door]) -> None:
    made = door(decides=lambda coming: replace(coming, known=False).refuse("x" * 9000, again=True))
    with pytest.raises(HostNotYet, match="does not show the cluster key") as raised:
        made.join(KEY)
    assert "xxx" not in str(raised.value)


def test_a_leader_without_the_key_is_not_joined(door: Callable[..., Door]) -> None:
    with pytest.raises(HostUnproven, match="the leader asks for no cluster key"):
        door(HostSecurity()).join(KEY)


def test_a_leader_that_only_claims_the_key_is_not_joined(door: Callable[..., Door]) -> None:
    another = HostSecurity(cluster_key="another")
    made = door(decides=lambda coming: replace(coming, meeting=replace(coming.meeting, security=another)).take())
    with pytest.raises(HostUnproven, match="the leader's cluster key is another one"):
        made.join(KEY)


def test_a_leader_that_says_what_the_host_said_is_not_joined() -> None:
    """One without the key has nothing but the host's own proof."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def echo() -> None:
            connection, _ = listening.accept()
            line = HostLine(connection)
            line.send("greeting", {"nonce": "n", "keyed": True}, SECONDS)
            line.send("taken", {"proof": line.answer("hello", SECONDS).text("proof")}, SECONDS)
            line.close()

        thread = threading.Thread(target=echo)
        thread.start()
        with pytest.raises(HostUnproven, match="the leader's cluster key is another one"):
            joined("127.0.0.1", listening.getsockname()[1], KEY, OWN, PLACE, SECONDS)
        thread.join()


def test_the_key_and_a_proof_that_was_heard_are_of_no_use_to_others(door: Callable[..., Door]) -> None:
    """The key does not travel, and what a host has shown once is refused the next time."""
    heard: list[Mapping[str, Any]] = []
    made = door()
    with socket.create_connection(("127.0.0.1", made.port)) as stranger:
        line = HostLine(stranger)
        nonce = line.answer("greeting", SECONDS).text("nonce")
        body = json.dumps({"start": 2, "size": 2, "protocol": 2, "version": "1.2.3", "ranks": 4})
        heard.append({"nonce": "n", "body": body, "proof": Meeting(KEY, nonce, "n", body).proof("host")})
        assert KEY.cluster_key is not None and KEY.cluster_key not in json.dumps(heard)
    with socket.create_connection(("127.0.0.1", made.port)) as stranger:
        line = HostLine(stranger)
        line.answer("greeting", SECONDS)
        line.send("hello", heard[0], SECONDS)
        assert "cluster key" in line.hear(SECONDS).text("reason")
    assert "the key" not in repr(KEY)


def test_who_is_to_come_again_is_no_refusal(door: Callable[..., Door]) -> None:
    made = door(decides=lambda coming: coming.refuse("not just now", again=True))
    with pytest.raises(HostNotYet, match="not just now"):
        made.join(KEY)
    made.close()
    with pytest.raises(HostNotYet, match=r"nobody answers at 127\.0\.0\.1"):
        made.join(KEY)


def secured(found: Files, *, name: str | None = SERVICE, key: str | None = None) -> HostSecurity:
    return HostSecurity(
        cluster_key=key,
        certfile=str(found.certificate),
        keyfile=str(found.key),
        authorities=str(found.authorities),
        server_name=name,
    )


def test_with_certificates_only_those_of_the_authorities_come_in(
    tmp_path: Path, door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = Authority("ours"), Authority("others")
    good, bad = ours.files(tmp_path / "good"), others.files(tmp_path / "bad", trusts=ours.pem)
    made = door(secured(good))
    line = made.join(secured(good))
    assert isinstance(line.connection, ssl.SSLSocket) and line.connection.version() in ("TLSv1.2", "TLSv1.3")
    line.close()
    with pytest.raises(HostNotYet):  # TLS 1.3 tells a client so only when it has begun to talk
        made.join(secured(bad))
    with pytest.raises(HostNotYet, match="no TLS with certificates"):
        made.join(secured(ours.files(tmp_path / "strict", trusts=others.pem)))
    with pytest.raises(HostNotYet, match="no TLS with certificates"):
        made.join(secured(good, name="another.name"))
    monkeypatch.setattr(host_door, "HANDSHAKE_SECONDS", 0.2)  # both wait for the other's first word
    with pytest.raises(HostNotYet):
        made.join(HostSecurity())
    assert len(made.lines) == 1


def test_a_key_with_a_password_leaves_no_connection_open(tmp_path: Path) -> None:
    """A certificate may be renewed so while the service runs: who has connected is not to wait for nothing."""
    files = Authority().files(tmp_path)
    form = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ValueError, match="has a password") as joining:
            joined("127.0.0.1", port, secured(files), OWN, PLACE, SECONDS)
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(SECONDS)
            assert connection.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            connection, _ = listening.accept()
            with pytest.raises(ValueError, match="has a password") as greeting:
                greeted(connection, secured(files), OWN)
            stranger.settimeout(SECONDS)
            assert stranger.recv(1) == b""
    assert joining.value is not greeting.value, "both are held with their frames, so that nobody else closes for them"


@given(st.binary(max_size=200))
def test_nonsense_ends_a_connection_and_nothing_else(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        line = HostLine(ours)
        with pytest.raises(HostGone):
            line.hear(SECONDS)


@pytest.mark.parametrize(
    "word",
    [b"[" * 10_000, b"[]", b"{}", b'{"kind":3}', b'{"kind":"hello"}', b'{"kind":"hello","body":"\\ud800"}', b"\xff"],
)
def test_words_of_strangers_that_are_none(word: bytes, door: Callable[..., Door]) -> None:
    made = door()
    with socket.create_connection(("127.0.0.1", made.port)) as stranger:
        HostLine(stranger).answer("greeting", SECONDS)
        stranger.sendall(_LENGTHS.pack(len(word), 0) + word)
        assert stranger.recv(1) == b""
    made.close()
    assert made.lines == [] and len(made.refused) == 1


@pytest.mark.parametrize("lengths", [(MOST_STRANGERS_BYTES + 1, 0), (10, 1), (2**32 - 1, 2**64 - 1)])
def test_strangers_send_little(lengths: tuple[int, int], door: Callable[..., Door]) -> None:
    made = door()
    with socket.create_connection(("127.0.0.1", made.port)) as stranger:
        HostLine(stranger).answer("greeting", SECONDS)
        stranger.sendall(_LENGTHS.pack(*lengths))
        assert stranger.recv(1) == b""
    made.close()
    assert "no word of a host of ranks" in made.refused[0]


def test_waits_end_in_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = HostLine(ours)
        with pytest.raises(HostGone, match=r"has not answered within 0\.05 s"):
            line.hear(0.05)
        with pytest.raises(HostGone, match=r"has taken nothing for 0\.05 s"):
            line.send("word", {}, 0.05, [memoryview(bytes(64 << 20))])
        theirs.close()
        with pytest.raises(HostGone, match=r"closed the connection|has ended"):
            line.hear(SECONDS)
