"""Stored keys: only the right secret finds its entry, damaged files are refused by line, and no secret is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcache.blocks.prefix import root_key
from kvcache.pool.block import namespace_of
from serving.api import keyring
from serving.api.keyring import KeyEntry, Keyring, key_digest, parse_keys, write_keys
from serving.api.rate_limit import KeyLimits
from serving.messages import owned
from serving.options import ConfigError

PEPPER = b"pepper of the tests"
SECRET = "5ec2e7"
NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")
NUMBERS = st.none() | st.integers(1, 10**9)


def entry(key_id: str = "abcd", tenant: str = "acme", secret: str = SECRET, **fields: Any) -> KeyEntry:
    return KeyEntry(id=key_id, tenant=tenant, digest=key_digest(PEPPER, key_id, secret), **fields)


def ring(*entries: KeyEntry, pepper: bytes = PEPPER) -> Keyring:
    return Keyring(pepper, {one.id: one for one in entries})


ENTRIES = st.builds(
    entry,
    key_id=st.from_regex(r"\A[a-z0-9]{4,32}\Z"),
    tenant=NAMES,
    limits=st.builds(KeyLimits, requests=NUMBERS, tokens=NUMBERS, concurrent=NUMBERS),
    classes=st.lists(NAMES, max_size=3).map(tuple),
    priority=st.none() | st.integers(-10, 10),
    expires=NUMBERS,
    share_prefixes=st.just("") | NAMES,
    operator=st.booleans(),
)


@example([entry(priority=0)])
@given(st.lists(ENTRIES, max_size=5, unique_by=lambda one: one.id))
def test_what_is_written_is_read(entries: list[KeyEntry]) -> None:
    found = {one.id: one for one in entries}
    assert parse_keys(write_keys(found), "keys") == found


def test_only_the_right_key_is_found() -> None:
    keys = ring(entry(), entry("efgh", secret="other"))
    assert keys.find(f"mr-abcd-{SECRET}", 0.0) == entry()
    wrong = ["", "mr", "mr-abcd", "mr-abcd-", f"mr-efgh-{SECRET}", f"mr-zzzz-{SECRET}", f"sk-abcd-{SECRET}"]
    wrong += [
        f"mr-abcd-{SECRET}0",
        f"mr-abcd-{SECRET[:-1]}",
        f"mr-abcd-{SECRET.upper()}",
        "mr--",
        "--",
        "\xff-\xff-\xff",
    ]
    assert [key for key in wrong if keys.find(key, 0.0) is not None] == []
    assert ring(entry(), pepper=PEPPER + b"!").find(f"mr-abcd-{SECRET}", 0.0) is None, "the hash alone is no key"


@given(st.text(max_size=60))
def test_no_text_breaks_it(shown: str) -> None:
    assert ring(entry()).find(shown, 0.0) is None


def test_a_key_expires() -> None:
    keys = ring(entry(expires=100))
    assert keys.find(f"mr-abcd-{SECRET}", 99.9) is not None
    assert keys.find(f"mr-abcd-{SECRET}", 100.0) is None


def test_no_owner_is_anothers_or_can_be_named_by_a_salt() -> None:
    same, shared = {"share_prefixes": "team"}, {"share_prefixes": "acme"}
    entries = {
        "acme": entry("aaa1"),
        "acme's second key": entry("aaa2"),
        "other": entry("bbb1", "other"),
        "of a group": entry("ccc1", "third", **same),
        "of the same group": entry("ccc2", "fourth", **same),
        "of a group called as a tenant is": entry("ddd1", "fifth", **shared),
    }
    keys = ring(*entries.values())
    owners = {name: keys.rights(one).owner for name, one in entries.items()}
    assert owners["acme"] == owners["acme's second key"] and owners["of a group"] == owners["of the same group"]
    assert len(set(owners.values())) == 4 and "" not in owners.values()
    assert owners["acme"] != ring(entry("aaa1"), pepper=PEPPER * 2).rights(entry("aaa1")).owner, "it takes the pepper"


@given(st.sampled_from(["", "a" * 32, "b" * 32]), st.text(), st.sampled_from(["", "a" * 32, "b" * 32]), st.text())
def test_owners_and_salts_give_equal_roots_only_where_both_are_equal(a: str, x: str, b: str, y: str) -> None:
    if not (a and b) or "\0" in x + y:
        return  # a salt without an owner is a client's own affair: it cannot guess an owner
    assert (root_key("m", owned(a, x)) == root_key("m", owned(b, y))) is ((a, x) == (b, y))
    assert (namespace_of(owned(a, x)) == namespace_of(owned(b, y))) is (a == b), "a quota is an owner's"


def test_without_an_owner_roots_are_those_of_before() -> None:
    assert owned("", "salt") == "salt" and owned("", "") == ""
    assert root_key("m", owned("", "salt")).hex().startswith("e3333e7429555757")


LINE = json.loads(write_keys({"abcd": entry()}))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"colour": 1}, "unknown: 'colour'"),
        ({"id": "AB-CD"}, "id: must be"),
        ({"id": None}, "id: must be a text"),
        ({"tenant": ""}, "tenant: must be"),
        ({"tenant": "a\0b"}, "tenant: must be"),
        ({"hash": "hmac-sha256:00"}, "hash: must be"),
        ({"hash": "sha256:" + "0" * 64}, "hash: must be"),
        ({"requests_per_minute": 0}, "requests_per_minute: must be a whole number from 1"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute: must be"),
        ({"concurrent_requests": True}, "concurrent_requests: must be"),
        ({"classes": "batch"}, "classes: must be a list"),
        ({"classes": ["a b"]}, "classes: must be a list"),
        ({"priority": "high"}, "priority: must be"),
        ({"expires": -1}, "expires: must be"),
        ({"share_prefixes": "a b"}, "share_prefixes: must be"),
        ({"operator": "yes"}, "operator: must be true or false"),
    ],
)
def test_a_wrong_line_is_named_and_its_hash_is_not_shown(wrong: dict[str, Any], told: str) -> None:
    lines = json.dumps(LINE).encode() + b"\n\n" + json.dumps({**LINE, "id": "efgh", **wrong}).encode()
    with pytest.raises(ConfigError) as caught:
        parse_keys(lines, "keys.jsonl")
    assert caught.value.message.startswith(f"keys.jsonl: line 3: {told}")
    assert LINE["hash"] not in caught.value.message


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b'"text"', b"{}" + b" " * 5000, b"[" * 3000])
def test_what_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        parse_keys(line, "keys")


def test_keys_are_bounded_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_keys({"abcd": entry()})
    with pytest.raises(ConfigError, match="line 2: the id abcd is there twice"):
        parse_keys(data * 2, "keys")
    monkeypatch.setattr(keyring, "MOST_KEYS", 3)
    many = {f"id{number}x": entry(f"id{number}x") for number in range(4)}
    with pytest.raises(ConfigError, match="more than 3 keys"):
        parse_keys(write_keys(many), "keys")


def test_a_pepper_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        Keyring(b"short", {})


def test_nothing_shows_a_digest() -> None:
    assert entry().digest.hex() not in repr(entry()) and str(entry().digest) not in repr(entry())
