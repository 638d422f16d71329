"""Which form of the kernels computes quickest on this CPU, where its instruction flags do not tell.

It times the products that such forms compute differently, once for a CPU and a library, and keeps what it found beside
the library. It may not know any model.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson
import torch

from serving.cache_folder import cache_folder, one_at_a_time
from serving.kernels.cpu.build import cpu_name
from serving.kernels.cpu.extension import Kernels, forms

log = logging.getLogger("millrace.kernels")

RIVALS = ("avx512_bf16", "avx512_vnni")
"""Forms of the same code but for products of bfloat16: some CPUs multiply pairs with one instruction at less than half
the rate at which they widen them and multiply in float32."""
MARGIN = 1.05  # so much quicker than the first has to be what is taken in its place
ROWS = (8, 64, 256)  # of a decode step's batch, and of prompts; with fewer, memory decides and all are alike
OUTPUTS, INPUTS = 768, 1536
ROUNDS, SECONDS = 3, 0.02  # of each form and number of rows, in turn


def quickest_form(library: ctypes.CDLL, threads: int, rivals: Sequence[str] = RIVALS) -> str:
    """The form to compute with: the best that the CPU has, or one of `rivals` that is quicker here."""
    known = forms(library)
    candidates = [form for form in known if form in rivals]
    if known[0] not in candidates or len(candidates) < 2:
        return known[0]
    with _kept(Path(library._name)) as kept:
        seconds = kept.get(cpu_name(), {})
        if not seconds.keys() >= set(candidates):
            seconds = kept[cpu_name()] = time_forms(library, candidates, threads)
    quickest = min(candidates, key=seconds.__getitem__)
    ratio = seconds[candidates[0]] / seconds[quickest]
    if ratio < MARGIN:
        return candidates[0]
    log.info("CPU kernels of form %s: bfloat16 products %.2f× as fast as of %s", quickest, ratio, candidates[0])
    return quickest


def time_forms(
    library: ctypes.CDLL,
    candidates: Sequence[str],
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of a bfloat16 linear layer in each form: the geometric mean over ROWS of the least that was seen."""
    teams = {form: Kernels(library, threads=threads, form=form) for form in candidates}
    try:
        weight = torch.randn(OUTPUTS, INPUTS).to(torch.bfloat16)
        found: dict[str, list[float]] = {form: [] for form in candidates}
        for rows in ROWS:
            x, out = torch.randn(rows, INPUTS), torch.empty(rows, OUTPUTS)
            least = dict.fromkeys(candidates, math.inf)
            for _ in range(ROUNDS):
                for form, kernels in teams.items():
                    packed, until = kernels.pack(weight), clock() + SECONDS
                    while least[form] == math.inf or clock() < until:
                        began = clock()
                        kernels.linear(x, packed, out=out)
                        least[form] = min(least[form], clock() - began)
            for form in candidates:
                found[form].append(least[form])
    finally:
        for kernels in teams.values():
            kernels.close()
    return {form: math.exp(sum(map(math.log, times)) / len(times)) for form, times in found.items()}


@contextlib.contextmanager
def _kept(library: Path) -> Iterator[dict[str, dict[str, float]]]:
    """Seconds by CPU and form, as they were kept beside the library, and kept again where they have changed.

    One process measures while others wait for it. Where nothing can be kept, everybody measures.
    """
    file = cache_folder() / f"{library.stem}-forms.json"
    with one_at_a_time(file):
        before = _read(file)
        kept = dict(before)
        yield kept
        if kept != before:
            with contextlib.suppress(OSError):
                file.write_bytes(orjson.dumps(kept))


def _read(file: Path) -> dict[str, dict[str, float]]:
    """What is kept and can be believed."""
    try:
        told = orjson.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(told, dict):
        return {}
    return {cpu: times for cpu, times in told.items() if isinstance(times, dict) and _believable(times)}


def _believable(times: Mapping[str, object]) -> bool:
    return all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in times.values())
