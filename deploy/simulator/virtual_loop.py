"""An asyncio event loop whose time jumps to the next timer when nothing is ready to run, so that it never waits.

It knows tasks and timers, and nothing of what they do. Work for threads runs at once, in the loop's own thread.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import AbstractEventLoop, BaseEventLoop, Future, Handle, TimerHandle
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

FEW_TIMERS = 100  # cancelled ones that may lie about


class NothingWillHappen(RuntimeError):
    """All tasks wait, and no timer is set that could wake one: in real time the program would hang."""


def _nothing() -> None:
    """In the place of what was cancelled: nothing refers to that any more."""


class VirtualCall(Handle):
    """What is to be run. Nothing is kept of where it was asked for, as asyncio does for its debug mode."""

    __slots__ = ()

    def __init__(self, loop: VirtualLoop, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None):
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context = context  # None: the one that the loop runs in
        self._cancelled = False
        self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def _run(self) -> None:
        """As asyncio does: what it raises is told to the loop's exception handler."""
        self._context = self._context or copy_context()
        super()._run()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._callback}>"


class VirtualTimer(VirtualCall):
    """What is to be run at its time. `waits` is False once that has come, or it was cancelled."""

    __slots__ = ("waits",)

    def __init__(self, loop: VirtualLoop, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None):
        super().__init__(loop, callback, args, context)
        self.waits = True

    def cancel(self) -> None:
        super().cancel()
        if self.waits:  # those that have run are cancelled too, by each sleep
            self.waits = False
            self._loop.timer_cancelled()


class VirtualLoop(BaseEventLoop):
    """`time()` is in seconds of virtual time, from 0. What is due at the same time runs in the order it was asked for.

    It has no sockets. An exception that nobody takes, of a callback or of a forgotten task, ends `run_virtually`.
    """

    _running = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.broken: BaseException | None = None
        self._due: deque[VirtualCall] = deque()
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._order = count()
        self._cancelled = 0  # timers, since those were last thrown away
        self._halted = False
        self.ending = False  # what callbacks raise from now on is of no interest
        self.set_exception_handler(self._break)

    def time(self) -> float:
        return self.now

    def is_running(self) -> bool:
        return self._running

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        call = VirtualCall(self, callback, args, context)
        self._due.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        timer = VirtualTimer(self, callback, args, context)
        heappush(self._timers, (when, next(self._order), timer))
        return timer  # type: ignore[return-value]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        timer = VirtualTimer(self, callback, args, context)  # call_at, spelt out
        heappush(self._timers, (self.now + delay, next(self._order), timer))
        return timer  # type: ignore[return-value]

    def stop(self) -> None:
        self._halted = True

    def run_forever(self) -> None:
        """Until `stop`. Raises NothingWillHappen."""
        self._running = True
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        try:
            while not self._halted:
                self._turn()
        finally:
            self._halted = self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _turn(self) -> None:
        """Run what is ready; if nothing is, time goes on to the next timer."""
        due, ending = self._due, self.ending
        while due:
            call = due.popleft()
            if call._cancelled:
                continue
            context = call._context
            if ending:
                call._run()
            elif context is not None:
                context.run(call._callback, *call._args)
            else:
                call._callback(*call._args)
            if self._halted:
                return
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not timers:
            raise NothingWillHappen("every task waits, and no timer is set")
        now = self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= now:
            timer = heappop(timers)[2]
            timer.waits = False
            due.append(timer)

    def timer_cancelled(self) -> None:
        """It is passed over when its time comes, or thrown away with many others: most timers are patience's."""
        self._cancelled += 1
        if self._cancelled > max(FEW_TIMERS, len(self._timers) // 2):
            self._timers = [each for each in self._timers if each[2].waits]
            heapify(self._timers)
            self._cancelled = 0

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Future[T]:  # type: ignore[override]
        """Run it here, with the next turn: what threads do beside the event loop takes no virtual time."""

        async def run() -> T:
            return func(*args)

        return self.create_task(run())

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """It was left in the middle, and nothing refers to it any more."""
        if not self.is_closed():
            self.create_task(generator.aclose())

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
    loop.ending = True
    loop.set_exception_handler(lambda loop, context: None)
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
