"""The tiles that were chosen on a device for products whose kernels try several, to be kept for later processes.

Triton keeps no configurations that set something up before a launch, as those of the memory accelerator do.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch

from serving.kernels.gpu import grouped_linear, linear
from serving.kernels.gpu.launch import device_kind
from serving.kernels.tuned_tiles import TunedTiles


def tuned_tiles(device: torch.device) -> TunedTiles:
    """Those of this CUDA device, for these kernels as they are written now."""
    source = sha256(b"".join(Path(file).read_bytes() for file in (linear.__file__, grouped_linear.__file__)))
    tuners = {**linear.TUNERS, **grouped_linear.TUNERS}
    return TunedTiles(tuners, device_kind(device) | {"source": source.hexdigest()})
