"""What a device's memory is used for, by the device's own count: whoever has it, and this process by torch.

It knows neither models nor KV.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Bytes: of the device and free on it, whoever has the rest; held by torch here, and the most since last read."""

    total: int
    free: int
    held: int
    peak: int


class DeviceMemory(Protocol):
    """A device's memory as it is now."""

    def reading(self) -> MemoryReading:
        """After everything launched has run, and what nobody uses is given back."""


class CudaMemory:
    """DeviceMemory of the current CUDA device."""

    def reading(self) -> MemoryReading:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        return MemoryReading(total=total, free=free, held=torch.cuda.memory_reserved(), peak=peak)
