"""`millrace bench cpu`: what this machine's memory and arithmetic give, and how near to it each kind of step comes.

It prints tables on stdout and progress on stderr; the kernels are timed by `bench.cpu_kernels`.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from bench.report import aligned

KINDS = ("int8", "bf16", "f32")
ROWS = (1, 8, 32)  # sampled in a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `millrace bench cpu`."""
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (the cores this process may use)")
    parser.add_argument("--form", help="instructions of the kernels (as a worker chooses, see --cpu-form)")
    parser.add_argument("--weights", nargs="+", default=["int8", "bf16"], choices=KINDS, help="(int8 bf16)")
    parser.add_argument("--kv", default="bf16", choices=KINDS, help="what the KV cache holds (bf16)")
    parser.add_argument("--layers", type=int, default=30, metavar="N", help="of the model, SmolLM2-135M's shape (30)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="of each measurement (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. 0: done; 2: there is nothing to measure; 130: interrupted."""
    try:
        _check(args)
        found = _measure(args)
    except ValueError as error:
        print(f"millrace bench cpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("millrace bench cpu: interrupted", file=sys.stderr)
        return 130
    if args.json is not None:
        args.json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError that names the flag, before anything is measured."""
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads {args.threads}: give at least 1")
    if args.layers < 1:
        raise ValueError(f"--layers {args.layers}: give at least 1")
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds {args.seconds:g}: give a number above 0")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no such folder")


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every table is printed as soon as it is there. Raises ValueError where there are no kernels, or no such form."""
    import torch  # takes a second, and no other bench of this program needs it

    from bench import cpu_kernels
    from serving.kernels import cpu
    from serving.kernels.cpu.build import cpu_name

    torch.manual_seed(0)
    library = cpu.shared_library(_say)
    kernels = cpu.load(threads=args.threads, form=args.form, measured=True, progress=_say)
    if library is None or kernels is None:
        raise ValueError("the CPU kernels cannot be built here: install g++ or clang++")
    torch.set_num_threads(kernels.threads)
    _say("reading memory")
    bandwidth = cpu_kernels.read_bandwidth(kernels, args.seconds)
    torch.set_num_threads(1)  # torch's waiting threads would take the cores from the kernels
    told = f"{kernels.threads} threads, reads {bandwidth / 1e9:.0f} GB/s; kernels of form {kernels.form}"
    print(f"{cpu_name()}: {told}\n", flush=True)
    rates: dict[str, dict[str, float]] = {}
    for form in [form for form in cpu.forms(library) if form != "plain"] or ["plain"]:
        _say(f"multiplying with form {form}")
        team = cpu.load(threads=kernels.threads, form=form)
        assert team is not None
        rates[form] = {kind: cpu_kernels.multiply_rate(team, cpu.Kind[kind.upper()], args.seconds) for kind in KINDS}
        team.close()
    rows = [[form, *(f"{rates[form][kind] / 1e9:,.0f}" for kind in KINDS)] for form in rates]
    print(aligned([["large linear layers, GOP/s", *KINDS], *rows]) + "\n", flush=True)
    steps: dict[str, list[dict[str, Any]]] = {}
    for name in args.weights:
        _say(f"steps with {name} weights")
        kinds = cpu_kernels.Kinds(cpu.Kind[name.upper()], cpu.Kind[args.kv.upper()])
        times = list(cpu_kernels.model_steps(kernels, kinds, args.layers, bandwidth, args.seconds))
        head = [f"{name} weights, {args.kv} KV", "least, ms", "median", "floor", "of its speed"]
        table = [[one.name, *map(_ms, (one.least, one.median, one.floor)), f"{one.share:.0%}"] for one in times]
        print(aligned([head, *table]) + "\n", flush=True)
        steps[name] = [asdict(one) for one in times]
    _say("sampling")
    sampled = dict(cpu_kernels.sampling_times(kernels, ROWS, args.seconds / 4))
    table = [[name, *(f"{1e3 * each:.3f}" for each in times)] for name, times in sampled.items()]
    print(aligned([["sampling, ms a step", *(f"{count} rows" if count > 1 else "1 row" for count in ROWS)], *table]))
    return {
        "cpu": cpu_name(),
        "threads": kernels.threads,
        "form": kernels.form,
        "bytes_per_second": bandwidth,
        "operations_per_second": rates,
        "steps": steps,
        "sampling": {"rows": ROWS, "seconds": sampled},
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
