"""The plan of `bench.gpu`: its stages and steps as data, on a GPU or in miniature on a CPU, and what they need.

Pure: it starts nothing and looks at no device. A step is a child process with a limit of its own, and with what is left
of its stage's nine minutes, so that a step that takes long takes the time of those after it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

STAGE_SECONDS = 525.0  # of a stage's steps together, at most; with the last one's end below nine minutes
STAGES = {
    1: "correctness",
    2: "kernels",
    3: "whole decode steps",
    4: "a mixed worker",
    5: "prefill and decode apart",
}
NOT_BUILT = {"fp8": "stage 4 in FP8: not built, torch alone multiplies FP8 weights"}
KERNEL_TESTS = "tests/serving/kernels/gpu"
FORWARD_TESTS = ("tests/gpu", "tests/serving/forward/test_triton_forward.py")
EXPERT_TESTS = (f"{KERNEL_TESTS}/test_grouped_linear.py", "tests/serving/forward/test_triton_sparse.py")
SHORT_ATTENTION = "test_float16"
INT8_TESTS = "int8_linear"  # they tune long, and so go last
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
TESTS_NEED = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStep:
    """`command` follows `python -m`, or is a program of its own; seconds are a guess and a limit."""

    name: str
    stage: int
    what: str
    command: tuple[str, ...]
    expected: float
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = ""  # runs Python, as a checker of memory does
    json: bool = True  # it is told --json FILE
    after: tuple[str, ...] = ()  # names of steps that must have passed
    makes: Path | None = None  # a folder, without which it has not been done


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPlaces:
    """Where folders of models go, figures and logs; and the checker of memory, where there is one."""

    models: Path
    out: Path
    sanitizer: str = ""

    def json(self, name: str) -> Path:
        return self.out / f"{name}.json"


def cuda_plan(places: PlanPlaces) -> list[GpuStep]:
    """Five stages on a GPU, by an 8B's shapes."""
    return [*_cuda_tests(places), *_cuda_kernels(), *_cuda_steps(), *_cuda_served(places)]


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100", *arguments)


def _cuda_tests(places: PlanPlaces) -> list[GpuStep]:
    linear = f"{KERNEL_TESTS}/test_linear.py"
    tuning = [f"--ignore={linear}", f"--ignore={EXPERT_TESTS[0]}"]
    steps = [
        GpuStep(
            name="test-kernels",
            stage=1,
            what="kernels against plain formulas",
            command=_pytest(KERNEL_TESTS, *tuning),
            expected=60,
            limit=200,
            json=False,
        ),
        GpuStep(
            name="test-forward",
            stage=1,
            what="forward, graphs and waits",
            command=_pytest(*FORWARD_TESTS, "-k", f"not {INT8_TESTS}"),
            expected=80,
            limit=200,
            json=False,
        ),
        GpuStep(
            name="test-experts",
            stage=1,
            what="products by experts, and mixtures",
            command=_pytest(*EXPERT_TESTS),
            expected=75,
            limit=200,
            json=False,
        ),
        GpuStep(
            name="test-int8",
            stage=1,
            what="INT8 products",
            command=_pytest(linear, "tests/gpu/test_kernels.py", "-k", INT8_TESTS),
            expected=120,
            limit=250,
            json=False,
        ),
    ]
    if places.sanitizer:
        check = GpuStep(
            name="sanitizer",
            stage=1,
            what="one small attention case under compute-sanitizer",
            command=_pytest(f"{KERNEL_TESTS}/test_attention.py", "-k", SHORT_ATTENTION),
            program=f"{places.sanitizer} --error-exitcode 9",
            expected=30,
            limit=90,
            json=False,
        )
        steps.insert(2, check)
    return steps


def _cuda_kernels() -> list[GpuStep]:
    groups = {
        "attention": (40.0, 150.0),
        "rows": (15.0, 90.0),
        "experts": (70.0, 200.0),
        "few": (80.0, 200.0),
        "linear": (100.0, 250.0),
    }
    return [
        GpuStep(
            name=f"kernels-{group}",
            stage=2,
            what=f"kernels: {group}",
            command=("bench.kernels", "--only", group),
            expected=expected,
            limit=limit,
        )
        for group, (expected, limit) in groups.items()
    ]


def _cuda_steps() -> list[GpuStep]:
    def step(name: str, weights: str, limits: tuple[float, float], *flags: str) -> GpuStep:
        of = {"131072": ", graphs of 131,072", "30b-a3b": ", mixtures of 128 experts"}.get(flags[-1], "")
        what = f"decode steps, {weights}{of}"
        command = ("bench.gpu_decode", "--weights", weights, *flags)
        return GpuStep(name=name, stage=3, what=what, command=command, expected=limits[0], limit=limits[1])

    few = ("--batches", "1", "8", "64", "--contexts", "1024")
    full = ("--batches", "1", "8", "64", "128", "--contexts", "1024", "4096")
    return [
        step("steps-bfloat16", "bfloat16", (70, 200), *full),
        step("steps-int8", "int8", (110, 250), *full),
        step("steps-quantized", "quantized", (70, 150), *few),
        step("steps-experts", "int8", (60, 200), *few, "--shape", "30b-a3b"),
        step("steps-131072", "bfloat16", (50, 150), *full[:-1], "--graph-contexts", "131072"),
    ]


