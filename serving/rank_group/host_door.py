"""How two hosts of a group come to trust each other: certificates and the cluster key, then what they have in common.

With a key both show that they have it, and neither shows the key itself. It knows no model and starts nothing.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import ssl
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.certificate import no_password
from serving.rank_group.host_line import HostGone, HostLine, HostWord, settle
from serving.rank_group.host_plan import HostPlace

HOST_PROTOCOL = 1  # grows with every change of what hosts of a group tell each other
HANDSHAKE_SECONDS = 10.0
NONCE_BYTES = 32


class HostRefused(Exception):
    """One of the two hosts does not take the other; the text says why, and what to do."""


class HostNotYet(Exception):
    """The leader cannot be joined just now, and may be later."""


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
    protocol: int = HOST_PROTOCOL


@dataclass(frozen=True, slots=True)
class ComingHost:
    """A host that has shown who it is, and waits to be told whether it is taken."""

    line: HostLine
    place: HostPlace
    proof: str  # that the leader has the key, too

    def take(self) -> HostLine:
        """Raises HostGone."""
        self.line.trusted = True  # before it answers
        self.line.send("taken", {"proof": self.proof}, HANDSHAKE_SECONDS)
        return self.line

    def refuse(self, reason: str, *, again: bool) -> None:
        """With `again` it may be taken later. Raises HostGone."""
        try:
            self.line.send("refused", {"reason": reason, "again": again}, HANDSHAKE_SECONDS)
        finally:
            self.line.close()


def greeted(connection: socket.socket, security: HostSecurity, own: HostIdentity) -> ComingHost:
    """A host that has connected to the leader.

    Raises HostRefused where it is not to come, and HostGone; then the connection is closed.
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
    body, theirs = word.text("body"), word.text("nonce")
    if _equal(word.text("proof"), _proof(security, "host", nonce, theirs, body)):
        reason = _unlike(body, own)
    else:
        reason = "the cluster key is missing or wrong; start every host of the group with the same one"
    coming = ComingHost(line, _place(body), _proof(security, "leader", nonce, theirs, body))
    if reason is not None:
        coming.refuse(reason, again=False)
        raise HostRefused(reason)
    return coming


def joined(
    address: str, port: int, security: HostSecurity, own: HostIdentity, place: HostPlace, patience: float
) -> HostLine:
    """The connection to the leader, once it has taken this host, for which it may take `patience` seconds.

    Raises HostRefused, and HostNotYet where that may go otherwise later.
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
    except (HostGone, HostNotYet, HostRefused) as error:
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
        raise HostRefused("the leader asks for no cluster key, and this host has one; start both with the same one")
    nonce, theirs = secrets.token_hex(NONCE_BYTES), greeting.text("nonce")
    body = json.dumps({"start": place.start, "size": place.ranks, **asdict(own)})
    proof = _proof(security, "host", theirs, nonce, body)
    line.send("hello", {"nonce": nonce, "body": body, "proof": proof}, HANDSHAKE_SECONDS)
    word = line.hear(patience)
    if word.kind == "refused":
        raise (HostNotYet if word.facts.get("again") is True else HostRefused)(word.text("reason"))
    expected = _proof(security, "leader", theirs, nonce, body)
    if word.kind != "taken" or not _equal(word.text("proof"), expected):
        raise HostRefused("the leader's cluster key is another one; start every host of the group with the same one")
    line.trusted = True


def _proof(security: HostSecurity, who: str, leaders: str, hosts: str, body: str) -> str:
    """Of having the key, for this meeting alone; empty where there is none."""
    if security.cluster_key is None:
        return ""
    said = "\0".join(("millrace-host-1", who, leaders, hosts, body))
    return hmac.digest(security.cluster_key.encode(), said.encode("utf-8", "surrogatepass"), "sha256").hex()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())


def _unlike(body: str, own: HostIdentity) -> str | None:
    """Why the host that says this cannot be of the group."""
    theirs = _facts(body)
    if theirs.get("protocol") != own.protocol or theirs.get("version") != own.version:
        return (
            f"it is millrace {theirs.get('version')} (hosts' protocol {theirs.get('protocol')}), and the leader"
            f" {own.version} ({own.protocol}): all hosts of a group run one version"
        )
    if theirs.get("ranks") != own.ranks:
        return (
            f"--data-parallel-size is {theirs.get('ranks')} there and {own.ranks} at the leader: give every host of a"
            " group the same"
        )
    if theirs.get("dtype") != own.dtype:
        return f"--dtype is {theirs.get('dtype')} there and {own.dtype} at the leader: give every host the same"
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
    """Raises HostGone for who shows no certificate of our authorities."""
    settle(connection)
    if security.certfile is None:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # nobody resumes; and whoever waits for words is woken by words alone
    try:
        return _known(context, security).wrap_socket(connection, server_side=True)
    except OSError as error:
        connection.close()
        raise HostGone(f"no TLS with certificates of --grpc-tls-ca: {error}") from error


def _as_client(connection: socket.socket, security: HostSecurity, address: str) -> socket.socket:
    """Raises HostGone for a leader that shows no certificate of our authorities for the name it is reached by."""
    settle(connection)
    if security.certfile is None:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        name = security.server_name or address
        return _known(context, security).wrap_socket(connection, server_hostname=name)
    except OSError as error:
        connection.close()
        raise HostGone(f"no TLS with certificates of --grpc-tls-ca: {error}") from error


def _known(context: ssl.SSLContext, security: HostSecurity) -> ssl.SSLContext:
    """With the files as they are now: they are renewed while services run. Raises OSError."""
    assert security.certfile is not None and security.authorities is not None
    context.load_cert_chain(security.certfile, security.keyfile or security.certfile, password=no_password)
    context.load_verify_locations(security.authorities)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
