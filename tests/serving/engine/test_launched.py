"""Steps launched on a real model: their tokens go on into the next step's batch, and the texts are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode.scheduler import DecodeScheduler
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.memory.device import DeviceKV
from prefill.scheduler import PrefillScheduler
from serving.batch.ragged import RaggedBatch
from serving.engine.engine import Engine, StepLimits
from serving.engine.launched import LaunchedStep
from serving.engine.overlap import OverlapEngine
from serving.engine.plan import Work
from serving.engine.runner import ModelRunner
from serving.engine.sequence import SequenceState
from serving.forward.forward import EagerForward
from serving.loader.loading import LoadedModel, load
from serving.messages import LeaseOrder, Request, SamplingParams
from serving.model.spec import ModelSpec
from serving.sampling.sampler import (
    ALL_MASKED,
    NOT_NUMBERS,
    REASONS,
    Sampled,
    Sampler,
    SampleRow,
    SamplingBackend,
    SamplingFailed,
)
from serving.sampling.torch_sampling import TorchSampling
from tests.fakes.sequences import lease_id, make_sequence
from tests.prefill.scripted import make_decoding, make_kv
from tests.tiny import tiny_llama

BY = make_decoding(make_kv(1, 1))
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def launched(tokens: Tensor) -> LaunchedStep:
    return LaunchedStep([Work(make_sequence(None, [1]), 1, BY) for _ in tokens], tokens, 1.0, 3.0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([0, 1, 2], [10, 11, 12]),
        ([2, 0], [12, 10]),
        ([None, 1, None, 0], [90, 11, 92, 10]),
        ([2, 1, 0, None], [12, 11, 10, 93]),
        ([None], [90]),
    ],
)
def test_drawn_tokens_take_their_places_in_the_next_batch(rows: list[int | None], expected: list[int]) -> None:
    known = torch.arange(90, 90 + len(rows))
    assert launched(torch.tensor([10, 11, 12])).followed(known, rows).tolist() == expected


def test_scores_that_are_no_numbers_fail_their_row_and_name_a_token_all_the_same() -> None:
    step = launched(torch.tensor([NOT_NUMBERS, 4, ALL_MASKED]))
    assert step.followed(torch.zeros(3, dtype=torch.int64), [0, 1, 2]).tolist() == [0, 4, 0]
    failed, masked = SamplingFailed(REASONS[NOT_NUMBERS]), SamplingFailed(REASONS[ALL_MASKED])
    assert step.collect().drawn == [[failed], [Sampled(4)], [masked]]


def test_tokens_outlive_the_memory_they_came_in() -> None:
    tokens = torch.tensor([7, 8])
    step = launched(tokens)
    tokens.zero_()
    assert step.followed(torch.zeros(2, dtype=torch.int64), [0, 1]).tolist() == [7, 8]
    result = step.collect()
    assert result.drawn == [[Sampled(7)], [Sampled(8)]] and result.times.batch == 2.0


def sampling(**fields: object) -> SamplingParams:
    return replace(SamplingParams(max_tokens=9, temperature=0.0), **fields)  # type: ignore[arg-type]


def test_what_overlaps_needs_neither_earlier_tokens_nor_the_hosts_attention() -> None:
    def overlappable(params: SamplingParams, prompt_logprobs: int | None = None) -> bool:
        request = Request(request_id="r", prompt=(1,), sampling=params, prompt_logprobs=prompt_logprobs)
        return ModelRunner.can_overlap(object.__new__(ModelRunner), sequence(request))

    for fields in OVERLAPPABLE:
        assert overlappable(sampling(**fields)), fields
    for fields in NOT_OVERLAPPABLE:
        assert not overlappable(sampling(**fields)), fields
    assert not overlappable(sampling(), prompt_logprobs=0)


OVERLAPPABLE: list[dict[str, object]] = [
    {},
    {"top_p": 0.5},
    {"temperature": 0.8, "seed": 5},
    {"min_tokens": 6},
    {"logit_bias": ((30, 4.0), (31, 4.0))},
    {"temperature": 1.2, "seed": 9, "min_tokens": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 9},
]
NOT_OVERLAPPABLE: list[dict[str, object]] = [
    {"logprobs": 1},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
]


def sequence(request: Request) -> SequenceState:
    return SequenceState(LeaseOrder(lease=lease_id(), request=request), root=b"", stays=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For matrices this small, handing work to a second thread costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tiny_llama(tmp_path_factory.mktemp("tiny"), layers=2)
    return load(path, "float32", request.param)


class NotingSelection(TorchSampling):
    """Notes of each draw where it is and whether stop tokens are out; draws on the host, as other backends do."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[int, bool]] = []

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        self.draws += [(row.position, row.stops_masked) for row in rows]
        return super().sample(logits, rows)


