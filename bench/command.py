"""`millrace bench`: the load generator's way in, from flags to an exit status.

It prints tables on stdout and everything else on stderr; what is measured and how is the session's business.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from bench import cpu
from bench.endpoint import ServerError
from bench.options import BenchOptions, Point, add_server_arguments, parse_options
from bench.plot import plot_html, plot_svg
from bench.progress import Progress
from bench.report import goodput_report, loads, point_report, results_json, sweep_report
from bench.session import BenchSession, Results

__all__ = ["add_arguments", "run"]

CPU = "measure this machine's memory and arithmetic, and what share of them each kind of step reaches"
DONE, WITH_ERRORS, UNUSABLE, INTERRUPTED = 0, 1, 2, 130  # exit statuses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `millrace bench`, and `millrace bench cpu`."""
    add_server_arguments(parser)
    machines = parser.add_subparsers(dest="machine", metavar="[cpu]", title="without a server")
    cpu.add_arguments(machines.add_parser("cpu", help=CPU, description=f"{CPU[0].upper()}{CPU[1:]}."))


def run(args: argparse.Namespace) -> int:
    """Measures as the parsed flags say. 0: all well; 1: requests failed; 2: nothing measured; 130: interrupted."""
    if args.machine is not None:
        return cpu.run(args)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        options = parse_options(args)
        results = _measure(options)
    except (ValueError, ServerError) as error:
        print(f"millrace bench: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("millrace bench: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    _conclude(results, options)
    try:
        _write_files(results, options, started_at)
    except OSError as error:
        print(f"millrace bench: {error}", file=sys.stderr)
        return UNUSABLE
    if results.interrupted:
        return INTERRUPTED
    return WITH_ERRORS if any(one.summary.failed for one in results.measurements) else DONE


def _measure(options: BenchOptions) -> Results:
    progress = Progress(sys.stderr)

    def show(point: Point) -> None:
        progress.clear()
        print(point_report(session.results, options, point), flush=True)
        print()

    session = BenchSession(options, progress=progress, on_point=show, on_ready=lambda: _interrupt_with(session))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(session.run())
    except ServerError:
        if not session.results.measurements:
            raise
        # A server died on the way: what was measured before is worth keeping.
        progress.clear()
        print(f"millrace bench: {sys.exception()}", file=sys.stderr)
        session.results.interrupted = True
        return session.results
    finally:
        progress.clear()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed: about half the CPU of asyncio's own for each chunk."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _interrupt_with(session: BenchSession) -> None:
    """From now on the first Ctrl-C ends the measurement and shows what there is; the second ends the program."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        session.interrupt()

    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not on Windows, nor off the main thread
        loop.add_signal_handler(signal.SIGINT, interrupt)


def _conclude(results: Results, options: BenchOptions) -> None:
    """Prints what no finished load has printed yet, then the overview."""
    if results.interrupted:
        print("interrupted: this is what was measured so far\n", file=sys.stderr)
    points = loads(results)
    if options.search is not None:
        print(sweep_report(results, options))
        print()
        print(goodput_report(results, options))
    else:
        if results.interrupted and results.measurements:
            print(point_report(results, options, results.measurements[-1].point))
        if len(points) > 1:
            print(sweep_report(results, options))
    for note in results.notes:
        print(f"! {note}")


def _write_files(results: Results, options: BenchOptions, started_at: str) -> None:
    if options.json_file is not None:
        _write(options.json_file, results_json(results, options, started_at=started_at))
    if options.plot_file is not None and results.measurements:
        draw = plot_svg if options.plot_file.suffix == ".svg" else plot_html
        _write(options.plot_file, draw(results, options).encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"wrote {path}", file=sys.stderr)
