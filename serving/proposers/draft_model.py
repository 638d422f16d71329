"""A model of its own that drafts: smaller than the one it drafts for, with the same vocabulary.

It keeps KV in planes of its own over the worker's blocks: a sequence's blocks hold both. What it has no KV of, because
another worker computed it or nothing was drafted meanwhile, it computes before its next draft, so many tokens a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from serving.batch.ragged import RaggedBatch
from serving.engine.plan import Work
from serving.engine.proposed import CLOSE, ProposerState, Proposing
from serving.engine.sequence import SequenceState
from serving.forward.forward import Forward
from serving.model.spec import ModelSpec
from serving.proposers.draws import DraftDraws
from serving.proposers.known_blocks import KnownBlocks


@dataclass(slots=True)
class _Drafting:
    """One sequence of a step: the draft so far, and what its next pass computes."""

    item: Work
    state: ProposerState
    tokens: list[int]  # of the next pass
    start: int  # position of the first of them
    long_rope: bool
    draft: list[int] = field(default_factory=list)


class DraftModelProposer:
    """`forward` computes the draft model over planes with the worker's blocks, of sequences up to `max_len` tokens.

    `chunk` tokens of backlog are computed in a step at most.
    """

    method = "draft_model"

    def __init__(
        self,
        forward: Forward,
        spec: ModelSpec,
        draws: DraftDraws,
        *,
        block_size: int,
        chunk: int,
        max_len: int,
        device: torch.device | str = "cpu",
    ):
        self.forward = forward
        self.spec = spec
        self.draws = draws
        self.block_size = block_size
        self.chunk = chunk
        self.max_len = max_len
        self.device = device
        self.known = KnownBlocks(block_size)

    def behind(self, seq: SequenceState) -> int:
        state = self._state(seq)
        return 0 if state.failed else len(seq.tokens) - 1 - state.sure

    def room(self, seq: SequenceState) -> int:
        if seq.offload is not None or self._state(seq).failed:
            return 0
        return max(0, self.max_len - len(seq.tokens))

    @torch.inference_mode()
    def propose(self, work: Sequence[Work]) -> Proposing:
        began = time.perf_counter()
        caught_up, ready = self._catch_up(work)
        caught = time.perf_counter()
        passing = ready
        while passing:
            passing = self._pass(passing)
        for one in ready:
            one.item.fill_in(one.draft)
            one.state.guessed = one.draft[:-1]
        drafted = sum(len(one.draft) for one in ready)
        return Proposing(time.perf_counter() - caught, drafted, caught - began if caught_up else 0.0, caught_up)

    def _state(self, seq: SequenceState) -> ProposerState:
        """What there is of the sequence, brought up to the tokens and blocks it has now."""
        state = seq.proposed
        if state is None:
            state = seq.proposed = ProposerState()
            self.known.written(seq, state, min(self.known.leading(seq), len(seq.tokens) - 1))
            state.named = len(state.blocks)
        self.known.settle(seq, state)
        if state.guessed:
            came = seq.tokens[state.sure : state.sure + len(state.guessed)]
            right = next((i for i, (a, b) in enumerate(zip(state.guessed, came, strict=False)) if a != b), len(came))
            state.guessed = []
            self.known.written(seq, state, state.sure + right)
        state.sure = min(state.sure, len(seq.tokens) - 1)
        return state

    def _catch_up(self, work: Sequence[Work]) -> tuple[int, list[_Drafting]]:
        """Compute backlogs, as far as a step may: how many tokens of them, and the sequences that can draft now."""
        left, backlogs, ready = self.chunk, list[_Drafting](), list[_Drafting]()
        for item in work:
            seq, state = item.seq, self._state(item.seq)
            behind = len(seq.tokens) - 1 - state.sure
            count = 0 if behind <= CLOSE else min(behind, left)
            left -= count
            start = state.sure
            long_rope = self.spec.rope_is_long(seq.prompt_len + seq.request.sampling.max_tokens)
            if count:
                backlogs.append(_Drafting(item, state, seq.tokens[start : start + count], start, long_rope))
                start += count
            if behind <= CLOSE or count == behind:
                ready.append(_Drafting(item, state, seq.tokens[start:], start, long_rope))
            else:
                item.fill_in(())
        if backlogs:
            self.forward.greedy(self._batch(backlogs, rows=()), None)
            self._written(backlogs)
        return self.chunk - left, ready

    def _pass(self, passing: list[_Drafting]) -> list[_Drafting]:
        """Draft one more token for each; those that are to have yet another."""
        batch = self._batch(passing)
        drawn = self.draws.next(
            [one.item for one in passing],
            [one.draft for one in passing],
            lambda: self.forward.greedy(batch, None),
            lambda: self.forward.logits(batch, None),
        )
        self._written([one for one in passing if not one.draft])
        going = []
        for one, token in zip(passing, drawn, strict=True):
            if token < 0:
                one.state.failed |= not one.draft  # or it would be asked again with each step, for nothing
                continue
            one.draft.append(token)
            one.start, one.tokens = one.start + len(one.tokens), [token]
            if len(one.draft) < len(one.item.draft):
                going.append(one)
        return going

    def _batch(self, passing: Sequence[_Drafting], rows: Sequence[int] | None = None) -> RaggedBatch:
        for one in passing:
            self.known.begin(one.item.seq, one.state, one.start + len(one.tokens))
        return RaggedBatch.build(
            tokens=[one.tokens for one in passing],
            starts=[one.start for one in passing],
            block_tables=[one.item.seq.blocks for one in passing],
            block_size=self.block_size,
            logits_rows=rows,
            long_rope=[one.long_rope for one in passing],
            device=self.device,
        )

    def _written(self, passing: Sequence[_Drafting]) -> None:
        for one in passing:
            self.known.written(one.item.seq, one.state, one.start + len(one.tokens))
