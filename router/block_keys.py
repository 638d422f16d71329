"""The block keys of a request, as the workers of one build and block size know them. Pure."""

from __future__ import annotations

from kvcache.blocks.prefix import extend_keys, root_key
from router.request_state import RequestState
from serving.messages import WorkerStatus


def block_keys(state: RequestState, status: WorkerStatus) -> list[bytes]:
    """The keys of the blocks that such a worker could reuse: all full ones, but for one token left to compute."""
    request = state.request
    if not request.reuses_kv or status.block_size < 1:
        return []
    key = (status.fingerprint, status.block_size)
    keys = state.block_keys.setdefault(key, [])
    if len(keys) == (state.tokens - 1) // status.block_size:
        return keys
    long_rope = bool(status.long_rope_after) and request.longest > status.long_rope_after
    root = root_key(status.fingerprint, request.tenant, long_rope)
    text = state.text if state.generated else request.prompt
    extend_keys(keys, root, text, status.block_size, upto=state.tokens - 1)
    return keys
