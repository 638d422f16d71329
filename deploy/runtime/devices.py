"""Which GPU each process uses: one that is asked for is the only one that its process sees, as `cuda`.

So nothing in a process has to name a device: libraries launch on the current one, which each thread has of its own.
It knows flags and environments, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from serving.config import ModelConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
NODES = "nvidia[0-9]*"  # in /dev, one for each GPU of the host or of the container


def visible_devices(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process with this environment may use, as CUDA_VISIBLE_DEVICES names them, in torch's order."""
    named = environ.get(VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",") if name.strip()]
        return list(takewhile(lambda name: name != "-1", names))  # CUDA sees none from there on
    return [str(number) for number in range(len(list(devices.glob(NODES))))]


def asked_index(device: str) -> int | None:
    """1 of cuda:1; None of cuda and of other devices."""
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index.isdecimal() else None


def device_of(device: str, number: int, there: list[str]) -> tuple[str, dict[str, str]]:
    """`--device` and environment of the child that is the `number`-th on GPUs, where `there` are visible.

    It has the GPU it was told, or else the next in turn. One that is not there stays: the child says so.
    """
    index = asked_index(device)
    if device.partition(":")[0] != "cuda" or not there or (index is not None and index >= len(there)):
        return device, {}
    return "cuda", {VISIBLE: there[number % len(there) if index is None else index]}


def use_device(config: ModelConfig, environ: MutableMapping[str, str], devices: Path = Path("/dev")) -> ModelConfig:
    """Let this process see the GPU it was told alone. Call before CUDA starts; the configuration then names `cuda`."""
    if asked_index(config.device) is None:
        return config
    device, own = device_of(config.device, 0, visible_devices(environ, devices))
    environ.update(own)
    return replace(config, device=device)
