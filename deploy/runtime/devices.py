"""Which GPU each process uses: one that is asked for is the only one that its process sees, as `cuda`.

So nothing in a process has to name a device: libraries launch on the current one, which each thread has of its own.
A worker of several ranks sees one for each: the first is its own, and the others are those of the processes it starts.
It knows flags and environments, and imports no torch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from serving.config import ModelConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
NODES = "nvidia[0-9]*"  # in /dev, one for each GPU of the host or of the container
PARAVIRTUAL = "dxg"  # there instead, one for all GPUs, under WSL2
LIST, LIST_SECONDS = ("nvidia-smi", "--list-gpus"), 20.0


def visible_devices(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process with this environment may use, as CUDA_VISIBLE_DEVICES names them, in torch's order."""
    named = environ.get(VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",") if name.strip()]
        return list(takewhile(lambda name: name != "-1", names))  # CUDA sees none from there on
    count = len(list(devices.glob(NODES)))
    if not count and (devices / PARAVIRTUAL).exists():
        count = _listed()
    return [str(number) for number in range(count)]


def _listed() -> int:
    """How many GPUs the driver's own tool lists; none where it does not say."""
    try:
        told = subprocess.run(LIST, capture_output=True, text=True, check=True, timeout=LIST_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in told.splitlines())


def asked_index(device: str) -> int | None:
    """1 of cuda:1; None of cuda and of other devices."""
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index.isdecimal() else None


def device_of(device: str, freest: Sequence[int], there: Sequence[str], ranks: int = 1) -> tuple[str, dict[str, str]]:
    """`--device` and environment of a child of so many ranks, where `there` are visible, the `freest` first.

    It has the GPU it was told, or else these. Those that are not there stay: the child says so.
    """
    index = asked_index(device)
    chosen = list(freest[:ranks]) if index is None else [index]
    if device.partition(":")[0] != "cuda" or len(chosen) < ranks or any(one >= len(there) for one in chosen):
        return device, {}
    return "cuda", {VISIBLE: ",".join(there[one] for one in chosen)}


def use_device(config: ModelConfig, environ: MutableMapping[str, str], devices: Path = Path("/dev")) -> ModelConfig:
    """Let this process see the GPU it was told alone. Call before CUDA starts; the configuration then names `cuda`."""
    if asked_index(config.device) is None:
        return config
    there = visible_devices(environ, devices)
    device, own = device_of(config.device, range(len(there)), there)
    environ.update(own)
    return replace(config, device=device)
