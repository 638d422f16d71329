"""Names that are looked up: the event loop goes on meanwhile, and the process ends without the answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from deploy.runtime.lookups import in_a_daemon

HANGING = """
import asyncio, socket, sys, threading
from deploy.runtime.discovery import look_up
asked = threading.Event()
def hang(*_, **__):
    asked.set()
    threading.Event().wait()
socket.getaddrinfo = hang
async def main():
    looking = asyncio.create_task(look_up("routers", 8100))
    while not asked.is_set():
        await asyncio.sleep(0.01)
    looking.cancel()
    await asyncio.wait([looking])
if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


def refuse(error: Exception) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


async def test_the_loop_goes_on_while_a_name_is_looked_up() -> None:
    go = threading.Event()
    looking = asyncio.create_task(in_a_daemon(lambda: go.wait(30)))
    await asyncio.sleep(0)
    assert not looking.done()
    go.set()
    assert await looking is True


async def test_what_the_resolver_raises_is_raised() -> None:
    for error in (OSError("no such name"), UnicodeError("no name at all")):
        with pytest.raises(type(error), match=str(error)):
            await in_a_daemon(refuse(error))


async def test_a_mistake_in_a_look_up_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: told.append(found.exc_type))
    with pytest.raises(RuntimeError, match="the look-up broke"):
        await in_a_daemon(refuse(KeyError("a bug")))
    for thread in threading.enumerate():
        if thread.name == "look-up":
            thread.join(30)
    assert told == [KeyError]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_resolver_that_hangs_does_not_delay_the_end(loop: str) -> None:
    done = subprocess.run([sys.executable, "-c", HANGING, loop], timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
