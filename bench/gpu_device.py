"""What the device of a measurement is and does meanwhile, by torch and nvidia-smi: `python -m bench.gpu_device`.

Also how quickly bytes cross from the device to pinned host memory and back: the ceiling of a handoff through the host.
`sample` needs no torch, so that a process that only watches holds nothing on the device.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUERIED = {
    "memory_mib": "memory.used",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
}
COPIED_BYTES = 1 << 28
COPIES = 10


def sample() -> dict[str, float]:
    """What nvidia-smi says of the first device just now; empty where it is not there or says nothing."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(QUERIED.values())}", "--format=csv,noheader,nounits"]
    told = _told(asked).splitlines()
    values = told[0].split(",") if told else []
    found = {}
    for name, value in zip(QUERIED, values, strict=False):
        if value.strip().replace(".", "", 1).isdecimal():  # not "[N/A]"
            found[name] = float(value)
    return found


def facts() -> dict[str, str]:
    """Name, memory, driver, limits and versions, as texts."""
    import torch

    found = {"host": platform.platform(), "python": platform.python_version()}
    found |= {name: _version(name) for name in ("torch", "triton", "transformers")}
    found["cuda"] = str(torch.version.cuda or "none")
    if not torch.cuda.is_available():
        return {"name": "CPU", **found}
    properties = torch.cuda.get_device_properties(0)
    found["memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
    found["multiprocessors"] = str(properties.multi_processor_count)
    found["capability"] = f"{properties.major}.{properties.minor}"
    more = {"driver": "driver_version", "power_limit_watts": "power.limit", "most_sm_mhz": "clocks.max.sm"}
    told = _told(["nvidia-smi", f"--query-gpu={','.join(more.values())}", "--format=csv,noheader,nounits"])
    values = told.splitlines()[0].split(",") if told else []
    return {
        "name": properties.name,
        **found,
        **{name: value.strip() for name, value in zip(more, values, strict=False)},
    }


def host_copies(size: int = COPIED_BYTES) -> dict[str, float]:
    """Bytes a second from the device to pinned memory and back, the best of some; on a CPU those of a memcpy."""
    import torch

    if not torch.cuda.is_available():
        from bench.far import memcpy_seconds

        rate = size / memcpy_seconds(size)
        return {"to_host": rate, "to_device": rate}
    near = torch.empty(size, dtype=torch.int8, device="cuda").random_(-127, 128)
    host = torch.empty(size, dtype=torch.int8, pin_memory=True)
    found = {}
    for name, target, source in (("to_host", host, near), ("to_device", near, host)):
        best = float("inf")
        for _ in range(COPIES):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        found[name] = size / best
    return found


def _told(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_device", description=__doc__)
    parser.add_argument("--copies", action="store_true", help="time copies to the host and back as well")
    parser.add_argument("--bytes", type=int, default=COPIED_BYTES, help="of each copy")
    parser.add_argument("--json", type=Path, help="write it there, too")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"facts": facts(), "now": sample()}
    if options.copies:
        found["copies"] = host_copies(options.bytes)
    text = json.dumps(found, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
