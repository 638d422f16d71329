"""One rank of `bench.expert_balance`: computes steps of a model whose loads drift, with experts that move or stay."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bench.random_model import llama, random_model
from serving.batch.ragged import RaggedBatch
from serving.expert_parallel.byte_budget import ByteBudget
from serving.expert_parallel.copies import CHUNK
from serving.expert_parallel.layer import (
    ExpertParallelMlp,
    apply_expert_parallel,
    exchange_shape,
    hold_experts,
    moe_layers,
)
from serving.expert_parallel.rebalance import LiveRebalance, RebalanceStatus
from serving.expert_parallel.replanning import BalancePolicy
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement, Layout, placed
from serving.model.moe import Float32Router
from serving.model.moe_spec import MoeSpec

DEADLINE = 120.0
INTERVAL = 20  # steps between rounds
MOST_MOVES = 25
PREFERENCE = 0.2  # of the router, for each factor e of load


@dataclass(frozen=True, slots=True)
class LiveCase:
    """A group that computes `steps` steps; after a third of them rows go to other experts."""

    ranks: int
    steps: int
    moving: bool
    experts: int = 32
    copies: int = 8  # beyond one of each expert
    top_k: int = 4
    layers: int = 2
    hidden: int = 256
    width: int = 128
    rows: int = 32  # of each rank
    bytes_per_second: float = 2e6


@dataclass(frozen=True, slots=True)
class LiveMeasured:
    """What one rank has seen."""

    began: list[float]  # of each step, on the host's monotonic clock
    seconds: list[float]
    cpu_seconds: list[float]  # of the thread that computes
    digests: list[str]  # of each step's output
    loads: list[list[list[int]]]  # of each step [layers, ranks]: this rank's rows by the rank that computes them
    switched: list[int]  # commits, before the step
    spent: list[tuple[float, int]]  # time and bytes of each chunk of weights
    status: RebalanceStatus


class NotedBudget(ByteBudget):
    """A budget that remembers when which bytes went."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(bytes_per_second, CHUNK, time.monotonic())
        self.spent: list[tuple[float, int]] = []

    def spend(self, size: int, now: float) -> float:
        wait = super().spend(size, now)
        self.spent.append((now + wait, size))
        return wait


def model_of(case: LiveCase) -> Decoder:
    """The same weights on every rank, of all experts."""
    moe = MoeSpec(
        experts=case.experts,
        top_k=case.top_k,
        intermediate=case.width,
        sparse=(True,) * case.layers,
        scoring="sigmoid",
        biased=True,
        router_float32=True,
    )
    spec = llama(
        hidden=case.hidden,
        layers=case.layers,
        heads=8,
        kv_heads=2,
        head_dim=64,
        intermediate=case.width,
        vocab_size=1000,
        max_position=1024,
    )
    torch.manual_seed(1)
    return random_model(replace(spec, moe=moe), "float", torch.float32, torch.device("cpu"))


def skew(model: Decoder, case: LiveCase, seed: int) -> None:
    """Let the routers prefer some experts, by Zipf's law."""
    for number, (_, mlp) in enumerate(moe_layers(model)):
        assert isinstance(mlp.router, Float32Router) and mlp.router.correction is not None
        order = list(range(case.experts))
        random.Random(100 * seed + number).shuffle(order)
        mlp.router.correction.copy_(torch.tensor([-PREFERENCE * math.log(place + 1) for place in order]))


def batch_of(case: LiveCase, step: int, rank: int) -> RaggedBatch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(1000, (case.rows,), generator=generator).tolist()
    return RaggedBatch.build(tokens=[tokens], starts=[0], block_tables=[[0]], block_size=case.rows)


def rank_loads(layers: Sequence[ExpertParallelMlp]) -> Tensor:
    """[layers, ranks], filled with this rank's rows by the rank that computes them, as the model runs."""
    shape = layers[0].exchange.shape
    found = torch.zeros(len(layers), shape.ranks, dtype=torch.int64)
    for own, layer in zip(found, layers, strict=True):

        def count(
            chosen: Tensor,
            own: Tensor = own,
            layer: ExpertParallelMlp = layer,
            counted: Callable[[Tensor], object] = layer.count,
        ) -> None:
            counted(chosen)
            own.copy_((layer.physical.of(chosen) // shape.slots).flatten().bincount(minlength=shape.ranks))

        layer.count = count
    return found


def measured(case: LiveCase, rank: int, store: Store) -> LiveMeasured:
    model = model_of(case)
    layout = Layout(ranks=case.ranks, slots=(case.experts + case.copies) // case.ranks)
    spread: list[ExpertPlacement] = [placed([1.0] * case.experts, layout)] * case.layers
    hold_experts(model, spread, rank)
    shape = exchange_shape(model, spread[0], case.rows)
    exchange = SharedMemoryExchange.join(shape, rank, PrefixStore("rows", store), deadline=DEADLINE)
    apply_expert_parallel(model, spread, exchange)
    budget = NotedBudget(case.bytes_per_second)
    policy = BalancePolicy(most_moves=MOST_MOVES) if case.moving else BalancePolicy(fewest_rows=1 << 62)
    balance = LiveRebalance.join(model, spread, PrefixStore("balance", store), policy=policy, budget=budget,
                                 interval=INTERVAL)  # fmt: skip
    loads = rank_loads([mlp for _, mlp in moe_layers(model) if isinstance(mlp, ExpertParallelMlp)])
    kv = [
        tuple(torch.zeros(1, case.rows, *plane.shape) for plane in layer.planes)
        for layer in model.spec.kv_layers("float32")
    ]
    found = LiveMeasured([], [], [], [], [], [], budget.spent, balance.status)
    with torch.inference_mode():
        skew(model, case, 1)
        for step in range(case.steps):
            if step == case.steps // 3:
                skew(model, case, 2)
            batch = batch_of(case, step, rank)
            began, cpu = time.monotonic(), time.thread_time()
            found.began.append(began)
            balance.begin_step()
            out = model(batch, kv)
            found.seconds.append(time.monotonic() - began)
            found.cpu_seconds.append(time.thread_time() - cpu)
            found.digests.append(hashlib.sha256(out.numpy().tobytes()).hexdigest())
            found.switched.append(balance.status.switched)
            found.loads.append(loads.tolist())
    done = replace(found, status=balance.status)
    balance.close()
    exchange.close()
    return done


def run_rank(rank: int, port: int, case: LiveCase, answers: Connection) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    answers.send(measured(case, rank, store))
