"""Ranks that compute while experts move between them, each beside the same model in one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from bench.random_model import SHAPES, llama, random_model
from serving.batch.ragged import RaggedBatch
from serving.expert_parallel.arena import ExpertArena, ExpertFormat, arena_bytes
from serving.expert_parallel.copies import AllToAllCopies, CheckpointCopies, SharedMemoryCopies
from serving.expert_parallel.layer import (
    ExpertParallelMlp,
    apply_expert_parallel,
    exchange_shape,
    hold_experts,
    idle_step,
    moe_layers,
)
from serving.expert_parallel.local import LocalExchange
from serving.expert_parallel.meeting import POLL_SECONDS
from serving.expert_parallel.physical import PhysicalExperts
from serving.expert_parallel.rebalance import LiveRebalance, RebalanceStatus
from serving.expert_parallel.recovery import ExpertGroup, Limits
from serving.expert_parallel.replanning import BalancePolicy
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement, Layout, placed
from serving.model.moe import Float32Router
from serving.model.moe_spec import MoeSpec
from tests.serving.expert_parallel.groups import join
from tests.serving.expert_parallel.ranks import START_SECONDS

EXPERTS, LAYERS, ROWS = 8, 2, 12
JOINS = {"shared_memory": SharedMemoryCopies.join, "all_to_all": AllToAllCopies.join, "checkpoint": None}
EAGER = BalancePolicy(above=1.02, target=1.0, least_gain=0.01, fewest_rows=1, most_layers=LAYERS, kept=0.0)
MOST_STEPS = 40_000  # of a group that waits for a plan
STEPS_AFTER = 20  # a switch, in which moved experts compute


def model_of(weights: str) -> Decoder:
    """The same on every rank."""
    moe = MoeSpec(
        experts=EXPERTS,
        top_k=2,
        intermediate=16,
        sparse=(True,) * LAYERS,
        scoring="sigmoid",
        biased=True,
        router_float32=True,
    )
    torch.manual_seed(3)
    return random_model(replace(llama(**SHAPES["tiny"]), moe=moe), weights, torch.float32, torch.device("cpu"))


def prefer(model: Decoder, placements: Sequence[ExpertPlacement]) -> None:
    """Let rows of each layer go to two experts that one rank alone holds, more than to others."""
    for (_, mlp), placement in zip(moe_layers(model), placements, strict=True):
        assert isinstance(mlp.router, Float32Router) and mlp.router.correction is not None
        copies = placement.copies()
        alone = ([expert for expert in held if copies[expert] == 1] for held in placement.slots)
        mlp.router.correction.zero_()
        mlp.router.correction[next(found for found in alone if len(found) > 1)[:2]] = 0.5


def batch_of(step: int, rank: int) -> RaggedBatch:
    """One sequence of so many new tokens, other ones in each step."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    tokens = torch.randint(SHAPES["tiny"]["vocab_size"], (ROWS,), generator=generator).tolist()
    return RaggedBatch.build(tokens=[tokens], starts=[0], block_tables=[[0]], block_size=ROWS)


def kv_of(model: Decoder) -> list[tuple[Tensor, ...]]:
    layers = model.spec.kv_layers("float32")
    return [tuple(torch.zeros(1, ROWS, *plane.shape) for plane in layer.planes) for layer in layers]


def join_checkpoint(
    whole: Decoder, form: ExpertFormat, layers: int, slots: int, rank: int, _ranks: int, _store: Store
) -> CheckpointCopies:
    """What stands for a checkpoint is the model of one process."""
    memory = torch.zeros(arena_bytes(form, layers, slots), dtype=torch.uint8)
    mlps = [mlp for _, mlp in moe_layers(whole)]
    return CheckpointCopies(
        ExpertArena(form, layers, slots, memory), rank, lambda layer, expert: mlps[layer].experts[expert]
    )


