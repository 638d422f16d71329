"""One host is one client, however many addresses it has."""

from __future__ import annotations

import pytest

from serving.addresses import network_of
from serving.api.body_work import client_of


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_one_host_is_one_network(host: str, network: str) -> None:
    assert network_of(host) == network


def test_without_keys_clients_take_turns_by_network() -> None:
    """Before: each address of one IPv6 host had its own turn."""
    scopes = [{"client": (f"2001:db8:1:2::{number}", 5)} for number in range(3)]
    assert {client_of(scope) for scope in scopes} == {"2001:db8:1:2::/64"}
    assert client_of({"client": ("2001:db8::1", 5), "state": {"key": "k"}}) == "k"
