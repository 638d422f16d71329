"""The memory that experts lie in: what it holds once modules compute from it."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import nn

from serving.expert_parallel.arena import ExpertArena, ExpertFormat, arena_bytes
from serving.shared_memory import FIRST_BYTE, Segment, mapped

LAYERS, SLOTS = 2, 3


def test_every_page_is_there_before_ranks_compute() -> None:
    """Also of the buffers to spare: pages found at the first copy are found on cores that compute steps meanwhile."""
    experts = [nn.Linear(256, 256, bias=False) for _ in range(SLOTS)]
    form = ExpertFormat.of(experts)
    size = arena_bytes(form, LAYERS, SLOTS)
    segment = Segment(size, "millrace-weights")
    try:
        arena = ExpertArena(form, LAYERS, SLOTS, torch.from_numpy(segment.memory[FIRST_BYTE:]))
        held = [arena.holding(layer, experts) for layer in range(LAYERS)]
        assert os.fstat(segment._file).st_blocks * 512 >= FIRST_BYTE + size  # asked first: to read a page is to find it
        for modules in held:
            assert all(torch.equal(a.weight, b.weight) for a, b in zip(modules, experts, strict=False))
            assert not modules[SLOTS].get_parameter("weight").any()
        assert np.array_equal(mapped(segment.details, writable=False), segment.memory)
    finally:
        segment.close()
