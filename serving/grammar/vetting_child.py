"""The process in which the door tries grammars: `python -m serving.grammar.vetting_child FD`, a socket of its parent.

It may be ended at any moment and takes nothing with it: the kernel does so when a grammar has had its CPU time, a
failed allocation when it has had its memory, and the end of the socket when the parent is gone. No torch.
"""

from __future__ import annotations

import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from serving.grammar.grammars import Compile, GrammarError, deep_thread
from serving.grammar.vocabulary import Vocabulary

MEMORY = 1 << 30  # bytes beyond what the process has once it has read the vocabulary


def main() -> None:
    """Answer each grammar, UTF-8, with what is wrong with it, or nothing."""
    connection = Connection(int(sys.argv[1]))
    try:
        vocabulary, seconds = connection.recv()
        serve(connection, vocabulary, seconds)
    except EOFError:
        return


def serve(connection: Connection, vocabulary: Vocabulary, seconds: float) -> None:
    """Until the connection ends, which raises EOFError. Each grammar has so many seconds of CPU time."""
    compile_grammar, thread = Compile(vocabulary), deep_thread()
    most = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(b"")
    while True:
        grammar = connection.recv_bytes().decode()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nothing handles its signal, which ends the process
        mistake = thread.submit(compile_grammar, grammar).exception()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if mistake is not None and not isinstance(mistake, GrammarError):
            raise mistake
        connection.send_bytes(str(mistake or "").encode())


def _address_space() -> int:
    """Bytes that the process has reserved."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
