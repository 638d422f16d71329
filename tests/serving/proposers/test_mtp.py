"""The layer that predicts further tokens drafts what it would from all the hidden states it has seen, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import DecodeScheduler
from kvcache.blocks.manager import KVCacheManager
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.engine.drafting import fill_in_drafts, surely
from serving.engine.plan import Work
from serving.engine.proposed import PROMISED
from serving.engine.sequence import SequenceState
from serving.forward.watched import WatchedForward
from serving.loader.loading import LoadedModel, load
from serving.loader.mtp import load_mtp
from serving.model.mtp import MtpHead
from serving.proposers.draws import DraftDraws
from serving.proposers.mtp import MOST_WAITING, MtpProposer, MtpState
from serving.sampling.sampler import Sampler
from serving.sampling.torch_sampling import TorchSampling
from tests.fakes.sequences import make_sequence
from tests.mtp_folder import deepseek_with_mtp
from tests.prefill.scripted import make_decoding, make_kv
from tests.serving.model.oracle import VOCAB

BLOCK, BLOCKS = 4, 64
Model = tuple[LoadedModel, MtpHead]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    loaded = load(deepseek_with_mtp(tmp_path_factory.mktemp("mtp")), "float32")
    return loaded, load_mtp(loaded)


@torch.inference_mode()
def from_nothing(model: Model, tokens: Sequence[int], first: int, count: int) -> list[int]:
    """The layer's drafts after `tokens`, from the hidden states of the tokens from `first` on, computed anew."""
    loaded, head = model
    main, size = loaded.model, len(tokens) + count
    planes = DeviceKV(head.spec.kv_layers("float32"), 1, size).planes
    batch = RaggedBatch.build(tokens=[tokens], starts=[0], block_tables=[[0]], block_size=size)
    hidden = main(batch, planes)[first:-1]
    new, start, found = list(tokens[first + 1 :]), 0, list[int]()
    while len(found) < count:
        batch = RaggedBatch.build(tokens=[new], starts=[start], block_tables=[[0]], block_size=size)
        hidden = head(main, batch, hidden, planes[-1])[-1:]
        start += len(new)
        new = head.logits(main, hidden).argmax(dim=-1).tolist()
        found += new
    return found


