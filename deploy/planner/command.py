"""`millrace plan`: which workers, with what parallelism, give a model the most goodput per device on these machines.

It reads what is asked, shows how far the search is, and writes what came of it. The search is deploy/planner/search.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.planner.answer import PlanAnswer, PlanQuestion

STORE, FILE, PAGE, PICTURE = "probes.jsonl", "placement.toml", "plan.html", "plan.png"
WIDTH = 140  # characters of a table that goes into a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace plan`."""
    add = parser.add_argument
    add(
        "question",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a TOML file of what is asked (docs/planner.md); flags go before it",
    )
    add(
        "--model",
        metavar="NAME",
        help="opt-13b, opt-66b, opt-13b-vllm, llama-3-8b, or one that the file describes (default: opt-13b)",
    )
    add(
        "--profile",
        metavar="PROFILE",
        help="a worker's profile in place of --model, as millrace profile writes it; devices are then like its own",
    )
    add("--hardware", metavar="NAME", help="a100-80g, h100-80g, or what the file describes (default: a100-80g)")
    add("--nodes", type=int, metavar="N", help="nodes there are (default: 1)")
    add("--devices-per-node", type=int, metavar="N", help="devices of each (default: 8)")
    add("--cost", type=float, metavar="COST", help="of a device-hour (default: the hardware's)")
    add("--workload", metavar="NAME", help="chat, long-mixed, shared-prefix or sharegpt (default: sharegpt)")
    add("--lengths", metavar="FILE", help="JSON of [[prompt tokens, output tokens], …] in place of the workload's")
    add(
        "--trace",
        metavar="FILE",
        help="CSV or JSONL of requests, as of millrace simulate: their lengths, burstiness and objectives",
    )
    add(
        "--rate",
        type=float,
        metavar="R",
        help="requests a second that there will be; placements for fewer are left out",
    )
    add("--burstiness", type=float, help="coefficient of variation of the gaps; 1: Poisson (default: 1)")
    add("--ttft-ms", type=float, help="objective for the first token (default: the workload's)")
    add("--tpot-ms", type=float, help="the same, for the mean of the tokens after it")
    add("--attainment", type=float, metavar="SHARE", help="share of requests that must meet them (default: 0.9)")
    add("--attain", choices=("both", "each"), help="by a request at once, or each objective by itself (default: both)")
    add_search_arguments(parser)


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """How far to look, and where to write."""
    add = parser.add_argument_group("The search").add_argument
    add("--tp", metavar="N,…", help="tensor parallel sizes to try (default: 1,2,4,8)")
    add("--pp", metavar="N,…", help="pipeline stages to try (default: 1)")
    add("--max-num-batched-tokens", metavar="N,…", help="step budgets to try (default: 512,1024,2048)")
    add(
        "--links",
        choices=("both", "fast", "slow"),
        help="between nodes: KV goes anywhere, or stays in a node (default: both)",
    )
    add(
        "--assume",
        choices=("serving", "distserve"),
        help="how workers behave: ours, or DistServe's simulator (default: serving)",
    )
    add("--requests", type=int, metavar="N", help="at least, at every rate (default: 600)")
    add("--seconds", type=float, metavar="S", help="of requests at least, at every rate (default: 60)")
    add("--seeds", type=int, metavar="N", help="traces at every rate (default: 1)")
    add("--estimates", type=int, metavar="N", help="placements measured as whole queues (default: 40)")
    add("--finalists", type=int, metavar="N", help="of each kind, measured in the simulator; 0: none (default: 1)")
    add("--processes", type=int, default=2, metavar="N", help="that measure (default: 2)")
    add(
        "--output",
        type=Path,
        default=Path("plan"),
        metavar="FOLDER",
        help=f"for {FILE}, {PAGE}, {PICTURE} (default: plan)",
    )
    add("--served-model", metavar="MODEL", help="the model as placement.toml names it (default: /models/ and its name)")
    add("--json", type=Path, metavar="OUT", help="write verdict and ranking there too")
    add("--resume", action="store_true", help=f"go on with what FOLDER/{STORE} has of a plan that was broken off")
    add("--no-report", action="store_true", help=f"write no {PAGE} and {PICTURE}, which need the extra `plan`")


