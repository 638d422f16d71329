"""One of a leader's other ranks as a child process: started, spoken to within deadlines, and ended.

It knows neither what the words mean nor which ranks make a group.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from serving.channel import Channel, ChannelClosed, ChannelLate
from serving.child_process import helper_environ, module_command
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import is_ending
from serving.fork_server import ForkedProcess, ForkServer, ForkUnavailable
from serving.logs import handed_down

log = logging.getLogger(__name__)

RANK_MODULE = "serving.rank_group.rank_process"
ALSO_NEEDED = ("CXX", "XDG_CACHE_HOME", "OMP_WAIT_POLICY")  # by which kernels are found, and threads wait
ENDED = "its process has ended"
LOOK_SECONDS = 0.005  # between looks, while an answer is awaited, whether the process is ending

Word = TypeVar("Word")


class RankLine:
    """A connection to a rank whose process has the number `pid` in the system; one thread uses it at a time."""

    def __init__(self, rank: int, pid: int, channel: Channel) -> None:
        self.rank, self.pid, self.channel = rank, pid, channel
        self.called = f"rank {rank}"  # as a log calls it
        self.owed = 0  # answers that are still to come

    def say(self, word: object, seconds: float) -> None:
        """Raises RankLost."""
        with self._heard(seconds):
            self.channel.send(word, seconds)

    def ask(self, word: object, seconds: float) -> None:
        """Say a word that wants an answer. Raises RankLost."""
        self.say(word, seconds)
        self.owed += 1

    def hear(self, seconds: float) -> object:
        """Its next answer. Raises RankLost."""
        with self._heard(seconds):
            word = self._received(time.monotonic() + seconds)
        self.owed -= 1
        return word

    def _received(self, until: float) -> object:
        """Its next word by this time. Raises ChannelClosed, ChannelLate."""
        ending = False
        while True:
            try:
                return self.channel.receive(LOOK_SECONDS if ending else min(LOOK_SECONDS, until - time.monotonic()))
            except ChannelLate as error:
                if ending:  # what it has said before it ended is there already
                    raise ChannelClosed from error
                ending = self.ending
                if not ending and time.monotonic() >= until:
                    raise

    @property
    def ending(self) -> bool:
        """Whether it says nothing any more: its socket closes only when its memory has been freed."""
        return is_ending(self.pid)

    def answer(self, kind: type[Word], seconds: float) -> Word:
        """Its next answer, of this kind. Raises RankLost."""
        word = self.hear(seconds)
        assert isinstance(word, kind), f"rank {self.rank} says {word!r}"
        return word

    @contextmanager
    def _heard(self, seconds: float) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as error:
            raise RankLost(self.rank, ENDED) from error
        except ChannelLate as error:
            raise RankLost(self.rank, f"it has not answered within {seconds:g} s") from error


class RankProcess(RankLine):
    """One of the other ranks, as a child process with nothing of our environment that it does not need.

    `rank` is its number for the group's life, which another process has after this one. `lanes` are connections for
    what it does beside its steps.
    """

    def __init__(
        self,
        rank: int,
        environ: Mapping[str, str] | None = None,
        lanes: int = 0,
        inherited: Sequence[int] = (),
        part: str | None = None,
    ) -> None:
        """`environ` is told beside what every helper needs; descriptors that are `inherited` keep their numbers.

        It logs as this `part` of the process here, by default as its rank.
        """
        with ExitStack() as undone, ExitStack() as theirs:
            ours, sockets = [], []
            for _ in range(1 + lanes):
                channel, other = Channel.pair()
                undone.callback(channel.close)
                ours.append(channel)
                sockets.append(theirs.enter_context(other))
            self.process = _started(part or f"rank-{rank}", environ, sockets, inherited)
            channel, *beside = ours
            super().__init__(rank, self.process.pid, channel)
            self.lanes = [RankLine(rank, self.process.pid, one) for one in beside]
            undone.pop_all()

    def kill(self, seconds: float) -> None:
        """End it, also where it stands still, and see that it writes no more. Raises RankLost where it does not end."""
        self.process.kill()
        self.channel.close()
        self._close_lanes()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise RankLost(self.rank, f"its process has not ended within {seconds:g} s of SIGKILL") from error

    def end(self, until: float) -> None:
        """It leaves as its channel has closed, or is killed at this time of the monotonic clock."""
        self._close_lanes()
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()  # also one that is stopped
            self.process.wait()

    def _close_lanes(self) -> None:
        for lane in self.lanes:
            lane.channel.close()


class _Forks:
    """The fork server of this process's ranks, and another one where they are to have another environment."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._choosing = threading.Lock()

    def server(self, environ: Mapping[str, str]) -> ForkServer:
        with self._choosing:
            if self._server is None or self._server.environ != environ:
                if self._server is not None:
                    self._server.close()
                else:
                    atexit.register(self.close)
                self._server = ForkServer((RANK_MODULE,), environ)
            return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


_forks = _Forks()


def _started(
    part: str, environ: Mapping[str, str] | None, theirs: Sequence[socket.socket], inherited: Sequence[int]
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Forked, but for one with an `environ`: that of a device's rank, whose libraries read it when they are loaded."""
    known = {name: value for name in ALSO_NEEDED if (value := os.environ.get(name)) is not None}
    common = helper_environ(os.environ) | known
    files = [one.fileno() for one in theirs]
    arguments = [str(number) for number in (files[0], os.getpid(), *files[1:])]
    if environ is None:
        try:
            own = common | handed_down(part)
            return _forks.server(common).start(RANK_MODULE, arguments, own, (*files, *inherited))
        except ForkUnavailable as error:
            log.debug("%s starts with an interpreter of its own: %s", part, error)
    return subprocess.Popen(  # noqa: S603 - our own module
        [*module_command(RANK_MODULE), *arguments],
        pass_fds=(*files, *inherited),
        env=common | dict(environ or {}) | handed_down(part),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the leader, which ends its ranks
    )
