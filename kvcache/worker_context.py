"""What the prefill and decode sides of one worker share: its identity, its engine and its KV.

Both open sequences through it. It knows neither leases nor how KV travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.blocks.manager import KVCacheManager
from kvcache.memory.device import DeviceKV
from kvcache.memory.locations import KVLocations
from serving.engine.engine import Engine
from serving.engine.loop import EngineLoop
from serving.engine.sequence import SequenceState
from serving.errors import ContextLengthExceeded, InvalidRequest
from serving.grammar.grammars import Grammars
from serving.kvspec import AUTO
from serving.messages import LeaseOrder, WorkerIdentity, owner_of


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """`locations` are the memories KV lies in. Without `grammars`, requests that bring one are refused."""

    identity: WorkerIdentity
    loop: EngineLoop
    kv: KVCacheManager
    locations: KVLocations
    grammars: Grammars | None = None

    @property
    def engine(self) -> Engine:
        return self.loop.engine

    @property
    def device_kv(self) -> DeviceKV:
        return self.locations.device

    def sequence(
        self, order: LeaseOrder, *, stays: bool, kv_dtype: str = AUTO, fingerprint: str | None = None
    ) -> SequenceState:
        """A sequence without blocks; `fingerprint` is its KV layout's, by default the worker's own.

        Raises ContextLengthExceeded, InvalidRequest.
        """
        request = order.request
        tokens, limit = len(request.prompt) + len(order.generated), self.identity.max_model_len
        if tokens >= limit:
            raise ContextLengthExceeded(
                f"{tokens} tokens leave no room to generate within the context of {limit}", param="prompt"
            )
        long_rope = 0 < self.identity.long_rope_after < request.longest
        root = self.kv.root(request.tenant, long_rope, fingerprint)
        now = self.engine.clock()
        seq = SequenceState(order, root=root, stays=stays, long_rope=long_rope, now=now, kv_dtype=kv_dtype)
        if grammar := request.sampling.grammar:
            if self.grammars is None:
                raise InvalidRequest(f"{self.identity.name} follows no grammars", param="grammar")
            seq.grammar = self.grammars.begin(grammar, owner_of(request.tenant))
            if not seq.may_draw:
                seq.grammar.when_ready(self.loop.wake)  # a step that has nothing else to do sleeps
        return seq
