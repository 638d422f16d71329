"""What of an address tells clients apart: connections are counted by it, and without keys clients take turns by it.

Pure; it looks nothing up.
"""

from __future__ import annotations

import ipaddress


def network_of(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 of an IPv6 one, which one host has whole."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
