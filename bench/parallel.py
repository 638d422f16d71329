"""Times one prompt and decode steps of a model that ranks on this host share, beside one process.

Run `python -m bench.parallel`. All layouts are loaded at once and take turns, round by round, so that they meet the
same other load. Everything is float32 in torch's form of the forward pass, exchanged over gloo.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from torch._C._distributed_c10d import TCPStore

from bench.parallel_rank import ParallelCase, ParallelTimes, run_parallel_rank
from serving.checkpoint.hub import resolve
from serving.parallel.layout import ParallelLayout

LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(tensor=2),
    "sp2": ParallelLayout(sequence=2),
    "pp2": ParallelLayout(pipeline=2),
    "tp4": ParallelLayout(tensor=4),
}


class Started:
    """The processes of one layout, loaded and waiting."""

    def __init__(self, case: ParallelCase) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait would spin on the others' cores
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.parallel_rank"])
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(case.layout.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_parallel_rank, args=(rank, self.store.port, case, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.bytes_read: list[int] = [pipe.recv() for pipe in self.pipes]

    def round(self) -> ParallelTimes:
        """The times of the slowest rank."""
        for pipe in self.pipes:
            pipe.send(True)
        times: list[ParallelTimes] = [pipe.recv() for pipe in self.pipes]
        assert len({one.tokens for one in times}) == 1, "ranks disagree"
        return max(times, key=lambda one: one.prefill.seconds)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)
        for process in self.processes:
            process.join()


HEADER = (
    "layout", "threads a rank", "read a rank", "prompt ms", "least", "CPU ms a rank", "waits", "sent", "decode step ms",
    "least", "CPU ms a rank", "waits", "sent",
)  # fmt: skip


def row_of(name: str, case: ParallelCase, started: Started, rounds: list[ParallelTimes]) -> list[str]:
    cells = [name, f"{case.threads}", f"{max(started.bytes_read) / 1e6:.0f} MB"]
    for times in ([one.prefill for one in rounds], [one.decode for one in rounds]):
        cells += [
            f"{1e3 * statistics.median(one.seconds for one in times):,.0f}",
            f"{1e3 * min(one.seconds for one in times):,.0f}",
            f"{1e3 * statistics.median(one.cpu for one in times):,.0f}",
            f"{1e3 * statistics.median(one.waits for one in times):,.0f}",
            f"{times[0].sent / 1e6:,.1f} MB",
        ]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or GGUF file; the demo model without it")
    parser.add_argument(
        "--layouts", nargs="+", default=["one:1", "one:2", "tp2:1", "sp2:1", "pp2:1"], help="name:threads of each rank"
    )
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence before decode")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    started: dict[str, tuple[ParallelCase, Started]] = {}
    for asked in args.layouts:
        name, threads = asked.split(":")
        case = ParallelCase(
            layout=LAYOUTS[name],
            threads=int(threads),
            path=resolve(args.model),
            prompt=args.prompt,
            batch=args.batch,
            context=args.context,
            steps=args.steps,
        )
        started[asked] = case, Started(case)
    found: dict[str, list[ParallelTimes]] = {asked: [] for asked in started}
    before = os.getloadavg()[0]
    for number in range(args.rounds):  # what was computed before decode has warmed up all of them
        for asked, (_, one) in started.items():
            found[asked].append(one.round())
            times = found[asked][-1]
            step = f"{times.prefill.seconds * 1e3:,.0f} ms, {times.decode.seconds * 1e3:.1f} ms a step"
            print(f"round {number + 1}, {asked}: {step}", file=sys.stderr, flush=True)
    agreed = {times.tokens for rounds in found.values() for times in rounds}
    for _, one in started.values():
        one.end()
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(f"same tokens everywhere: {len(agreed) == 1}\n")
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for asked, (case, one) in started.items():
        print("| " + " | ".join(row_of(asked.split(":")[0], case, one, found[asked])) + " |")


if __name__ == "__main__":
    main()
