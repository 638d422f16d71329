"""A runner that computes nothing but remembers everything: which prefix was written to which slot, and who read it.

Its tokens follow from the tokens so far, so that a continuation anywhere can be checked against `written_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decode.model_drafts import Drafts
from decode.scheduler import DecodeScheduler
from decode.speculation import DraftTurns, Speculation
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadManager, OffloadPlan
from serving.engine.engine import Engine, StepLimits
from serving.engine.plan import Scheduler, Work
from serving.engine.run import LayerDone, Runner, RunResult, RunTimes
from serving.engine.sequence import SequenceState
from serving.sampling.sampler import Sampled, SamplingFailed

VOCAB = 5
EOS = VOCAB  # never drawn by `next_token`, unless a test says so


def next_token(tokens: Sequence[int]) -> int:
    """A token that depends on all tokens before it."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 10_007
    return state % VOCAB


def written_out(prompt: Sequence[int], count: int) -> list[int]:
    """The output an undisturbed run would give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ScriptedRunner(Runner):
    """Checks, as attention would notice, that all KV a sequence reads is that of its own prefix.

    `during` is called while a step runs, as other threads would; sequences in `broken` cannot be sampled.
    """

    def __init__(self, block_size: int, layers: int = 2):
        self.block_size = block_size
        self.layers = layers
        self.kv: dict[object, tuple[bytes, tuple[int, ...]]] = {}  # slot → root and prefix up to this token
        self.during: Callable[[Sequence[Work]], None] = lambda work: None
        self.broken: set[str] = set()
        self.counts: list[list[int]] = []

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        self.counts.append([item.count for item in work])
        drawn = [self._advance(item) for item in work]
        handed_over = [item for item in work if item.seq.prefill.handoff is not None]
        if layer_done is not None and handed_over:
            for layer in range(self.layers):
                layer_done(handed_over, layer)
        self.during(work)
        return RunResult(drawn, {}, RunTimes(0.0, 0.0, 0.0))

    def _advance(self, work: Work) -> list[Sampled | SamplingFailed]:
        """Write the KV of the new tokens, drafted ones too, read all up to them, and draw after the last."""
        seq = work.seq
        self._move(seq)
        known = [*seq.tokens[: seq.computed], *work.tokens]
        for position in range(len(known)):
            slot = self.slot(seq, position)
            content = (seq.prefix.root, tuple(known[: position + 1]))
            if position >= seq.computed:
                assert isinstance(slot, int), "a step writes to the device alone"
                self.kv[slot] = content
            assert self.kv.get(slot) == content, "a sequence would attend to KV that is not its own"
        if not work.completes:
            return []
        if seq.request.request_id in self.broken:
            return [SamplingFailed("no token can be drawn")]
        return [Sampled(next_token(known[:end])) for end in range(len(seq.tokens), len(known) + 1)]

    def slot(self, seq: SequenceState, position: int) -> object:
        """Where the sequence's own account says a token's KV lies: a slot of the device, or an extent and its place."""
        index, offset = divmod(position, self.block_size)
        offload = seq.offload
        if offload is None or index >= offload.blocks:
            return seq.blocks[index - (offload.blocks if offload is not None else 0)] * self.block_size + offset
        extent, place = divmod(position, offload.extent_blocks * self.block_size)
        return ("host", offload.extents[extent], place)

    def _move(self, seq: SequenceState) -> None:
        """What goes to the host before the step is gone from the device."""
        if seq.offload is None:
            return
        for move in seq.offload.moves:
            slots = [block * self.block_size + offset for block in move.blocks for offset in range(self.block_size)]
            for place, slot in enumerate(slots):
                self.kv["host", move.extent, place] = self.kv.pop(slot)
        seq.offload.settle()

    def write(self, root: bytes, tokens: Sequence[int], blocks: Sequence[int], start: int) -> None:
        """KV that was handed over from elsewhere."""
        for position in range(start, len(tokens)):
            slot = blocks[position // self.block_size] * self.block_size + position % self.block_size
            self.kv[slot] = (root, tuple(tokens[: position + 1]))

    def arrive(self, seq: SequenceState) -> None:
        """The same, for a sequence that has KV in host memory."""
        for position in range(len(seq.tokens)):
            self.kv[self.slot(seq, position)] = (seq.prefix.root, tuple(seq.tokens[: position + 1]))


def make_kv(blocks: int, block_size: int, *, caching: bool = True, host: OffloadPlan | None = None) -> KVCacheManager:
    return KVCacheManager(
        BlockAllocator(blocks, block_size, caching=caching), "model", OffloadManager(host) if host else None
    )


class Eager(Speculation):
    """Drafts whenever there is anything to draft, paying or not."""

    def draft(
        self, drafts: Drafts, tokens: Sequence[int], room: int, batch: int, turns: DraftTurns | None = None
    ) -> list[int]:
        return drafts.draft(tokens, min(self.limit, room)) if room > 0 else []

    def rests(self, drafts: Drafts, tokens: Sequence[int], batch: int) -> bool:
        return False


def make_decoding(kv: KVCacheManager, *, drafts: int = 0) -> DecodeScheduler:
    limit = kv.allocator.num_blocks * kv.block_size
    return DecodeScheduler(kv, max_model_len=limit, speculation=Eager(drafts) if drafts else None)


def step_limits(kv: KVCacheManager, tokens: int, seqs: int, max_model_len: int | None) -> StepLimits:
    return StepLimits(
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=max_model_len or kv.allocator.num_blocks * kv.block_size,
        eos_token_ids=frozenset({EOS}),
    )


def make_engine(
    kv: KVCacheManager,
    schedulers: Sequence[Scheduler],
    *,
    tokens: int = 8,
    seqs: int = 4,
    max_model_len: int | None = None,
) -> tuple[Engine, ScriptedRunner]:
    runner = ScriptedRunner(kv.block_size)
    engine = Engine(
        runner,
        kv,
        schedulers,
        step_limits(kv, tokens, seqs, max_model_len),
        clock=lambda: 0.0,
    )
    return engine, runner
