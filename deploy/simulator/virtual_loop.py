"""An asyncio event loop whose time jumps to the next timer when nothing is ready to run, so that it never waits.

It knows tasks and timers, and nothing of what they do. Work for threads runs at once, in the loop's own thread.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, Future, SelectorEventLoop
from collections.abc import Callable, Coroutine, Mapping
from selectors import BaseSelector, SelectorKey
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappen(RuntimeError):
    """All tasks wait, and no timer is set that could wake one: in real time the program would hang."""


class _PassingTime(BaseSelector):
    """A selector that finds nothing ready, and instead of waiting says how long it was to wait."""

    def __init__(self, passed: Callable[[float], None]):
        self._passed = passed
        self._keys: dict[Any, SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None:
            raise NothingWillHappen("every task waits, and no timer is set")
        if timeout > 0:
            self._passed(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fileobj] = SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: Any) -> SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, SelectorKey]:
        return self._keys


class VirtualLoop(SelectorEventLoop):
    """`time()` is in seconds of virtual time, from 0. Sockets are never ready; deterministic as far as its tasks are.

    An exception that nobody takes, of a callback or of a forgotten task, stops `run_virtually`.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.broken: BaseException | None = None
        super().__init__(_PassingTime(self._pass))
        self.set_exception_handler(self._break)

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Future[T]:  # type: ignore[override]
        """Run it here, with the next turn: what threads do beside the event loop takes no virtual time."""

        async def run() -> T:
            return func(*args)

        return self.create_task(run())

    def _break(self, loop: AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.broken is None:
            self.broken = context.get("exception") or RuntimeError(context["message"])
        self.stop()


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end on a loop of its own; what is still running then is cancelled.

    Raises what it raises, what a callback raised, NothingWillHappen.
    """
    loop = VirtualLoop()
    try:
        running = loop.create_task(main(loop), name="simulation")
        try:
            return loop.run_until_complete(running)
        except RuntimeError:
            if loop.broken is not None:
                raise loop.broken from None
            raise
        finally:
            _cancel_all(loop)
    finally:
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    loop.set_exception_handler(lambda loop, context: None)
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
