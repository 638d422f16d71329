"""How two hosts of a group come to trust each other: certificates and the cluster key, then what they have in common.

With a key both show that they have it, and neither shows the key itself. It knows no model and starts nothing.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.certificate import no_password
from serving.rank_group.host_line import HostGone, HostLine, HostWord, settle, shown
from serving.rank_group.host_plan import HostPlace

HOST_PROTOCOL = 3  # grows with every change of what hosts of a group tell each other
HANDSHAKE_SECONDS = 10.0
NONCE_BYTES = 32
WRONG_KEY = "the cluster key is missing or wrong; start every host of the group with the same one"
OTHER_VERSION = "it proves nothing, as a leader of another version may: all hosts of a group run one version"


class HostRefused(Exception):
    """One of the two hosts does not take the other; the text says why, and what to do."""


class HostNotYet(Exception):
    """The leader cannot be joined just now, and may be later."""


class HostUnproven(Exception):
    """Who answers in the leader's place does not take this host, and has not shown to be the leader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSecurity:
    """By what hosts of a group know each other: the cluster key, and the files of gRPC's certificates."""

    cluster_key: str | None = field(default=None, repr=False)
    certfile: str | None = None
    keyfile: str | None = None
    authorities: str | None = None
    server_name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostIdentity:
    """What the hosts of a group have to have in common."""

    version: str
    model: str  # the fingerprint of its files
    dtype: str
    ranks: int  # of the group
    kernels: str  # digest of the compiled kernels' sources
    protocol: int = HOST_PROTOCOL


@dataclass(frozen=True, slots=True)
class Meeting:
    """One connection of a host and its leader: the random words of both, and what the host says of itself."""

    security: HostSecurity
    leaders: str
    hosts: str
    body: str

    def proof(self, who: str, *said: str) -> str:
        """Of having the key and saying this, for this meeting alone; empty where there is none."""
        key = self.security.cluster_key
        if key is None:
            return ""
        words = "\0".join(("millrace-host-1", who, self.leaders, self.hosts, self.body, *said))
        return hmac.digest(key.encode(), words.encode("utf-8", "surrogatepass"), "sha256").hex()

    def refusing(self, reason: str, *, again: bool) -> str:
        """The leader's proof of a refusal."""
        return self.proof("refusal", reason, "again" if again else "for good")


@dataclass(frozen=True, slots=True)
class ComingHost:
    """A host that waits to be told whether it is taken; `known` once it has shown who it is."""

    line: HostLine
    place: HostPlace
    meeting: Meeting
    known: bool = True

    def take(self) -> HostLine:
        """Raises HostGone."""
        self.line.trusted = True  # before it answers
        self.line.send("taken", {"proof": self.meeting.proof("leader")}, HANDSHAKE_SECONDS)
        return self.line

    def refuse(self, reason: str, *, again: bool) -> None:
        """With `again` it may be taken later. Nothing is proven to strangers, who could try keys on it.

        Raises HostGone.
        """
        proof = self.meeting.refusing(reason, again=again) if self.known else ""
        try:
            self.line.send("refused", {"reason": reason, "again": again, "proof": proof}, HANDSHAKE_SECONDS)
        finally:
            self.line.close()


