"""kill -9 in the middle of writing, again and again over one folder: what is served afterwards is never wrong.

A child process stores blocks and never ends by itself. It tells of every block that it has handed over, and is killed
after a random number of those, wherever its writing is then. Children are forked by a process that has imported what
they need.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcache.pool.store import BlockStore
from kvcache.pool.storeconfig import StoreConfig
from serving.errors import Overloaded
from serving.messages import Tier
from tests.house.source import ROOT
from tests.kvcache.pool.storage import block_of, whole_ones

KILLS = 50
BLOCKS = [block_of(number, parts=4, size=80_000 + 5_000 * (number % 5)) for number in range(40)]
CAPACITY = 8 * 400_000  # bytes: not nearly enough for all, so that files are removed as well as written


def config(folder: Path) -> StoreConfig:
    return StoreConfig(disk_path=folder, disk_bytes=CAPACITY, backlog=4)


def tell(line: str) -> None:
    """All of a line or, when killed, nothing."""
    os.write(1, f"{line}\n".encode())


def store_for_ever(folder: Path, seed: int) -> None:
    """The child."""
    store = BlockStore(config(folder))
    choose = random.Random(seed)
    while True:
        number = choose.randrange(len(BLOCKS))
        try:
            store.put([BLOCKS[number]])
        except Overloaded:
            continue
        tell(str(number))


def fork_children(folder: Path) -> None:
    """The process between: one child for each seed that it reads; it tells its id, and when it is gone."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            store_for_ever(folder, int(line))
        os.waitpid(child, 0)
        tell("gone")


def kill_one(parent: subprocess.Popen[str], seed: int) -> None:
    """Have a child started, and killed after some blocks. Its id is told by the lock it holds, as any node's is."""
    assert parent.stdin is not None and parent.stdout is not None
    print(seed, file=parent.stdin, flush=True)
    for _ in range(random.Random(-seed).randint(1, 30)):
        assert parent.stdout.readline().strip().isdigit()
    os.kill(int((Path(parent.args[-1]) / "lock").read_text()), signal.SIGKILL)
    while parent.stdout.readline() != "gone\n":
        pass


@contextmanager
def ended(parent: subprocess.Popen[str]) -> Iterator[None]:
    """However this ends, neither the process between nor a child of it is left."""
    try:
        yield
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_fifty_kills_over_one_folder_and_not_one_bad_block(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    command = [sys.executable, "-m", "tests.kvcache.pool.test_disk_crash", str(folder)]
    parent = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    survived = cut_off = 0
    with parent, ended(parent):
        for seed in range(1, KILLS + 1):
            kill_one(parent, seed)
            cut_off += len(list((folder / "aside").iterdir()))
            store = BlockStore(config(folder))
            assert list((folder / "aside").iterdir()) == []
            survived += sum(whole_ones(store, BLOCKS))
            found = len(store.keys())
            assert store.verify() == (found, 0)
            assert store.tier_stats()[Tier.DISK].corrupt == 0
            assert sum(path.stat().st_size for path in (folder / "blocks").rglob("*") if path.is_file()) <= CAPACITY
            store.close()
    print(f"{survived / KILLS:.0f} blocks survived a kill, {cut_off} writes were cut off")
    assert survived > KILLS


if __name__ == "__main__":
    fork_children(Path(sys.argv[1]))
