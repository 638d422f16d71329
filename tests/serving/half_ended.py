"""A process that is ending and has not ended: its main thread has exited, another lives on.

So stands one that is killed while the kernel frees its memory, but for as long as a test needs it.
`python -m tests.serving.half_ended DESCRIPTOR LEADER` is one that says a word as a rank does, and ends so.
"""

from __future__ import annotations

import ctypes
import platform
import socket
import sys
import threading

from serving.channel import Channel

EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # the system call that ends one thread
LAST_WORD = "the last word"
SECONDS = 600.0


def end_main_thread() -> None:
    """For the main thread to call: another one keeps the process until it is killed."""
    threading.Thread(target=threading.Event().wait, args=(SECONDS,)).start()
    ctypes.CDLL(None).syscall(EXIT, 0)


def main() -> int:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))  # which stays open
    channel.send(LAST_WORD, SECONDS)
    end_main_thread()
    return 0


if __name__ == "__main__":
    main()
