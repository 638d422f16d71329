"""`millrace top`: workers, queues and objectives met, drawn anew every second until q is pressed.

It asks a server (GET /v1/workers); rates come from two answers. With --once, or into a pipe, it draws one frame.
"""

from __future__ import annotations

import argparse
import select
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deploy.admin import Server, add_server_arguments
from deploy.explain import plain_console, plain_table
from serving.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Answer = Mapping[str, Any]
STATES = {"live": "green", "draining": "yellow", "slow": "yellow", "suspect": "red"}
BAR = 6  # characters
LONGEST_INTERVAL = 3600.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace top`."""
    add_server_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one frame and leave")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between frames (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Draw until q; the process's exit code. Raises MillraceError, ValueError."""
    if not 0 < arguments.interval <= LONGEST_INTERVAL:
        raise ValueError(f"--interval {arguments.interval:g}: give seconds above 0, at most {LONGEST_INTERVAL:g}")
    server = Server.of(arguments)
    console = plain_console()
    if arguments.once or not sys.stdout.isatty():
        console.print(frame(server.get("v1", "workers"), None, server.address))
        return 0
    _live(server, arguments.interval, console)
    return 0


def _live(server: Server, interval: float, console: Any) -> None:
    """A server that does not answer for a while is said to, and asked again."""
    from rich.live import Live
    from rich.text import Text

    before: Answer | None = None
    last = server.get("v1", "workers")
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(last, before, server.address), refresh=True)
            if _pressed(interval) == "q":
                return
            try:
                before, last = last, server.get("v1", "workers")
            except Unavailable as error:
                live.update(Text(error.message, style="red"), refresh=True)
                if _pressed(interval) == "q":
                    return


@contextmanager
def _single_keys() -> Iterator[None]:
    """Keys arrive without Enter; the terminal is as it was afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(seconds: float) -> str:
    """The key that is pressed within so many seconds; empty for none. Without a terminal it waits as long."""
    keyboard = [sys.stdin] if sys.stdin.isatty() else []
    ready, _, _ = select.select(keyboard, [], [], seconds)
    return sys.stdin.read(1) if ready else ""


# ---- what is drawn ---------------------------------------------------------------------------------------------


def frame(now: Answer, before: Answer | None, address: str) -> Group:
    """One frame. Rates are of the time between the two answers; without an earlier one there are none."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(headline(now, before, address), style="bold"), worker_table(now, before)]
    if len(now.get("generations", ())) > 1:  # a roll, or a role that waits for its other half
        parts.append(generation_table(now))
    return Group(*parts, class_table(now, before))


def headline(now: Answer, before: Answer | None, address: str) -> str:
    rates = f"{rate(now, before, ended)} requests/s, {rate(now, before, tokens)} tokens/s"
    held = f"{now['requests_running']} in progress, {now['requests_waiting']} waiting for room"
    return f"millrace {address}  {now['policy']}: {rates}; {held}"


def ended(answer: Answer) -> float:
    return float(sum(of_class["offered"] for of_class in answer["classes"].values()))


def tokens(answer: Answer) -> float:
    return float(answer["tokens"])


def rate(now: Answer, before: Answer | None, read: Any) -> str:
    """Of a total, a second; `-` where it cannot be told, as after a router's restart."""
    if before is None or now["at"] <= before["at"] or read(now) < read(before):
        return "-"
    return f"{(read(now) - read(before)) / (now['at'] - before['at']):.1f}"


def worker_table(now: Answer, before: Answer | None) -> Table:
    from rich.text import Text

    table = plain_table(("worker", "role", "state", "KV"), ("leases", "queue", "step"))
    earlier = {worker["name"]: worker for worker in before["workers"]} if before is not None else {}
    for worker in sorted(now["workers"], key=lambda each: (each["role"], each["name"])):
        breaker = worker.get("breaker", "closed")
        state = worker["state"] if breaker == "closed" else breaker
        state = "slow" if state == "live" and worker.get("slow") else state
        table.add_row(
            worker["name"],
            worker["role"] if worker.get("ranks", 1) == 1 else f"{worker['role']} ×{worker['ranks']}",
            Text(state, style=STATES.get(state, "red")),
            f"{bar(worker['kv_usage'])} {100 * worker['kv_usage']:3.0f}%",
            f"{worker['leases']}/{worker['max_seqs']}",
            queue(worker),
            step(worker, earlier.get(worker["name"])),
        )
    return table


def generation_table(now: Answer) -> Table:
    table = plain_table(("generation", "workers"), ("prefill", "decode", "of new requests"))
    for each in now["generations"]:
        names = sorted(worker["name"] for worker in now["workers"] if worker["generation"] == each["generation"])
        share = f"{100 * each['share']:.0f} %" if each["share"] else "none: a role is missing"
        table.add_row(each["generation"], ", ".join(names), str(each["prefill"]), str(each["decode"]), share)
    return table


def queue(worker: Answer) -> str:
    """Seconds of prompts, or tokens where the worker cannot tell how long they take."""
    if worker["queue_seconds"]:
        return f"{worker['queue_seconds']:.2f} s"
    return f"{worker['queued_tokens']:,} tokens" if worker["queued_tokens"] else "-"


def step(worker: Answer, earlier: Answer | None) -> str:
    """Mean milliseconds of the steps between two frames, else what one of what runs is predicted to take."""
    if earlier is not None and worker["steps"] > earlier["steps"]:
        spent = worker["steps_seconds"] - earlier["steps_seconds"]
        return f"{1e3 * spent / (worker['steps'] - earlier['steps']):.1f} ms"
    return "-" if worker["step_seconds"] is None else f"~{1e3 * worker['step_seconds']:.1f} ms"


def class_table(now: Answer, before: Answer | None) -> Table:
    table = plain_table(("class",), ("waiting", "ended/s", "within SLO", "ever", "refused", "failed", "left"))
    for name, of_class in now["classes"].items():
        earlier = (before or {}).get("classes", {}).get(name)
        table.add_row(
            name,
            str(of_class["waiting"]),
            rate(now, before if earlier else None, lambda answer, name=name: answer["classes"][name]["offered"]),
            attained(of_class, earlier),
            attained(of_class, None),
            *(str(of_class[outcome]) for outcome in ("refused", "failed", "aborted")),
        )
    return table


def attained(now: Answer, before: Answer | None) -> str:
    """Share of the requests that ended between two frames, or ever, that were within their objectives."""
    offered = now["offered"] - (before["offered"] if before is not None else 0)
    within = now["within_slo"] - (before["within_slo"] if before is not None else 0)
    return f"{100 * within / offered:.1f} %" if offered > 0 else "-"


def bar(share: float) -> str:
    """0.5 → `███░░░`."""
    filled = min(BAR, max(0, round(share * BAR)))
    return "█" * filled + "░" * (BAR - filled)