def _cuda_served(places: PlanPlaces) -> list[GpuStep]:
    wide, int8 = places.models / "8b-bfloat16", places.models / "8b-int8"
    serve = ("--serve", "--max-num-seqs", "64", "--max-model-len", "8192", "--kv-cache-memory")
    mixed = (*serve, "16GiB")
    return [
        _folder("folder-bfloat16", wide, "8b", "bfloat16", (40, 150)),
        _served(places, "start-first", wide, (45, 180), ("--only-start", *mixed), "first start"),
        _served(places, "mixed-bfloat16", wide, (90, 220), mixed, "mixed, bfloat16; second start"),
        _folder("folder-int8", int8, "8b", "quantized", (25, 90)),
        _served(places, "mixed-int8", int8, (110, 220), mixed, "mixed, INT8", after="folder-int8"),
        _link((10, 30)),
        _served(
            places,
            "split-bfloat16",
            wide,
            (170, 330),
            ("--mode", "split", "--expect", str(places.json("mixed-bfloat16")), *serve, "10GiB"),
            "prefill and decode on one device",
            stage=5,
        ),
    ]


def _folder(name: str, out: Path, shape: str, weights: str, limits: tuple[float, float]) -> GpuStep:
    return GpuStep(
        name=name,
        stage=4,
        what=f"write a random {shape} folder, {weights}",
        command=("bench.random_folder", str(out), "--shape", shape, "--weights", weights),
        expected=limits[0],
        limit=limits[1],
        makes=out,
    )


def _served(
    places: PlanPlaces,
    name: str,
    folder: Path,
    limits: tuple[float, float],
    flags: tuple[str, ...],
    what: str,
    *,
    stage: int = 4,
    after: str = "folder-bfloat16",
) -> GpuStep:
    log = places.out / f"{name}-server.log"
    command = ("bench.gpu_served", str(folder), "--log", str(log), "--start-seconds", str(limits[1]), *flags)
    return GpuStep(
        name=name, stage=stage, what=what, command=command, expected=limits[0], limit=limits[1], after=(after,)
    )


def _link(limits: tuple[float, float], *flags: str) -> GpuStep:
    return GpuStep(
        name="link",
        stage=5,
        what="copies to the host and back: the ceiling of a handoff",
        command=("bench.gpu_device", "--copies", *flags),
        expected=limits[0],
        limit=limits[1],
    )


def miniature_plan(places: PlanPlaces) -> list[GpuStep]:
    """The same five stages on a CPU, with shapes so small that no figure means anything."""
    wide, int8 = places.models / "mini-bfloat16", places.models / "mini-int8"
    tests = (f"{KERNEL_TESTS}/test_attention.py", f"{KERNEL_TESTS}/test_linear.py")
    chosen = f"{SHORT_ATTENTION} or 3-1552-40-False"
    load = (
        *("--device", "cpu", "--concurrency", "1", "2", "--input-len", "48", "--output-len", "8"),
        *("--long-len", "160", "--long-requests", "2", "--beside", "2", "--stream-len", "24"),
    )
    serve = ("--serve", "--kv-cache-memory", "64MiB", "--threads", "1", "--log-level", "warning")
    decode = ("--shape", "tiny", "--batches", "2", "--contexts", "20", "--steps", "1")
    limits = (15.0, 60.0)

    def interpreted(name: str, stage: int, what: str, *command: str, json: bool = True) -> GpuStep:
        return GpuStep(
            name=name,
            stage=stage,
            what=f"{what}, interpreted",
            command=command,
            expected=8,
            limit=60,
            environment=INTERPRETED,
            json=json,
        )

    return [
        interpreted("test-kernels", 1, "two kernels' tests", *_pytest(*tests, "-k", chosen), json=False),
        interpreted("kernels-tiny", 2, "every kernel", "bench.kernels", "--tiny", "--repeats", "1"),
        interpreted("steps-tiny", 3, "decode steps, both weights", "bench.gpu_decode", *decode),
        _folder("folder-bfloat16", wide, "mini", "bfloat16", limits),
        _served(places, "start-first", wide, limits, (*load, "--only-start", *serve), "first start"),
        _served(places, "mixed-bfloat16", wide, limits, (*load, *serve), "mixed, bfloat16; second start"),
        _folder("folder-int8", int8, "mini", "quantized", limits),
        _served(places, "mixed-int8", int8, limits, (*load, *serve), "mixed, INT8", after="folder-int8"),
        _link((3, 30), "--bytes", str(1 << 20)),
        _served(
            places,
            "split-bfloat16",
            wide,
            (25, 90),
            (*load, "--mode", "split", "--expect", str(places.json("mixed-bfloat16")), *serve),
            "prefill and decode apart",
            stage=5,
        ),
    ]


def chosen_steps(plan: Sequence[GpuStep], stages: Collection[int]) -> list[GpuStep]:
    """The steps of these stages, in order, and before them those that they need of others."""
    by_name = {step.name: step for step in plan}
    wanted = {step.name for step in plan if step.stage in stages}
    for step in reversed(plan):
        if step.name in wanted:
            wanted |= {name for name in step.after if name in by_name}
    return [step for step in plan if step.name in wanted]


def lacking(pyproject: Path, stages: Collection[int], installed: Mapping[str, str] | None = None) -> list[str]:
    """What has to be brought along first: packages that are not here, or too old, each with what is wanted.

    `installed` is by name; by default what this Python finds.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    wanted += TESTS_NEED if 1 in stages else ()
    found = []
    for requirement in wanted:
        asked = requirement.partition(";")[0].strip()
        name, _, least = asked.partition(">=")
        least = least.partition(",")[0]
        has = _installed(name) if installed is None else installed.get(name)
        if has is None:
            found.append(asked)
        elif least and _numbers(has) < _numbers(least):
            found.append(f"{asked} (here: {has})")
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """2.11.0+cu128 as (2, 11, 0)."""
    digits = ("".join(c for c in part if c.isdigit()) for part in text.partition("+")[0].split(".")[:3])
    return tuple(int(part) for part in digits if part)