def served(
    model: LoadedModel,
    arrivals: Sequence[tuple[int, Request]],
    kind: type[Engine],
    selection: SamplingBackend | None = None,
) -> tuple[Engine, list[object]]:
    """Serve requests that arrive at a step each; for every request what came out, in order."""
    blocks, size = 150, 4
    device = model.model.embed.weight.device
    device_kv = DeviceKV(model.spec.kv_layers(model.dtype), blocks, size, device)
    kv = KVCacheManager(BlockAllocator(blocks, size), "model")
    decode = DecodeScheduler(kv, max_model_len=100)
    prefill = PrefillScheduler(kv, then=decode.add)
    engine = kind(
        ModelRunner(
            EagerForward(model.model, device_kv.planes),
            model.spec,
            size,
            device,
            sampler=Sampler(selection or TorchSampling()),
        ),
        kv,
        [decode, prefill],
        StepLimits(
            max_num_batched_tokens=24,
            max_num_seqs=8,
            max_model_len=100,
            eos_token_ids=frozenset(model.spec.eos_token_ids),
        ),
    )
    found: dict[str, list[object]] = {}
    left = list(arrivals)
    for number in range(1000):
        while left and left[0][0] <= number:
            prefill.add(sequence(left.pop(0)[1]))
        outputs = engine.step()
        if outputs is None and not left:
            break
        for output in outputs or []:
            assert output.delta is not None
            told = found.setdefault(output.seq.request.request_id, [])
            told.append((output.delta.index, output.delta.tokens, output.delta.finish))
    assert kv.allocator.held == 0 and engine.flying == []
    return engine, [found[request.request_id] for _, request in arrivals]


def some_requests(choice: random.Random, kinds: Sequence[dict[str, object]]) -> list[tuple[int, Request]]:
    """Ten prompts that arrive over 40 steps; some of them stop soon."""
    requests = []
    for number in range(10):
        prompt = tuple(choice.choices(range(3, 300), k=choice.randrange(1, 30)))
        stops = tuple(choice.sample(range(3, 380), k=choice.choice((0, 40))))
        params = sampling(
            max_tokens=choice.randrange(1, 30), stop_token_ids=stops, ignore_eos=True, **choice.choice(kinds)
        )
        requests.append((choice.randrange(40), Request(request_id=str(number), prompt=prompt, sampling=params)))
    return sorted(requests, key=lambda arrival: arrival[0])


GREEDY: list[dict[str, object]] = [{}]
MIXED = [*OVERLAPPABLE, *OVERLAPPABLE, *NOT_OVERLAPPABLE]


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [(0, GREEDY), (1, GREEDY), (2, OVERLAPPABLE), (3, OVERLAPPABLE), (4, OVERLAPPABLE), (5, MIXED), (6, MIXED)],
)
def test_texts_are_the_same(model: LoadedModel, seed: int, kinds: list[dict[str, object]]) -> None:
    arrivals = some_requests(random.Random(seed), kinds)
    _, expected = served(model, arrivals, Engine)
    engine, found = served(model, arrivals, OverlapEngine)
    assert found == expected
    assert isinstance(engine, OverlapEngine) and engine.ahead > (0 if kinds is MIXED else 10)


def test_every_token_is_drawn_as_it_would_have_been(model: LoadedModel) -> None:
    """With the seed of its position, and with stop tokens out for as long."""
    params = sampling(temperature=0.9, seed=3, min_tokens=4, max_tokens=8, ignore_eos=True)
    arrivals = [(0, Request(request_id="r", prompt=(5, 6, 7), sampling=params))]
    noted = []
    for kind in (Engine, OverlapEngine):
        selection = NotingSelection()
        served(model, arrivals, kind, selection)
        noted.append(selection.draws)
    assert noted[0] == noted[1] == [(3 + n, n < 4) for n in range(8)]


SPEC = ModelSpec(
    architecture="llama",
    vocab_size=50,
    hidden=8,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=8,
    intermediate=8,
    max_position=100,
    norm_eps=1e-5,
)


class Table:
    """Scores that follow from a token alone, on the device."""

    form = "table"

    def __init__(self, spec: ModelSpec, device: str):
        torch.manual_seed(0)
        self.scores = torch.randn(spec.vocab_size, spec.vocab_size, device=device)

    def logits(self, batch: RaggedBatch, layer_done: object) -> Tensor:
        return self.scores.index_select(0, batch.tokens)

    def greedy(self, batch: RaggedBatch, layer_done: object) -> Tensor:
        return self.logits(batch, layer_done).argmax(-1)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7}, {"min_tokens": 9, "logit_bias": ((3, 1.0),)}])
def test_a_chain_of_launches_waits_for_nothing_and_ends_where_single_steps_do(
    device: str, fields: dict[str, object]
) -> None:
    """The second step has the first's sequences in another order, and one that has just come."""
    forward = Table(SPEC, device)
    runner = ModelRunner(forward, SPEC, 4, device)
    sequences = [sequence(Request(request_id="r", prompt=(n, 5), sampling=sampling(**fields))) for n in range(3)]
    for n, seq in enumerate(sequences):
        seq.blocks, seq.computed = [n], 2
        seq.tokens.append(7 + n)
    first, second = (
        [Work(sequences[n], 1, BY) for n in (0, 1)],
        [Work(sequences[n], 1, BY) for n in (1, 2, 0)],
    )
    runner.launch(second, None).collect()  # whatever is set up once
    with waiting_is_an_error() if device == "cuda" else nullcontext():
        one = runner.launch(first, None)
        two = runner.launch(second, one)
    found = one.collect().drawn, two.collect().drawn
    expected_one = runner.run(first, None).drawn
    for work, [drawn] in zip(first, expected_one, strict=True):
        assert isinstance(drawn, Sampled)
        work.seq.tokens.append(drawn.token)
        work.seq.computed += 1
    assert found == (expected_one, runner.run(second, None).drawn)
