"""A host of ranks while a leader on another host has it in its group: its ranks, and the rows that come for them.

Its ranks hold experts and have no sequences; this process is one of them to the exchange, and brings them the rows. It
knows no epochs but the present one: the leader decides.

Shapes: L layers, S slots of the host.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import (
    SCALE_BYTES,
    ExchangeShape,
    ExchangeUnavailable,
    RankLost,
    Rows,
)
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.expert_parallel.surviving import Brought
from serving.model.spec import ModelSpec
from serving.rank_group.child import RankProcess
from serving.rank_group.host_bridge import LOAD_SECONDS, LOADING_SECONDS, bytes_of
from serving.rank_group.host_line import HostGone, HostLine, HostWord
from serving.rank_group.host_plan import BRIDGE, HostPlace, HostPlan, host_plan, of_ranks_of
from serving.rank_group.loading import ANSWER_SECONDS
from serving.rank_group.member import NEVER_ENDS
from serving.rank_group.messages import (
    BeginEpoch,
    CompiledForm,
    EndEpoch,
    EpochBegun,
    EpochEnded,
    ExpertsHeld,
    HoldExperts,
    KVMapped,
    LoadShare,
    MapKV,
    RunStep,
    ShareLoaded,
    StepDone,
    StepFailed,
    UsePlanes,
)
from serving.rank_group.share import even_placements
from serving.rank_group.shared_planes import SharedPlanes
from serving.temporary import temporary_folder

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0  # that a rank may take to leave
TOLD_SECONDS = 0.2  # to say why it has left a step: the leader waits
PATIENCE = 2.0  # deadlines that ranks here wait: the leader gives up what is late, and says so
MOST_ROWS = 1 << 24
BLOCK = 16  # tokens of the one block of KV that ranks without sequences have
TYPES = {name: getattr(torch, name) for name in ("int8", "bfloat16", "float32")}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedModel:
    """What a host loads of the model at `path`, and with how many threads each of its ranks computes."""

    path: Path
    dtype: str
    spec: ModelSpec
    place: HostPlace
    threads: int


class HostSession:
    """From the moment the leader has taken the host until one of them, or a rank here, is lost."""

    def __init__(self, line: HostLine, model: HostedModel) -> None:
        self._line, self._model = line, model
        self._ranks: list[RankProcess] = []
        self._ends: list[int] = []  # descriptors that tell of their processes' ends
        self._before: list[Brought] = []  # what each rank holds
        self._folder = ExitStack()  # of the file by which the present epoch has met
        self._kv: SharedPlanes | None = None
        self._shape: ExchangeShape | None = None
        self._plan: HostPlan | None = None
        self._tables: list[Tensor] = []  # by layer [S] int32: where rows for a slot go
        self._exchange: SharedMemoryExchange | None = None
        self._patience = ANSWER_SECONDS
        self._room = np.zeros(0, dtype=np.uint8)

    def serve(self) -> str:
        """Until it is over; why that is."""
        try:
            while self._line.ready(self._ends):
                self._do(self._line.hear(ANSWER_SECONDS))
            ended = [rank.rank for rank in self._ranks if rank.process.poll() is not None or rank.ending]
            reason = f"the process of rank {ended[0] if ended else '?'} has ended"
        except HostGone as gone:
            return str(gone)
        except RankLost as lost:
            reason = self._told(lost)
        with suppress(HostGone):  # the leader would find out by the connection
            self._line.send("lost", {"reason": reason}, ANSWER_SECONDS)
        return reason

    def _told(self, lost: RankLost) -> str:
        """With what a rank has said of a mistake."""
        self._leave()
        for rank in self._ranks:
            with suppress(RankLost):
                while rank.owed:
                    word = rank.hear(TOLD_SECONDS)
                    if isinstance(word, StepFailed):
                        return f"rank {rank.rank}: {word.error}"
        return str(lost)

    def _do(self, word: HostWord) -> None:
        match word.kind:
            case "step":
                self._step(word.number("number", 1 << 62))
            case "drop":
                self._leave()
            case "end":
                self._end()
            case "hold":
                self._hold(word)
            case "begin":
                self._begin(word)
            case "load":
                self._load(word)
            case "map":
                self._map(word)
            case _:
                raise HostGone(f"the leader says {word.kind!r}")

    def close(self) -> None:
        """End its ranks, and the connection."""
        self._leave()
        self._line.close()
        until = time.monotonic() + STOP_SECONDS
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            rank.end(until)
        for descriptor in self._ends:
            os.close(descriptor)
        self._folder.close()
        if self._kv is not None:
            self._kv.segment.close()

    # ---- until the first step ----------------------------------------------------------------------------------

    def _load(self, word: HostWord) -> None:
        model, place = self._model, self._model.place
        ranks, redundant = word.number("ranks", 1 << 31), word.number("redundant", 1 << 31)
        for rank in range(place.start, place.end):
            self._ranks.append(RankProcess(rank))
            self._ends.append(os.pidfd_open(self._ranks[-1].process.pid))
            order = LoadShare(
                path=model.path, dtype=model.dtype, rank=rank, ranks=ranks, redundant=redundant, threads=model.threads
            )
            self._ranks[-1].ask(order, ANSWER_SECONDS)
        self._before = of_ranks_of(even_placements(model.spec, ranks, redundant), place)
        answers = [rank.answer(ShareLoaded, LOAD_SECONDS) for rank in self._ranks]
        errors = [answer.error for answer in answers if answer.error is not None]
        facts = {"error": errors[0]} if errors else {"bytes": sum(answer.weight_bytes for answer in answers)}
        self._line.send("loaded", facts, ANSWER_SECONDS)

    def _map(self, word: HostWord) -> None:
        """Without KV of a sequence: a block, for what is made over some."""
        rows, top_k = word.number("rows", MOST_ROWS), word.number("top_k", 1 << 15)
        wire, back = (TYPES.get(word.text(name)) for name in ("wire", "back"))
        if wire is None or back is None:
            raise HostGone("it sends types that rows do not travel in")
        self._patience = PATIENCE * word.seconds("deadline")
        try:
            shape = ExchangeShape(
                ranks=1 + len(self._ranks),
                slots=1,
                top_k=1,
                hidden=word.number("hidden", 1 << 24),
                max_tokens=rows * top_k,
                wire=wire,
                back=back,
            )
        except ValueError as error:
            raise HostGone(f"it sends an exchange that cannot be: {error}") from error
        self._shape = shape
        self._kv = kv = SharedPlanes(self._model.spec.kv_layers(self._model.dtype), 1, BLOCK)
        order = MapKV(
            segment=kv.segment.details,
            most_rows=shape.max_tokens,
            deadline=self._patience,
            balancing=None,
            shape=shape,
            compiled=_form(word.facts.get("compiled")),
            bridged=True,
        )
        for rank in self._ranks:
            rank.ask(order, ANSWER_SECONDS)
        errors = [answer.error for rank in self._ranks if (answer := rank.answer(KVMapped, LOAD_SECONDS)).error]
        if not errors:
            for rank in self._ranks:
                rank.say(UsePlanes(kv.places(kv.planes)), ANSWER_SECONDS)
        self._line.send("mapped", {"error": errors[0] if errors else None}, ANSWER_SECONDS)

    # ---- epochs ------------------------------------------------------------------------------------------------

    def _hold(self, word: HostWord) -> None:
        experts = word.number("experts", 1 << 15)
        held = word.lists("held", experts - 1)
        if len({len(slots) for slots in held}) != 1:
            raise HostGone("the leader places experts in a way that makes no sense")
        self._plan = plan = host_plan(held, experts, self._before)
        for number, rank in enumerate(self._ranks, 1):
            rank.ask(HoldExperts(plan.placements, number), self._patience)
        answers = [rank.answer(ExpertsHeld, self._patience + LOADING_SECONDS) for rank in self._ranks]
        lost = next((answer for answer in answers if answer.lost is not None), None)
        if lost is not None and lost.lost is not None:
            facts: Mapping[str, Any] = {"lost": {str(k): list(v) for k, v in lost.lost.items()}, "reason": lost.reason}
        else:
            facts = {"loaded": sum(answer.loaded for answer in answers)}
        self._line.send("held", facts, ANSWER_SECONDS)

    def _begin(self, word: HostWord) -> None:
        plan, shape = self._plan, self._shape
        assert plan is not None and shape is not None, "experts are held before an epoch begins"
        meeting = word.seconds("meeting")
        self._folder.close()
        store = self._folder.enter_context(temporary_folder(Path(tempfile.gettempdir()))) / "store"
        order = BeginEpoch(
            number=word.number("number", 1 << 62),
            rank=BRIDGE,
            processes=(os.getpid(), *(rank.process.pid for rank in self._ranks)),
            placements=plan.placements,
            store=store,
            meeting=meeting,
        )
        for number, rank in enumerate(self._ranks, 1):
            rank.ask(replace(order, rank=number), ANSWER_SECONDS)
        error = self._joined(order, replace(shape, slots=len(plan.placements[0].slots[0])))
        answers = [rank.answer(EpochBegun, meeting + LOADING_SECONDS) for rank in self._ranks]
        error = next((answer.error for answer in answers if answer.error is not None), error)
        self._tables = [torch.tensor(places, dtype=torch.int32) for places in plan.physical]
        self._line.send("begun", {"error": error}, ANSWER_SECONDS)

    def _joined(self, order: BeginEpoch, shape: ExchangeShape) -> str | None:
        try:
            self._exchange = SharedMemoryExchange.join(
                shape,
                BRIDGE,
                PrefixStore("exchange", FileStore(str(order.store), NEVER_ENDS)),
                deadline=self._patience,
                meeting=order.meeting,
                processes=dict(enumerate(order.processes[1:], 1)),
            )
        except (RankLost, ExchangeUnavailable, StoreUnavailable, RuntimeError, OSError) as error:
            return str(error)
        return None

    def _leave(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _end(self) -> None:
        self._leave()
        for rank in self._ranks:
            rank.ask(EndEpoch(), self._patience)
        held = [rank.answer(EpochEnded, self._patience).held for rank in self._ranks]
        self._before = [before if now is None else now for now, before in zip(held, self._before, strict=True)]
        layers = zip(*self._before, strict=True)
        union = [sorted({expert for rank in layer for expert in rank}) for layer in layers]
        self._line.send("ended", {"held": union}, ANSWER_SECONDS)

    # ---- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self, number: int) -> None:
        exchange = self._exchange
        if exchange is None:
            raise HostGone("the leader begins a step outside of an epoch")
        for rank in self._ranks:
            rank.ask(RunStep(number, 0, None), self._patience)
        for table in self._tables:
            word = self._line.hear(self._patience)
            if word.kind == "drop":
                self._leave()
                break
            if word.kind != "rows":
                raise HostGone(f"the leader says {word.kind!r} in a step")
            self._layer(exchange, table, word)
        for rank in self._ranks:
            outcome = rank.hear(self._patience)
            if self._exchange is not None and not isinstance(outcome, StepDone):
                raise RankLost(rank.rank, outcome.error if isinstance(outcome, StepFailed) else "it has left the step")

    def _layer(self, exchange: SharedMemoryExchange, table: Tensor, word: HostWord) -> None:
        """Have the ranks here compute the rows of one layer, and send the results, in the order of the rows' slots."""
        rows, slots_of = self._arrived(exchange.shape, len(table), word)
        exchange.begin_dispatch(rows, table[slots_of][:, None])
        received = exchange.finish_dispatch()
        assert received.results is not None
        exchange.begin_combine(received.results)
        results = exchange.finish_combine(torch.ones(len(slots_of), 1)).to(exchange.shape.back)
        if len(results):
            self._line.send("results", {}, self._patience, [bytes_of(results)])

    def _arrived(self, shape: ExchangeShape, slots: int, word: HostWord) -> tuple[Rows, Tensor]:
        """The rows, each as often as results are wanted of it, and for each its slot. Raises HostGone for nonsense."""
        count, results = word.number("rows", shape.max_tokens), word.number("results", shape.max_tokens)
        scaled = shape.wire is torch.int8
        sizes = (4 * slots, 4 * results, SCALE_BYTES * count * scaled, count * shape.hidden * shape.wire.itemsize)
        if len(self._room) < sum(sizes):
            self._room = np.empty(sum(sizes), dtype=np.uint8)
        memory = self._room[: sum(sizes)]
        self._line.bytes_into(word, memory.data, self._patience)
        first, second, scales, values = torch.split_with_sizes(torch.from_numpy(memory), sizes)
        counts, row_of = first.view(torch.int32), second.view(torch.int32).long()
        if int(counts.sum()) != results or (counts < 0).any() or ((row_of < 0) | (row_of >= count)).any():
            raise HostGone("the leader sends rows that make no sense")
        scale = scales.view(torch.float32)[row_of] if scaled else None
        return Rows(values.view(shape.wire).view(count, shape.hidden)[row_of], scale), torch.arange(
            slots
        ).repeat_interleave(counts)


def _form(given: object) -> CompiledForm | None:
    """Raises HostGone for what is none."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise HostGone(f"it sends kernels {given!r}")
    word = HostWord("compiled", given, 0)
    return CompiledForm(
        form=word.text("form"), wire=word.text("wire"), max_position=word.number("max_position", 1 << 31)
    )