def greeted(connection: socket.socket, security: HostSecurity, own: HostIdentity) -> ComingHost:
    """A host that has connected to the leader.

    Raises HostRefused where it is not to come, HostGone, and ValueError for our own files; the connection is closed
    then.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    line = HostLine(_as_server(connection, security))
    try:
        return _shown(line, security, own)
    except (HostRefused, HostGone):
        line.close()
        raise


def _shown(line: HostLine, security: HostSecurity, own: HostIdentity) -> ComingHost:
    nonce = secrets.token_hex(NONCE_BYTES)
    keyed = security.cluster_key is not None
    line.send("greeting", {"nonce": nonce, "keyed": keyed}, HANDSHAKE_SECONDS)
    word = line.answer("hello", HANDSHAKE_SECONDS)
    body = word.text("body")
    meeting = Meeting(security, nonce, word.text("nonce"), body)
    known = _equal(word.text("proof"), meeting.proof("host"))
    reason = _unlike(body, own) if known else WRONG_KEY
    coming = ComingHost(line, _place(body), meeting, known)
    if reason is not None:
        coming.refuse(reason, again=False)
        raise HostRefused(reason)
    return coming


def joined(
    address: str, port: int, security: HostSecurity, own: HostIdentity, place: HostPlace, patience: float
) -> HostLine:
    """The connection to the leader, once it has taken this host, for which it may take `patience` seconds.

    Raises HostRefused, HostUnproven, HostNotYet where that may go otherwise later, and ValueError for our own files.
    """
    try:
        connection = socket.create_connection((address, port), HANDSHAKE_SECONDS)
    except OSError as error:
        raise HostNotYet(f"nobody answers at {address}:{port}: {error.strerror or error}") from error
    line = None
    try:
        line = HostLine(_as_client(connection, security, address))
        greeting = line.answer("greeting", HANDSHAKE_SECONDS)
        _be_taken(line, greeting, security, own, place, patience)
    except (HostGone, HostNotYet, HostRefused, HostUnproven) as error:
        if line is not None:
            line.close()
        if isinstance(error, HostGone):
            raise HostNotYet(str(error)) from error
        raise
    return line


def _be_taken(
    line: HostLine, greeting: HostWord, security: HostSecurity, own: HostIdentity, place: HostPlace, patience: float
) -> None:
    if greeting.facts.get("keyed") is not True and security.cluster_key is not None:
        raise _turned_away(security, "the leader asks for no cluster key, and this host has one; start both with one")
    nonce = secrets.token_hex(NONCE_BYTES)
    body = json.dumps({"start": place.start, "size": place.ranks, **asdict(own)})
    meeting = Meeting(security, greeting.text("nonce"), nonce, body)
    line.send("hello", {"nonce": nonce, "body": body, "proof": meeting.proof("host")}, HANDSHAKE_SECONDS)
    word = line.hear(patience)
    if word.kind == "refused":
        raise _refused(word, meeting)
    if word.kind != "taken" or not _equal(word.text("proof"), meeting.proof("leader")):
        raise _turned_away(security, "the leader's cluster key is another one; start every host of the group with one")
    line.trusted = True


def _refused(word: HostWord, meeting: Meeting) -> Exception:
    reason, again, proof = word.text("reason"), word.facts.get("again") is True, word.facts.get("proof")
    if _equal(proof if isinstance(proof, str) else "", meeting.refusing(reason, again=again)):
        return HostNotYet(reason) if again else HostRefused(reason)
    if again:
        return HostNotYet("who answers there puts this host off, and does not show the cluster key")
    said = reason if meeting.security.certfile is not None else shown(reason)
    return _turned_away(meeting.security, said if isinstance(proof, str) else f"{said}; {OTHER_VERSION}")


def _turned_away(security: HostSecurity, reason: str) -> HostRefused | HostUnproven:
    """By somebody who does not prove to have the key of this host, if it has one; a certificate is a proof too."""
    proven = security.cluster_key is None or security.certfile is not None
    return HostRefused(reason) if proven else HostUnproven(reason)


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())


def _unlike(body: str, own: HostIdentity) -> str | None:
    """Why the host that says this cannot be of the group."""
    theirs = _facts(body)
    if theirs.get("protocol") != own.protocol or theirs.get("version") != own.version:
        return (
            f"it is millrace {shown(theirs.get('version'))} (hosts' protocol {shown(theirs.get('protocol'))}), and the"
            f" leader {own.version!r} ({own.protocol}): all hosts of a group run one version"
        )
    if theirs.get("ranks") != own.ranks:
        return (
            f"--data-parallel-size is {shown(theirs.get('ranks'))} there and {own.ranks} at the leader: give every host"
            " of a group the same"
        )
    if theirs.get("dtype") != own.dtype:
        return (
            f"--dtype is {shown(theirs.get('dtype'))} there and {own.dtype!r} at the leader: give every host the same"
        )
    if (kernels := theirs.get("kernels")) != own.kernels:
        digest = kernels[:12] if isinstance(kernels, str) else kernels
        return (
            f"its compiled kernels are of the sources {shown(digest)}, the leader's of {own.kernels[:12]!r}: they may"
            " compute other bits; install one build of millrace on all hosts of a group"
        )
    if theirs.get("model") != own.model:
        return "its model's files are others than the leader's: every host of a group loads the same model"
    return None


def _place(body: str) -> HostPlace:
    """Raises HostGone for none."""
    facts = _facts(body)
    word = HostWord("hello", facts, 0)
    return HostPlace(word.number("start", 1 << 31), word.number("size", 1 << 31))


def _facts(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HostGone("it does not say who it is")
    return found


def _as_server(connection: socket.socket, security: HostSecurity) -> socket.socket:
    """Raises HostGone for who shows no certificate of our authorities, ValueError for our own files."""
    with _closed_unless_met(connection, security):
        settle(connection)
        if security.certfile is None:
            return connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # nobody resumes; and whoever waits for words is woken by words alone
        return _known(context, security).wrap_socket(connection, server_side=True)


def _as_client(connection: socket.socket, security: HostSecurity, address: str) -> socket.socket:
    """Raises HostGone for a leader that shows no certificate of our authorities for the name it is reached by.

    ValueError for our own files.
    """
    with _closed_unless_met(connection, security):
        settle(connection)
        if security.certfile is None:
            return connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return _known(context, security).wrap_socket(connection, server_hostname=security.server_name or address)


@contextmanager
def _closed_unless_met(connection: socket.socket, security: HostSecurity) -> Iterator[None]:
    """Raises HostGone for OSError."""
    met = False
    try:
        yield
        met = True
    except OSError as error:
        what = "the connection has ended" if security.certfile is None else "no TLS with certificates of --grpc-tls-ca"
        raise HostGone(f"{what}: {error}") from error
    finally:
        if not met:
            connection.close()


def _known(context: ssl.SSLContext, security: HostSecurity) -> ssl.SSLContext:
    """With the files as they are now: they are renewed while services run. Raises OSError."""
    assert security.certfile is not None and security.authorities is not None
    context.load_cert_chain(security.certfile, security.keyfile or security.certfile, password=no_password)
    context.load_verify_locations(security.authorities)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
