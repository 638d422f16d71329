"""Everything to be known of a GPU, by one command: correctness, kernels, steps, a server, and one with roles apart.

    python -m bench.gpu --plan                 # what would be run, and how long it takes
    python -m bench.gpu                        # all five stages on the device there is; in miniature on a CPU
    python -m bench.gpu --stages 1 3           # some of them, each below nine minutes

Each step is a process of its own with a limit; one that fails is recorded, and the next one runs. What has passed at
this commit on this device is not run again. Ctrl-C keeps what there is. The page of all that is recorded lies in --out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu_device import sample
from bench.gpu_page import Recorded, page, plan_text
from bench.gpu_run import PASSED, RecordFile, StepRunner, argv, shown
from bench.gpu_stages import STAGES, GpuStep, PlanPlaces, chosen_steps, cuda_plan, lacking, miniature_plan
from bench.own_server import ROOT, commit

DONE, SOME_FAILED, UNUSABLE, STOPPED = 0, 1, 2, 130  # exit statuses
FACTS_SECONDS = 60.0
SERVER_MODULES = ("deploy.serve", "deploy.frontend", "deploy.local", "deploy.worker.process", "triton")
MINIATURE_TICK = 2.0
TICK = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSession:
    """What one call is about: a device, a revision, and the steps chosen for it."""

    facts: dict[str, str]
    revision: str
    miniature: bool
    places: PlanPlaces
    plan: list[GpuStep]
    steps: list[GpuStep]
    records: RecordFile

    def recorded(self) -> Recorded:
        return [(step, self.records.get(step.name)) for step in self.plan]


def device_facts() -> dict[str, str]:
    """By a process of its own, since one that asks holds memory of the device. Raises ValueError."""
    command = [sys.executable, "-m", "bench.gpu_device"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=FACTS_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"the device did not answer in {FACTS_SECONDS:.0f} s") from error
    if done.returncode != 0:
        raise ValueError(f"the device cannot be asked: {done.stderr.strip()[-300:]}")
    found: dict[str, str] = json.loads(done.stdout)["facts"]
    return found


def import_error(stages: Sequence[int]) -> str:
    """Why a process of the stages would not start: the last line of what it says; empty where it would."""
    modules = [*SERVER_MODULES, *(("tests.conftest",) if 1 in stages else ())]
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=FACTS_SECONDS, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]


def revision(asked: str | None) -> str:
    """The commit, with a digest of the sources where they differ from it, or where git says nothing."""
    told = asked or commit()
    if told and not told.endswith("+"):
        return told
    digest = hashlib.sha256()
    rooms = (room for room in ROOT.iterdir() if room.is_dir() and room.name[0] != ".")
    for path in sorted(path for room in rooms for path in room.rglob("*.py") if path.is_file()):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return f"{told.removesuffix('+')}+{digest.hexdigest()[:9]}"


def prepared(options: argparse.Namespace) -> GpuSession:
    """Raises ValueError."""
    facts = device_facts()
    if options.plan and options.device == "cuda" and facts["name"] == "CPU":
        facts = {"name": "a CUDA device"}
    miniature = options.miniature or (facts["name"] == "CPU" and options.device != "cuda")
    if facts["name"] == "CPU" and not miniature:
        raise ValueError("there is no CUDA device here; --miniature goes through the motions, --plan prints the plan")
    if miniature:
        facts["name"] = f"{facts['name']}, miniature"
    name = revision(options.commit)
    out: Path = options.out.resolve()
    own = out / f"{slug(name)}-{slug(facts['name'])}"
    places = PlanPlaces(models=options.models.resolve(), out=own, sanitizer=shutil.which("compute-sanitizer") or "")
    plan = miniature_plan(places) if miniature else cuda_plan(places)
    return GpuSession(
        facts=facts,
        revision=name,
        miniature=miniature,
        places=places,
        plan=plan,
        steps=chosen_steps(plan, options.stages),
        records=RecordFile(out / "state.json", name, facts["name"]),
    )


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def show_plan(session: GpuSession) -> None:
    done = {step.name: session.records.done(step) for step in session.steps}
    commands = {step.name: shown(argv(step, session.places)) for step in session.steps}
    print(f"{session.facts['name']}, commit {session.revision}")
    print(plan_text(session.steps, done, commands))


def write_page(session: GpuSession, options: argparse.Namespace, command: str) -> Path:
    """Into --out, and with --results beside the other results."""
    now = datetime.now(UTC)
    when = now.isoformat(sep=" ", timespec="minutes")
    text = page(session.facts, session.revision, when, command, session.recorded(), miniature=session.miniature)
    session.places.out.mkdir(parents=True, exist_ok=True)
    written: Path = session.places.out / "page.md"
    written.write_text(text)
    if options.results:
        written = ROOT / "bench" / "results" / f"{now.date()}-gpu-{slug(session.facts['name'])}.md"
        written.write_text(text)
    return written


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plan", action="store_true", help="print what would be run, and run nothing")
    add("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES), metavar="N", help="which (1 to 5)")
    add("--miniature", action="store_true", help="tiny shapes on a CPU, as where there is no device")
    add("--device", choices=("auto", "cuda"), default="auto", help="cuda: of a GPU; --plan then needs none (auto)")
    add("--again", action="store_true", help="run what has passed before, too")
    add("--results", action="store_true", help="write the page into bench/results as well")
    add("--out", type=Path, default=ROOT / "build" / "gpu", help="records, figures, logs and the page (build/gpu)")
    models = Path(tempfile.gettempdir()) / "millrace-gpu-models"
    add("--models", type=Path, default=models, help=f"where folders of random weights go, 25 GB of an 8B ({models})")
    add("--commit", help="what to call these sources (default: as git does)")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(given)
    command = shlex.join(["python", "-m", "bench.gpu", *(sys.argv[1:] if given is None else given)])
    try:
        session = prepared(options)
    except ValueError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return UNUSABLE
    missing = lacking(ROOT / "pyproject.toml", options.stages)
    broken = "" if missing else import_error(options.stages)
    if options.plan:
        show_plan(session)
    if missing:
        print(f"bench.gpu: not here, to be brought along: {', '.join(missing)}", file=sys.stderr)
    if broken:
        print(f"bench.gpu: what is here cannot be imported: {broken}", file=sys.stderr)
    if not options.plan and (missing or broken):
        return UNUSABLE
    return DONE if options.plan else run(session, options, command)


def run(session: GpuSession, options: argparse.Namespace, command: str) -> int:
    runner = StepRunner(
        places=session.places,
        records=session.records,
        show=lambda line: print(line, flush=True),
        sample=sample,
        tick=MINIATURE_TICK if session.miniature else TICK,
    )
    status = DONE
    try:
        runner.run(session.steps, again=options.again)
    except KeyboardInterrupt:
        status = STOPPED
    print(f"wrote {write_page(session, options, command)}")
    records = [session.records.get(step.name) for step in session.steps]
    if status == DONE and any(record is None or record.status != PASSED for record in records):
        return SOME_FAILED
    return status


if __name__ == "__main__":
    sys.exit(main())
