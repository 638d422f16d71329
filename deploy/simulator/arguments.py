"""The flags of `millrace simulate`: their names, help and defaults. What they mean is read in command.py.

It imports nothing that serves, so that the command line starts without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.simulator.ablation import ABLATIONS
from deploy.simulator.profiles import PROFILES
from deploy.simulator.recorded_systems import SYSTEMS
from deploy.simulator.traffic import TRAFFIC
from router.policies import POLICIES

DESCRIPTION = """Serve made-up or recorded requests on a made-up cluster: the schedulers, leases, KV blocks and router
are those that serve; what computing and the wire take is modelled, and time is virtual. Without --rate and --trace it
looks for the highest rate at which enough requests meet their objectives.

  millrace simulate --workers mixed=4
  millrace simulate --workers prefill=2,decode=2 --workload long-mixed --policy least_loaded,prefix_aware
  millrace simulate --trace requests.csv --ttft-ms 250 --tpot-ms 100
  millrace simulate --trace requests.csv --system distserve-c21d11 --ttft-ms 250 --tpot-ms 100
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, DESCRIPTION
    add = parser.add_argument
    add("--workers", default="mixed=4", metavar="ROLE=N,…", help="workers of each role (default: mixed=4)")
    add("--policy", default="least_loaded", metavar="NAME,…", help=f"routing policies: {', '.join(POLICIES)}")
    add("--workload", default="chat", choices=TRAFFIC, help="what is asked (default: chat)")
    add(
        "--prompt-tokens", metavar="MEAN[:SPREAD]", help="lengths instead of the workload's, lognormal; spread 0: equal"
    )
    add("--output-tokens", metavar="MEAN[:SPREAD]", help="the same of outputs")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests as recorded, JSONL or CSV, at their own rate (docs/simulator.md)",
    )
    add("--system", choices=SYSTEMS, help="a recorded system that serves in place of the workers")
    add(
        "--profile",
        default="a100-opt13b",
        metavar="NAME",
        help=f"{', '.join(PROFILES)}, or a file (default: a100-opt13b)",
    )
    add("--role-profiles", default="", metavar="ROLE=NAME,…", help="other profiles, of the workers of a role")
    add(
        "--rate",
        metavar="R,…",
        help="requests a second; search: the highest that attains (default; a trace has its own)",
    )
    add("--requests", type=int, default=1000, metavar="N", help="requests at every rate and seed (default: 1000)")
    add("--seeds", type=int, metavar="N", help="seeds at every rate (default: 3; of a trace 1)")
    add("--jobs", type=int, default=0, metavar="N", help="processes for seeds beside each other (default: one a core)")
    add("--attainment", type=float, default=0.9, help="share that must meet both objectives (default: 0.9)")
    add("--rate-tolerance", type=float, default=0.05, help="how exactly goodput is found (default: 0.05)")
    add("--first-rate", type=float, metavar="R", help="where the search begins; default: a guess by the profile")
    add("--ttft-ms", type=float, help="objective of every class; default: multiples of the profile's own times")
    add("--tpot-ms", type=float, help="the same, of each token after the first")
    add("--burstiness", type=float, default=1.0, help="coefficient of variation of the gaps; 1: Poisson (default: 1)")
    add("--max-tokens", type=int, help="what clients allow, beyond what there will be; default: just that")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step; default: the profile's")
    add("--max-num-seqs", type=int, metavar="N", help="sequences of a worker; default: the profile's")
    add("--num-kv-blocks", type=int, metavar="N", help="KV blocks of a worker; default: the profile's")
    add("--chunking", choices=("slack", "fixed"), help="as the workers' flag; default: as there")
    add("--prefill-order", choices=("slack", "fcfs"), help="as the workers' flag; default: as there")
    add("--tpot-admission", action=argparse.BooleanOptionalAction, help="as the workers' flag; default: as there")
    add("--drafts", type=float, metavar="SHARE", help="draft tokens, of which this share is right; default: none")
    add("--without", default="", metavar="NAME,…", help=f"also with one switched off in turn: {', '.join(ABLATIONS)}")
    add("--bandwidth", type=float, default=25.0, metavar="GB/S", help="into and out of a worker (default: 25)")
    add("--message-ms", type=float, default=0.2, help="of a message between router and worker, one way (default: 0.2)")
    add("--commit-ms", type=float, default=0.0, help="from a handoff's end until its sequence decodes (default: 0)")
    add("--front-ms", type=float, default=0.0, help="of the API before a request's first token (default: 0)")
    add("--learned", action="store_true", help="workers begin with what the profile says of steps, not with a guess")
    add("--noise", type=float, default=0.05, help="of a step's time, as a logarithm (default: 0.05)")
    add("--role-noise", default="", metavar="ROLE=X,…", help="another noise, of the workers of a role")
    add("--role-steps", default="", metavar="ROLE=FILE,…", help="steps vary as in this trace (serve --profile) instead")
    add("--heartbeat-interval", type=float, default=0.5, help="seconds between a worker's heartbeats (default: 0.5)")
    add("--json", type=Path, metavar="FILE", help="write all figures there too")


def run(options: argparse.Namespace) -> int:
    """Simulate and print; the process's exit code. Raises ValueError, OSError."""
    from deploy.simulator import command

    return command.run(options)
