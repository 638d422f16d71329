"""Whatever becomes of its drafts and its blocks, a model drafts what it would draft with nothing kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import DecodeScheduler
from kvcache.blocks.manager import KVCacheManager
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.engine.drafting import fill_in_drafts
from serving.engine.plan import Work
from serving.engine.proposed import NO_DRAFTS, PROMISED, Proposing
from serving.engine.sequence import SequenceState
from serving.forward.forward import EagerForward
from serving.grammar.grammars import GrammarState
from serving.loader.loading import LoadedModel, load
from serving.proposers.draft_model import DraftModelProposer
from serving.proposers.draws import DraftDraws
from serving.sampling.sampler import Sampler
from serving.sampling.torch_sampling import TorchSampling
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_decoding, make_kv
from tests.tiny import tiny_llama

BLOCK, BLOCKS, VOCAB, CHUNK = 4, 48, 384, 24


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_llama(tmp_path_factory.mktemp("draft") / "d", layers=2, hidden=32, heads=2, kv_heads=1), "float32")


def proposer_of(draft: LoadedModel, max_len: int = BLOCK * BLOCKS) -> DraftModelProposer:
    planes = DeviceKV(draft.spec.kv_layers("float32"), BLOCKS, BLOCK).planes
    for plane in (tensor for layer in planes for tensor in layer):
        plane.fill_(torch.nan)
    draws = DraftDraws(Sampler(TorchSampling()), ())
    forward = EagerForward(draft.model, planes)
    return DraftModelProposer(forward, draft.spec, draws, block_size=BLOCK, chunk=CHUNK, max_len=max_len)


@torch.inference_mode()
def from_nothing(draft: LoadedModel, tokens: list[int], count: int) -> list[int]:
    """The greedy continuation, every token computed anew."""
    found: list[int] = []
    for _ in range(count):
        known = [*tokens, *found]
        table = list(range(-(-len(known) // BLOCK)))
        planes = DeviceKV(draft.spec.kv_layers("float32"), len(table), BLOCK).planes
        batch = RaggedBatch.build(tokens=[known], starts=[0], block_tables=[table], block_size=BLOCK)
        found += EagerForward(draft.model, planes).greedy(batch, None).tolist()
    return found


class Texts:
    """Sequences of one worker whose tokens a test chooses; their KV counts as computed at once."""

    def __init__(self, draft: LoadedModel):
        self.draft = draft
        self.kv: KVCacheManager = make_kv(BLOCKS, BLOCK)
        self.by: DecodeScheduler = make_decoding(self.kv)
        self.proposer = proposer_of(draft)
        self.running: list[SequenceState] = []

    def open(self, prompt: list[int]) -> SequenceState:
        seq = make_sequence(self.kv, prompt, stays=True, max_tokens=100)
        self.kv.open(seq)
        seq.computed = len(seq.tokens) - 1
        self.kv.publish(seq)
        self.running.append(seq)
        return seq

    def propose(self, chosen: list[SequenceState], count: int) -> tuple[list[Work], Proposing]:
        work = [Work(seq, 1 + count, self.by, (PROMISED,) * count) for seq in chosen]
        for seq in chosen:
            while len(seq.blocks) * BLOCK < len(seq.tokens) + count:
                seq.blocks += self.kv.allocator.allocate(1)
            assert self.proposer.room(seq) >= count
        return work, fill_in_drafts(self.proposer, work)

    def advance(self, seq: SequenceState, tokens: list[int]) -> None:
        seq.tokens += tokens
        seq.computed = len(seq.tokens) - 1
        self.kv.grow(seq)
        self.kv.publish(seq)

    def end(self, seq: SequenceState) -> None:
        self.running.remove(seq)
        self.kv.release(seq)


PROMPTS = [[(7 * i + 3) % VOCAB for i in range(30)], [(7 * i + 3) % VOCAB for i in range(17)], [9] * 5]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_drafts_are_those_of_the_whole_text(draft: LoadedModel, data: st.DataObject) -> None:
    texts = Texts(draft)
    for _ in range(data.draw(st.integers(2, 12))):
        if len(texts.running) < 3 and data.draw(st.booleans()):
            prompt = data.draw(st.sampled_from(PROMPTS))
            texts.open(prompt + data.draw(st.lists(st.integers(0, 5), max_size=6)))
        chosen = [seq for seq in texts.running if data.draw(st.integers(0, 3))]
        count = data.draw(st.integers(1, 4))
        if not chosen:
            continue
        work, took = texts.propose(chosen, count)
        assert took.drafted == sum(len(item.draft) for item in work)
        for item in work:
            expected = from_nothing(draft, item.seq.tokens, count)
            assert list(item.draft) in ([], expected)
            right = data.draw(st.integers(0, count))
            texts.advance(item.seq, [*expected[:right], data.draw(st.integers(0, VOCAB - 1))])
        for seq in texts.running:
            if seq not in chosen:
                texts.advance(seq, data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2)))
        if data.draw(st.integers(0, 3)) == 0:
            texts.end(chosen[0])
    sequences = texts.running
    assert all(len(seq.proposed.blocks) <= len(seq.blocks) for seq in sequences if seq.proposed is not None)


def test_a_backlog_is_computed_over_several_steps(draft: LoadedModel) -> None:
    texts = Texts(draft)
    seq = texts.open(PROMPTS[0] * 2)
    assert texts.proposer.behind(seq) == 59
    steps = [texts.propose([seq], 2) for _ in range(4)]
    assert [took.caught_up for _, took in steps] == [CHUNK, CHUNK, 0, 0]
    assert [len(work[0].draft) for work, _ in steps] == [0, 0, 2, 2]
    assert steps[2][0][0].draft == tuple(from_nothing(draft, seq.tokens, 2))


def test_a_prefix_in_shared_blocks_is_not_computed_twice(draft: LoadedModel) -> None:
    texts = Texts(draft)
    first = texts.open(PROMPTS[0])
    for _ in range(2):
        texts.propose([first], 1)
    texts.end(first)
    again = texts.open([*PROMPTS[0], 1, 2])
    assert again.cached == 28 and texts.proposer.behind(again) == len(again.tokens) - 1 - 28
    (work,), _ = texts.propose([again], 3)
    assert work.draft == tuple(from_nothing(draft, again.tokens, 3))


def test_other_content_in_a_block_is_not_taken_for_the_old(draft: LoadedModel) -> None:
    texts = Texts(draft)
    first = texts.open([5] * (BLOCK * (BLOCKS - 1)))  # all blocks there are
    while texts.proposer.behind(first) > 2:
        texts.propose([first], 1)
    texts.end(first)
    texts.open([1] * 7)  # in blocks that were not full
    other = texts.open([6, *[5] * 30])
    assert set(other.blocks) < set(range(BLOCKS)) and texts.proposer.behind(other) == 30


def test_a_draft_ends_with_what_the_model_can_place(draft: LoadedModel) -> None:
    proposer = proposer_of(draft, max_len=12)
    kv = make_kv(BLOCKS, BLOCK)
    seq = make_sequence(kv, [1] * 10, stays=True)
    assert proposer.room(seq) == 2


def test_a_mistake_costs_drafts_and_nothing_else(draft: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    texts = Texts(draft)
    seq = texts.open(PROMPTS[2])
    (work,), _ = texts.propose([seq], 2)
    assert work.draft
    seq.blocks[0] = BLOCKS + 7  # a block that does not exist
    work = Work(seq, 3, texts.by, (PROMISED,) * 2)
    assert fill_in_drafts(texts.proposer, [work]) is NO_DRAFTS
    assert (work.count, work.draft) == (1, ()) and texts.proposer.room(seq) == 0
    assert "cannot draft for 1 sequences" in caplog.text


def test_a_model_without_numbers_is_asked_once(draft: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts would never be verified, so nothing else would tell that they bring nothing."""
    texts = Texts(draft)
    seq = texts.open(PROMPTS[2])
    monkeypatch.setattr(texts.proposer.forward, "greedy", lambda batch, tell: torch.full((1,), -1))
    (work,), took = texts.propose([seq], 2)
    assert (work.draft, took.drafted, texts.proposer.room(seq)) == ((), 0, 0)


def test_what_a_grammar_refuses_is_remembered(draft: LoadedModel) -> None:
    texts = Texts(draft)
    seq = texts.open(PROMPTS[2])
    seq.grammar = cast(GrammarState, SimpleNamespace(possible=lambda output, drafted: 1))
    (work,), _ = texts.propose([seq], 3)
    assert (len(work.draft), work.count, work.cut) == (1, 2, 2)
