"""Lets grammars pass that compile within their budget. Child processes try them; threads of ours wait for those.

Clients take turns, so that what one of them sends holds up its own requests and no others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from queue import LifoQueue
from typing import TypeVar

from serving.api.constraints import clear
from serving.api.fair_slots import FairSlots
from serving.api.plan import OutputForm
from serving.errors import InvalidRequest
from serving.grammar.grammars import GrammarError
from serving.grammar.vetting import SECONDS, GrammarVetter
from serving.grammar.vocabulary import Vocabulary
from serving.text.tokenizer import Tokenizer

VETTERS = 2  # processes that try grammars, the second begun when two clients need one
KNOWN = 1024  # verdicts that are kept
KNOWN_COSTLY = 16  # of those that pass and take longer: fewer than a worker keeps compiled
COSTLY = 0.05  # seconds

T = TypeVar("T")


class Lane:
    """Threads for one kind of work. `per_client` of them may be one client's."""

    def __init__(self, name: str, threads: int, *, per_client: int, most_waiting: int):
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._slots = FairSlots(threads, per_client=per_client, most_waiting=most_waiting)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """What `work()` gives or raises. Raises Overloaded where too many of the client's wait."""
        await self._slots.take(client)
        loop = asyncio.get_running_loop()
        running: Future[T] = self._threads.submit(work)
        done = asyncio.wrap_future(running, loop=loop)
        done.add_done_callback(partial(self._end, client))
        return await asyncio.shield(done)  # a thread goes on when whoever asked has left

    def _end(self, client: str, done: asyncio.Future[T]) -> None:
        self._slots.give_back(client)
        if not done.cancelled():
            done.exception()  # nobody may be left to be told


class GrammarGate:
    """Lets grammars pass that compile within their budget.

    One client has one grammar tried at a time, so each waits for the others' one budget at most. What was found of the
    latest is kept; of those that took long no more than workers keep compiled, so that each trial stands for a compile.
    """

    def __init__(self, tokenizer: Tokenizer, seconds: float = SECONDS):
        self._lane = Lane("grammars", VETTERS, per_client=VETTERS - 1, most_waiting=64)
        self._idle: LifoQueue[GrammarVetter] = LifoQueue()  # the second is begun when the first is in use
        self._vetters = [GrammarVetter(partial(Vocabulary.of, tokenizer), seconds) for _ in range(VETTERS)]
        for vetter in self._vetters:
            self._idle.put(vetter)
        self._known, self._costly = _Verdicts(KNOWN), _Verdicts(KNOWN_COSTLY)

    def close(self) -> None:
        """End the child processes. Whoever waits for a verdict, or comes for one from now on, gets Unavailable."""
        for vetter in self._vetters:
            vetter.stop()

    async def check(self, client: str, form: OutputForm, owner: str = "") -> None:
        """Owners share no verdicts: by time, one could tell what forms another asks for.

        Raises InvalidRequest that names the field, Overloaded, and Unavailable.
        """
        if not form.grammar:
            return
        name = blake2b(form.grammar.encode(), digest_size=16, key=owner.encode()).digest()
        mistake = self._found(name)
        if mistake is None:
            mistake = await self._lane.run(client, partial(self._try, name, form.grammar))
        if mistake:
            raise InvalidRequest(f"{form.param}: {mistake}", param=form.param, code="grammar")

    def _found(self, name: bytes) -> str | None:
        known = self._known.get(name)
        return self._costly.get(name) if known is None else known

    def _try(self, name: bytes, grammar: str) -> str:
        """What is wrong with it. Kept at once: the next to be tried may be the same."""
        if (known := self._found(name)) is not None:  # it was tried while this one waited
            return known
        vetter, began, mistake = self._idle.get(), time.monotonic(), ""
        try:
            vetter.vet(grammar)
        except GrammarError as error:
            mistake = clear(str(error))
        finally:
            self._idle.put(vetter)
        costly = not mistake and time.monotonic() - began > COSTLY
        (self._costly if costly else self._known).keep(name, mistake)
        return mistake


class _Verdicts:
    """What is wrong with the latest grammars, by their digests. From any thread."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, str] = OrderedDict()

    def get(self, name: bytes) -> str | None:
        return self._found.get(name)

    def keep(self, name: bytes, mistake: str) -> None:
        with self._lock:
            self._found[name] = mistake
            self._found.move_to_end(name)
            if len(self._found) > self._most:
                self._found.popitem(last=False)