def compute_while_experts_move(
    rank: int, store: Store, _: Connection, ranks: int, spare: int, weights: str, copies: str, drifts: int
) -> tuple[int, list[int], list[list[ExpertPlacement]], RebalanceStatus]:
    """Steps until `drifts` changes of load have been answered by moves: how many, those whose bits were others.

    Then the placements of this rank before and after each drift, and its status. Of three ranks the last has no rows.
    """
    alone, model = model_of(weights), model_of(weights)
    layout = Layout(ranks=ranks, slots=EXPERTS // ranks + spare)
    spread = [placed([1.0] * EXPERTS, layout)] * LAYERS
    hold_experts(model, spread, rank)
    exchange = join("shared_memory", exchange_shape(model, spread[0], ROWS), rank, PrefixStore("rows", store))
    apply_expert_parallel(model, spread, exchange)
    told = dict(enumerate(spread))
    balance = LiveRebalance.join(
        model,
        spread,
        PrefixStore("balance", store),
        join_copies=JOINS[copies] or partial(join_checkpoint, alone),
        policy=EAGER,
        interval=20,
        on_placed=told.__setitem__,
    )
    kv, kv_alone, seen, wrong, step = kv_of(model), kv_of(alone), [balance.placements], [], 0
    with torch.inference_mode():
        for _drift in range(drifts):
            for one in (model, alone):
                prefer(one, balance.placements)
            agreed, left = exchange.agreed, STEPS_AFTER
            while left > 0:
                left -= balance.status.switched > agreed
                balance.begin_step()
                if rank == ranks - 1 and ranks > 2:
                    idle_step(model)
                else:
                    batch = batch_of(step, rank)
                    if not torch.equal(model(batch, kv), alone(batch, kv_alone)):
                        wrong.append(step)
                step += 1
                assert step < MOST_STEPS, "nothing moves"
            seen.append(balance.placements)
    assert list(told.values()) == balance.placements
    balance.close()
    exchange.close()
    return step, wrong, seen, balance.status


class _Broken(BalancePolicy):
    """A policy with a mistake in it."""

    def __getattribute__(self, name: str) -> object:
        if name == "kept":
            raise KeyError("no such layer")
        return super().__getattribute__(name)


def make_a_mistake_in_a_round(rank: int, store: Store, _: Connection) -> str | None:
    """What the rebalance of a group of one rank says of it."""
    model, spread = model_of("float32"), [placed([1.0] * EXPERTS, Layout(ranks=1, slots=EXPERTS))] * LAYERS
    apply_expert_parallel(model, spread, LocalExchange(exchange_shape(model, spread[0], ROWS)))
    policy = object.__new__(_Broken)  # its fields are not looked at
    balance = LiveRebalance.join(model, spread, PrefixStore("balance", store), policy=policy, interval=1)
    balance.begin_step()
    until = time.monotonic() + START_SECONDS
    while balance.status.failure is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    balance.close()
    return balance.status.failure


def lose_a_rank_after_a_move(rank: int, store: Store, _: Connection) -> list[bool]:
    """Of three ranks the first two exchange an expert; the last, which has copies, dies within the step after that.

    Whether each step of those that are left has the bits of one process. Nobody can load experts.
    """
    alone, model = model_of("float32"), model_of("float32")
    before = ExpertPlacement(((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)), EXPERTS)
    after = ExpertPlacement(((4, 1, 2, 3), (0, 5, 6, 7), (0, 1, 2, 3)), EXPERTS)
    hold_experts(model, [before] * LAYERS, rank)
    group = ExpertGroup.enter(
        model,
        (before,) * LAYERS,
        rank,
        store,
        shape=exchange_shape(model, before, ROWS),
        join=SharedMemoryExchange.join,
        limits=Limits(most_slots=EXPERTS),
    )
    kv, kv_alone, same = kv_of(model), kv_of(alone), []
    with torch.inference_mode():
        for step in range(4):
            if step == 1:
                for layer, ((_, mlp), (_, whole)) in enumerate(zip(moe_layers(model), moe_layers(alone), strict=True)):
                    group.placed(layer, after)
                    assert isinstance(mlp, ExpertParallelMlp)
                    slots = [whole.experts[expert] for expert in after.slots[rank]]
                    mlp.hold(slots, PhysicalExperts(after, rank), after)
                if rank == 2:
                    model.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                assert group.epoch.placements == (after,) * LAYERS
            batch = batch_of(step, rank)
            same.append(torch.equal(group.step(partial(model, batch, kv)), alone(batch, kv_alone)))
    group.close()
    return same
