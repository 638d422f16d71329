"""KV planes and views of them, as INT8 within float KV, are the same memory for whoever maps them."""

from __future__ import annotations

import torch

from kvcache.memory.device import DeviceKV
from serving.kvspec import gqa, mla
from serving.rank_group.shared_planes import MappedPlanes, SharedPlanes


def test_every_rank_sees_the_same_planes() -> None:
    specs = [gqa(2, 8, "bfloat16"), mla(24, 8, "bfloat16"), gqa(3, 8, "bfloat16")]
    shared = SharedPlanes(specs, num_blocks=5, block_size=4)
    other = MappedPlanes(shared.segment.details)
    device = DeviceKV(specs, 5, 4, planes=shared.planes)
    for number, kv in enumerate((device, device.kept_as("int8"))):
        mapped = other.at(shared.places(kv.planes))
        for ours, theirs in zip(kv.planes, mapped, strict=True):
            for plane, seen in zip(ours, theirs, strict=True):
                assert (seen.shape, seen.stride(), seen.dtype) == (plane.shape, plane.stride(), plane.dtype)
                plane[3, 1] = number + 1
                assert bool((seen[3, 1] == number + 1).all())
                seen[4, 2] = number + 5
                assert torch.equal(plane, seen)
    shared.segment.close()


def test_planes_do_not_overlap() -> None:
    specs = [gqa(1, 3, "float32"), gqa(2, 5, "bfloat16")]
    shared = SharedPlanes(specs, num_blocks=3, block_size=2)
    planes = [plane for layer in shared.planes for plane in layer]
    for number, plane in enumerate(planes):
        assert not plane.any()
        plane.fill_(number + 1)
    for number, plane in enumerate(planes):
        assert bool((plane == number + 1).all())
    shared.segment.close()
