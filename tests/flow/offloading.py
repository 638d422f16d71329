"""What the tests of host offload share: a device for 704 tokens, prompts longer than that, and what was moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.messages import Request, SamplingParams
from tests.flow.conftest import Cluster
from tests.flow.reference import prompts

ROOMY: dict[str, Any] = {"num_kv_blocks": 512, "max_num_batched_tokens": 200}
SMALL: dict[str, Any] = {"num_kv_blocks": 48, "host_kv_memory": 2 << 20, "max_num_batched_tokens": 200}
DEVICE_TOKENS = 704  # that the device of SMALL holds of one prompt


def asked(name: str, prompt: Sequence[int], count: int, **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=count, temperature=0.0, **sampling)
    return Request(request_id=name, prompt=tuple(prompt), sampling=params)


def long_prompt(length: int, seed: int = 5) -> list[int]:
    return prompts(1, shortest=length, longest=length, seed=seed)[0]


def moved(cluster: Cluster, number: int = 0) -> int:
    """Tokens that a worker has moved from its device to its host."""
    host = cluster.cluster.workers[number].kv.host
    assert host is not None
    return host.tokens_moved
