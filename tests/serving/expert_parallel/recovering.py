"""Members of a group that decode without end, compare each step with one process, and lose each other.

Every member has a prompt of its own, decodes it again and again, and says when an epoch has brought its first step.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import Store

from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import ExchangeShape, ExpertExchange, RankLost, Received, RoundTrips, Rows
from serving.expert_parallel.layer import exchange_shape, hold_experts
from serving.expert_parallel.micro_batches import overlapped_step
from serving.expert_parallel.recovery import DeclaredLost, ExpertGroup, ExpertsLost, Limits, RecoveryCounts
from serving.loader.experts import CheckpointExperts
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.model.hf_config import spec_from_hf
from serving.quantization.folder import stored_tensors
from tests.serving.expert_parallel.groups import join
from tests.serving.expert_parallel.ranks import open_descriptors
from tests.serving.expert_parallel.served import MOST_ROWS, NEW_TOKENS, placements
from tests.serving.model.paged import PagedRun

VOCAB = 96
ENDINGS = (DeclaredLost, ExpertsLost, StoreUnavailable, RankLost)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A group, and what befalls some of its members."""

    folder: Path
    kind: str = "shared_memory"
    ranks: int = 3
    spare: int = 0  # slots of a rank beyond what all experts need
    most_slots: int = 64
    deadline: float = 60.0
    meeting: float = 20.0  # for an exchange to come about
    loads: bool = True
    most_steps: int = 1_000_000_000  # then a member leaves
    store: float = 5.0
    loading: float = 20.0
    how: signal.Signals = signal.SIGKILL  # what a member sends itself
    dies_loading: int | None = None  # the member that does so when it is to load an expert
    dies_joining: tuple[int, int] | None = None  # (member, ranks): does so when it meets so many
    misses: tuple[int, int] | None = None  # (member, combine): takes rank 2 for lost after so many combines
    halved: bool = False  # steps are computed in two halves


@dataclass(frozen=True)
class Seen:
    """A member after a step."""

    epoch: int
    members: list[int]
    steps: int
    counts: RecoveryCounts
    descriptors: Counter[str]  # how many of each kind are open


@dataclass(frozen=True)
class Ended:
    """What a member has raised."""

    error: str
    text: str


def prompt_of(member: int) -> list[int]:
    chance = random.Random(member)
    return [chance.randrange(VOCAB) for _ in range(3 + member)]


def write_mixture(folder: Path) -> Path:
    """A small Mixtral of random weights in `folder`."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    model = Decoder(spec_from_hf(config, None))
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    folder.mkdir()
    save_file(stored_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Text:
    """One prompt and what follows it, step by step; the last logits are kept."""

    def __init__(self, model: Decoder, prompt: list[int]) -> None:
        self._run = PagedRun(model, [prompt + [0] * NEW_TOKENS], block_size=4)
        self._count = len(prompt)

    def compute(self) -> Tensor:
        """The next step's logits. Nothing but KV is changed until `taken`."""
        self._run.step({0: self._count})
        return self._run.logits[0][-1]

    def taken(self, logits: Tensor) -> None:
        done = self._run.done[0]
        if done < len(self._run.sequences[0]):
            self._run.sequences[0][done] = int(logits[-1].argmax())
        self._count = 1


def alone(folder: Path, prompt: list[int]) -> list[Tensor]:
    """The logits of each step by one process that has the whole model."""
    text, found = Text(load(folder, "float32").model, prompt), []
    for _ in range(NEW_TOKENS):
        found.append(text.compute())
        text.taken(found[-1])
    return found


class Missing(RoundTrips):
    """An exchange that takes rank 2 for lost after so many combines."""

    def __init__(self, exchange: ExpertExchange, combines: int) -> None:
        self._exchange, self._left = exchange, combines
        self.shape, self.rank = exchange.shape, exchange.rank

    @property
    def traffic(self) -> Any:
        return self._exchange.traffic

    @property
    def agreed(self) -> int:
        return self._exchange.agreed

    def announce(self, number: int) -> None:
        self._exchange.announce(number)

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:
        self._exchange.begin_dispatch(rows, physical_TK)

    def finish_dispatch(self) -> Received:
        return self._exchange.finish_dispatch()

    def begin_combine(self, results_NH: Tensor) -> None:
        self._exchange.begin_combine(results_NH)

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        out = self._exchange.finish_combine(weights_TK)
        self._left -= 1
        if not self._left:
            raise RankLost(2, "the test says so")
        return out

    def close(self) -> None:
        self._exchange.close()


def enter(case: Case, member: int, store: Store) -> tuple[Decoder, ExpertGroup]:
    with torch.device("meta"):
        spread = placements(Decoder(load(case.folder, "float32").spec), case.ranks, case.spare)
    model = load(case.folder, "float32", layout=lambda built: hold_experts(built, spread, member)).model
    read = CheckpointExperts(case.folder, "float32")
    missed = [case.misses[1]] if case.misses is not None and case.misses[0] == member else []

    def loaded(layer: int, expert: int) -> torch.nn.Module:
        if case.dies_loading == member:
            os.kill(os.getpid(), case.how)
        return read(layer, expert)

    def joined(shape: ExchangeShape, rank: int, place: Store) -> ExpertExchange:
        if case.dies_joining == (member, shape.ranks):
            os.kill(os.getpid(), case.how)
        exchange = join(case.kind, shape, rank, place, case.deadline, meeting=case.meeting)
        if missed:
            return Missing(exchange, missed.pop())
        return exchange

    group = ExpertGroup.enter(
        model,
        tuple(spread),
        member,
        store,
        shape=exchange_shape(model, spread[0], MOST_ROWS),
        join=joined,
        limits=Limits(deadline=case.deadline, loading=case.loading, store=case.store, most_slots=case.most_slots),
        load=loaded if case.loads else None,
    )
    return model, group


def decode(member: int, store: Store, answers: Connection, case: Case) -> Ended | RecoveryCounts:
    """Sends what is `Seen` after the first step of every epoch, and when asked. Every step has one process's bits."""
    wanted = alone(case.folder, prompt_of(member))
    try:
        model, group = enter(case, member, store)
        _decode(model, group, case, prompt_of(member), wanted, answers)
    except ENDINGS as error:
        return Ended(type(error).__name__, str(error))
    group.close()
    return group.counts


def _decode(
    model: Decoder, group: ExpertGroup, case: Case, prompt: list[int], wanted: list[Tensor], answers: Connection
) -> None:
    said, idle = -1, None
    if case.halved:
        model.forward = lambda batch, kv, _: overlapped_step(model, batch, kv)  # type: ignore[method-assign,assignment]
        idle = partial(overlapped_step, model, None, ())
    while group.steps < case.most_steps:
        text = Text(model, prompt)
        for expected in wanted:
            logits = group.step(text.compute, idle)
            assert torch.equal(logits, expected), f"step {group.steps} of epoch {group.epoch.number}"
            text.taken(logits)
            asked = answers.poll()
            if asked:
                answers.recv()
            if asked or group.epoch.number > said:
                said = group.epoch.number
                kinds = Counter(one.split("[")[0] for one in open_descriptors())
                answers.send(Seen(said, group.epoch.order, group.steps, group.counts, kinds))