def run(arguments: argparse.Namespace) -> int:
    """Search, print and write; the process's exit code. Raises ValueError for what cannot be."""
    from deploy.planner.asking import read_question

    if arguments.processes < 0:
        raise ValueError("--processes: give 0 or more")
    if arguments.served_model is not None and not (arguments.served_model and arguments.served_model.isprintable()):
        raise ValueError(f"--served-model {arguments.served_model!r}: give a path or a name, on one line")
    question = read_question(arguments)
    if not arguments.no_report:
        from deploy.planner.charts import check_library

        check_library()
    began = time.perf_counter()
    answer = _searched(arguments, question)
    seconds = time.perf_counter() - began
    written = _write(arguments, answer)  # first, since what reads the output may be gone
    _show(answer, seconds)
    print(", ".join(map(str, written)), file=sys.stderr)
    return 0


def _searched(arguments: argparse.Namespace, question: PlanQuestion) -> PlanAnswer:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from deploy.planner.probing import ProbeStore, RateProber
    from deploy.planner.search import PlanSearch

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("placements"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        ProbeStore(arguments.output / STORE, arguments.resume) as store,
    ):
        bar = progress.add_task("", total=None)

        def stage(name: str, count: int) -> None:
            progress.reset(bar, total=count, description=name)

        def ended() -> None:
            progress.advance(bar)

        with RateProber(question.load, question.goal, question.seeds, store, arguments.processes, ended) as prober:
            return PlanSearch(question, prober, stage).answer()


def _show(answer: PlanAnswer, seconds: float) -> None:
    from rich.console import Console

    from deploy.planner.drawn import difference, left_out, ranking, verdict

    question, console = answer.question, Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    machines, load = question.machines, question.load
    slos = {kind.objectives(load.profile) for kind in load.traffic.classes}
    asked = ", ".join(f"TTFT {slo.ttft_ms:.0f} ms, TPOT {slo.tpot_ms:.0f} ms" for slo in slos)
    how = "of both at once" if question.goal.joint else "of each"
    nodes = f"{machines.nodes} × {machines.devices_per_node} {machines.name}"
    print(f"{question.model.name} on {nodes}, {load.traffic.name}: {asked}, {question.goal.share:.0%} {how}")
    console.print(ranking(answer, width=console.width))
    for line in difference(answer):
        print(f"   {line}")
    if answer.rejected:
        print("\nLeft out (all of it is in the report):")
        print("\n".join(f"   {line}" for line in left_out(answer)))
    how = "searched by NSGA-II" if answer.evolved else "all looked at"
    print(f"\n{answer.considered} placements, {how}, {seconds:.0f} s")
    print(verdict(answer))


def _write(arguments: argparse.Namespace, answer: PlanAnswer) -> list[Path]:
    """The files' paths."""
    from deploy.planner.written import answer_json, placement_file

    best, folder = answer.best(), arguments.output
    assert best is not None
    model = arguments.served_model or f"/models/{answer.question.model.name}"
    (folder / FILE).write_text(placement_file(best, model, answer.question.machines), "utf-8")
    written = [folder / FILE]
    if arguments.json is not None:
        arguments.json.write_bytes(answer_json(answer))
        written.append(arguments.json)
    if not arguments.no_report:
        from deploy.planner.charts import draw_picture
        from deploy.planner.page import report_page

        (folder / PAGE).write_text(report_page(answer, (folder / FILE).read_text("utf-8")), "utf-8")
        draw_picture(answer, folder / PICTURE)
        written += [folder / PAGE, folder / PICTURE]
    return written
