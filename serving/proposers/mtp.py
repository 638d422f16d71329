"""The layer that predicts further tokens, as a proposer: it goes on from the hidden states of the model it belongs to.

It cannot compute what it has not seen the model compute. So its KV of a sequence begins with the first block whose
hidden states all came by here, or with the prompt where the blocks before are known from another sequence. It has KV of
a token once the next one is known, and lays it at the token's own place in the sequence's blocks.

Shapes: T tokens of a step, H hidden width, R sequences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.engine.plan import Work
from serving.engine.proposed import ProposerState, Proposing
from serving.engine.sequence import SequenceState
from serving.forward.forward import best_tokens
from serving.model.decoder import Decoder, Planes
from serving.model.mtp import MtpHead
from serving.proposers.draws import DraftDraws
from serving.proposers.known_blocks import KnownBlocks

MOST_WAITING = 64  # hidden states of a sequence that wait to be gone on from, where nothing is drafted


@dataclass(slots=True)
class MtpState(ProposerState):
    """`sure` tokens have KV of the layer's; of the `hidden` states after them the first is of token `sure`."""

    hidden: list[Tensor] = field(default_factory=list)  # [H] each


@dataclass(slots=True)
class _Predicting:
    """What a pass computes of one sequence: tokens t+1 from `start` + 1 on, and the hidden states [n, H] of t."""

    seq: SequenceState
    state: MtpState
    tokens: list[int]
    start: int
    hidden: Tensor


class MtpProposer:
    """`head` over `planes` with the worker's blocks, beside the decoder `main` whose steps `computed` is told of."""

    method = "mtp"

    def __init__(self, head: MtpHead, main: Decoder, planes: Planes, draws: DraftDraws, block_size: int):
        self.head = head
        self.main = main
        self.planes = planes
        self.draws = draws
        self.block_size = block_size
        self.device = planes[0].device
        self.known = KnownBlocks(block_size)

    def behind(self, seq: SequenceState) -> int:
        """Nothing that it could catch up on."""
        return 0

    def room(self, seq: SequenceState) -> int:
        state = seq.proposed
        able = isinstance(state, MtpState) and seq.offload is None and self._settled(seq, state)
        return seq.held_blocks * self.block_size - len(seq.tokens) if able else 0

    def _settled(self, seq: SequenceState, state: MtpState) -> bool:
        """True if all hidden states up to the last token but one are here; those of rejected drafts are dropped."""
        self.known.settle(seq, state)
        if state.sure < state.first or not state.hidden:
            return False
        del state.hidden[max(0, len(seq.tokens) - 1 - state.sure) :]
        return bool(state.hidden) and state.sure + len(state.hidden) == len(seq.tokens) - 1

    # ---- what the model computes -------------------------------------------------------------------------------

    @torch.inference_mode()
    def computed(self, work: Sequence[Work], starts: Sequence[int], hidden: Tensor) -> None:
        """The model has computed this work, the first token of each at this position: a row [H] for each new token."""
        row = 0
        full = []
        for item, start in zip(work, starts, strict=True):
            rows = hidden[row : row + item.count]
            row += item.count
            seq = item.seq
            if not seq.stays or seq.offload is not None or seq.request.pooling is not None or item.left:
                continue
            state = self._noted(seq, start, rows.clone())
            if state is not None and len(state.hidden) > MOST_WAITING:
                full.append((seq, state))
        waiting = [one for seq, state in full if (one := self._known(seq, state)) is not None]
        if waiting:
            self._compute(waiting)

    def _noted(self, seq: SequenceState, start: int, rows: Tensor) -> MtpState | None:
        """Add the hidden states of the tokens from `start` on to what waits; begin anew where some lack."""
        state = seq.proposed
        if state is not None and not isinstance(state, MtpState):
            return None  # a mistake has been made
        if state is not None:
            self.known.settle(seq, state)
        if state is None or not state.sure <= start <= state.sure + len(state.hidden):
            state = seq.proposed = self._begun(seq, start)
        skipped = max(0, state.sure - start)  # before its first block
        del state.hidden[max(0, start - state.sure) :]
        state.hidden += rows[skipped:].unbind()
        return state

    def _begun(self, seq: SequenceState, start: int) -> MtpState:
        """The state of a sequence whose first hidden state here is that of the token at `start`."""
        state, size = MtpState(), self.block_size
        if start <= self.known.leading(seq):
            self.known.written(seq, state, start)
            state.named = start // size
        else:
            state.first = state.sure = -(-start // size) * size
            state.blocks = seq.blocks[: state.first // size]
        return state

    def _known(self, seq: SequenceState, state: MtpState) -> _Predicting | None:
        """What can be computed of the waiting states: where the next token is known."""
        count = min(len(state.hidden), len(seq.tokens) - 1 - state.sure)
        if count < 1:
            return None
        tokens = seq.tokens[state.sure + 1 : state.sure + 1 + count]
        return _Predicting(seq, state, tokens, state.sure, torch.stack(state.hidden[:count]))

    # ---- drafts ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, work: Sequence[Work]) -> Proposing:
        began = time.perf_counter()
        passing = []
        drafts: dict[int, list[int]] = {}
        for item in work:
            state = item.seq.proposed
            assert isinstance(state, MtpState), "promised without a state"
            one = self._known(item.seq, state)
            assert one is not None, "promised without a hidden state"
            drafts[id(item)] = []
            passing.append((item, one))
        while passing:
            last = self._compute([one for _, one in passing], sure=not drafts[id(passing[0][0])])
            passing = self._drafted(passing, drafts, last)
        for item in work:
            item.fill_in(drafts[id(item)])
        return Proposing(time.perf_counter() - began, sum(map(len, drafts.values())))

    def _drafted(
        self, passing: list[tuple[Work, _Predicting]], drafts: dict[int, list[int]], last: Tensor
    ) -> list[tuple[Work, _Predicting]]:
        """Draw a token after each one's last; what the next pass computes."""
        drawn = self.draws.next(
            [item for item, _ in passing],
            [drafts[id(item)] for item, _ in passing],
            lambda: best_tokens(self.head.logits(self.main, last)),
            lambda: self.head.logits(self.main, last),
        )
        going = []
        for (item, one), token, hidden in zip(passing, drawn, last, strict=True):
            draft = drafts[id(item)]
            if token < 0:
                if not draft:  # or it would be asked again with each step, for nothing
                    item.seq.proposed = ProposerState(failed=True)
                continue
            draft.append(token)
            if len(draft) < len(item.draft):
                start = one.start + len(one.tokens)
                going.append((item, _Predicting(one.seq, one.state, [token], start, hidden[None])))
        return going

    def _compute(self, passing: Sequence[_Predicting], *, sure: bool = True) -> Tensor:
        """Each one's last hidden state [R, H] after the layer. `sure`: of tokens that the text has."""
        size = self.block_size
        for one in passing:
            self.known.begin(one.seq, one.state, one.start + len(one.tokens))
        batch = RaggedBatch.build(
            tokens=[one.tokens for one in passing],
            starts=[one.start - one.state.first for one in passing],
            block_tables=[one.seq.blocks[one.state.first // size :] for one in passing],
            block_size=size,
            device=self.device,
        )
        given = torch.cat([one.hidden for one in passing])
        out: Tensor = self.head(self.main, batch, given, self.planes)
        for one in passing if sure else ():
            del one.state.hidden[: len(one.tokens)]
            self.known.written(one.seq, one.state, one.start + len(one.tokens))
        return out[batch.logits_rows]
