"""Which TCP ports a process and all below it listen on, as the kernel says."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

LISTEN = "0A"  # the state, in /proc/net/tcp


def listening(process: int) -> dict[tuple[str, int], list[str]]:
    """(address, port) → the command of each process that listens there, of this one and all it has started."""
    found: dict[tuple[str, int], list[str]] = {}
    for pid in (process, *descendants(process)):
        sockets = open_sockets(pid)
        for inode, place in listeners(pid):
            if inode in sockets:
                found.setdefault(place, []).append(command(pid))
    return found


def descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = list[int](), [process]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def open_sockets(process: int) -> set[str]:
    """Their inodes."""
    names = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            names.add(str(entry.readlink()))
        except OSError:  # closed meanwhile
            continue
    return {name[len("socket:[") : -1] for name in names if name.startswith("socket:[")}


def listeners(process: int) -> Iterator[tuple[str, tuple[str, int]]]:
    """Inode and place of every socket that listens in the process's network."""
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{process}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN:
                yield inode, place_of(local)


def place_of(local: str) -> tuple[str, int]:
    """`0100007F:1F90` → ("127.0.0.1", 8080). The kernel writes addresses as 32-bit words of the host's order.

    Sockets of both families have IPv4 addresses in an IPv6 form.
    """
    address, _, port = local.partition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), int(port, 16)


def command(process: int) -> str:
    """The millrace command that it runs."""
    words = Path(f"/proc/{process}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    return words[words.index("deploy.cli") + 1] if "deploy.cli" in words else " ".join(words)