class Stepped:
    """A worker's model and its layer, stepped by hand over sequences whose tokens a test chooses."""

    def __init__(self, model: Model):
        loaded, head = model
        self.kv: KVCacheManager = make_kv(BLOCKS, BLOCK)
        self.by: DecodeScheduler = make_decoding(self.kv)
        specs = head.spec.kv_layers("float32")
        planes = DeviceKV(specs, BLOCKS, BLOCK).planes
        for plane in planes[-1]:
            plane.fill_(torch.nan)
        self.forward = WatchedForward(loaded.model, planes[:-1])
        draws = DraftDraws(Sampler(TorchSampling()), ())
        self.proposer = MtpProposer(head, loaded.model, planes[-1], draws, BLOCK)

    def open(self, prompt: list[int]) -> SequenceState:
        seq = make_sequence(self.kv, prompt, stays=True, max_tokens=200)
        self.kv.open(seq)
        return seq

    @torch.inference_mode()
    def step(self, seqs: list[SequenceState], counts: list[int], drafts: list[list[int]], *, seen: bool = True) -> None:
        """Compute so many tokens of each, and its draft; without `seen`, as another worker would."""
        work = [
            Work(seq, count + len(draft), self.by, tuple(draft))
            for seq, count, draft in zip(seqs, counts, drafts, strict=True)
        ]
        for item in work:
            self.hold(item.seq, len(item.draft))
        starts = [seq.computed for seq in seqs]
        batch = RaggedBatch.build(
            tokens=[item.tokens for item in work],
            starts=starts,
            block_tables=[seq.blocks for seq in seqs],
            block_size=BLOCK,
        )
        self.forward.greedy(batch, None)
        if seen:
            assert self.forward.last is not None
            self.proposer.computed(work, starts, self.forward.last)
        for seq, count in zip(seqs, counts, strict=True):
            seq.computed += count

    def hold(self, seq: SequenceState, more: int) -> None:
        while len(seq.blocks) * BLOCK < len(seq.tokens) + more:
            seq.blocks += self.kv.allocator.allocate(1)

    def advance(self, seq: SequenceState, right: list[int], drawn: int) -> None:
        seq.tokens += [*right, drawn]
        seq.computed = len(seq.tokens) - 1
        self.kv.publish(seq)

    def propose(self, seqs: list[SequenceState], count: int) -> list[list[int]]:
        for seq in seqs:
            self.hold(seq, count)
        able = [seq for seq in seqs if self.proposer.room(seq) >= count]
        work = {id(seq): Work(seq, 1 + count, self.by, (PROMISED,) * count) for seq in able}
        fill_in_drafts(self.proposer, list(work.values()))
        return [list(work[id(seq)].draft) if id(seq) in work else [] for seq in seqs]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_drafts_are_those_of_all_that_was_seen(model: Model, data: st.DataObject) -> None:
    stepped = Stepped(model)
    prompts = [[(5 * i + n) % VOCAB for i in range(data.draw(st.integers(2, 14)))] for n in range(2)]
    seqs = [stepped.open(prompt) for prompt in prompts]
    begun = []
    for seq in seqs:
        # A handoff: what another worker has computed was not seen here.
        elsewhere = data.draw(st.integers(0, len(seq.tokens) - 1))
        if elsewhere:
            stepped.step([seq], [elsewhere], [[]], seen=False)
        begun.append(-(-elsewhere // BLOCK) * BLOCK)
        while seq.uncomputed:
            stepped.step([seq], [data.draw(st.integers(1, seq.uncomputed))], [[]])
        stepped.advance(seq, [], data.draw(st.integers(0, VOCAB - 1)))
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(1, 3))
        drafts = stepped.propose(seqs, count) if data.draw(st.booleans()) else [[] for _ in seqs]
        for seq, first, draft in zip(seqs, begun, drafts, strict=True):
            if draft:
                assert draft == from_nothing(model, seq.tokens, first, count)
            elif any(drafts):
                assert len(seq.tokens) - 1 <= first, "it has seen enough to draft"
        stepped.step(seqs, [1] * len(seqs), drafts)
        for seq, draft in zip(seqs, drafts, strict=True):
            right = data.draw(st.integers(0, len(draft)))
            stepped.advance(seq, draft[:right], data.draw(st.integers(0, VOCAB - 1)))


def test_hidden_states_do_not_pile_up_where_nothing_is_drafted(model: Model) -> None:
    stepped = Stepped(model)
    seq = stepped.open([3] * 90)
    stepped.step([seq], [50], [[]])
    stepped.step([seq], [40], [[]])
    state = seq.proposed
    assert isinstance(state, MtpState) and (state.sure, len(state.hidden)) == (89, 1)
    stepped.advance(seq, [], 1)
    for _ in range(MOST_WAITING + 5):
        stepped.step([seq], [1], [[]])
        stepped.advance(seq, [], 2)
        assert len(state.hidden) <= MOST_WAITING
    assert stepped.propose([seq], 2) == [from_nothing(model, seq.tokens, 0, 2)]


def test_a_prefix_computed_for_another_sequence_is_known(model: Model) -> None:
    stepped = Stepped(model)
    prompt = [(3 * i) % VOCAB for i in range(80)]
    first = stepped.open(prompt)
    stepped.step([first], [80], [[]])
    stepped.advance(first, [], 7)
    stepped.propose([first], 1)
    again = stepped.open([*prompt, 7, 8, 9])
    assert again.computed == 80
    stepped.step([again], [3], [[]])
    stepped.advance(again, [], 11)
    assert stepped.propose([again], 3) == [from_nothing(model, again.tokens, 0, 3)]


def test_a_gap_begins_anew_with_the_next_block(model: Model) -> None:
    stepped = Stepped(model)
    seq = stepped.open([1] * 9)
    stepped.step([seq], [5], [[]])
    stepped.step([seq], [1], [[]], seen=False)
    stepped.step([seq], [3], [[]])
    stepped.advance(seq, [], 4)
    assert stepped.propose([seq], 2) == [from_nothing(model, seq.tokens, 8, 2)]


def test_a_mistake_over_hidden_states_costs_drafts_alone(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    stepped = Stepped(model)
    seq = stepped.open([1] * 9)

    def computed(work: Sequence[Work], starts: Sequence[int]) -> None:
        raise RuntimeError("no memory")

    surely(computed)([Work(seq, 9, stepped.by)], [0])
    assert "go on without drafts" in caplog.text
    stepped.step([seq], [9], [[]])
    stepped.advance(seq, [], 4)
    assert stepped.propose([seq], 2) == [[]]


def test_a_layer_without_numbers_is_asked_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Stepped(model)
    seq = stepped.open([1] * 9)
    stepped.step([seq], [9], [[]])
    stepped.advance(seq, [], 4)
    monkeypatch.setattr(
        stepped.proposer.head, "logits", lambda main, hidden: torch.full((len(hidden), VOCAB), torch.nan)
    )
    assert stepped.propose([seq], 2) == [[]]
    stepped.step([seq], [1], [[]])
    stepped.advance(seq, [], 4)
    stepped.hold(seq, 2)
    assert stepped.proposer.room(seq) == 0
