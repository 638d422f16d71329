"""Greedy decoding of tiny models, in one process and by ranks that hold some of their experts each."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from serving.expert_parallel.exchange import ExchangeTraffic
from serving.expert_parallel.layer import apply_expert_parallel, exchange_shape, hold_experts, idle_step
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement, Layout, placed
from tests.serving.expert_parallel.groups import join
from tests.serving.model.paged import PagedRun

NEW_TOKENS = 6
MOST_ROWS = 64  # of one rank in one step

Greedy = list[tuple[list[int], Tensor]]


def greedy(model: Decoder, prompts: Sequence[list[int]]) -> Greedy:
    """For each prompt the tokens that follow and the logits of everything computed, all prompts in one batch."""
    run = PagedRun(model, [prompt + [0] * NEW_TOKENS for prompt in prompts], block_size=4)
    counts = {s: len(prompt) for s, prompt in enumerate(prompts)}
    for _ in range(NEW_TOKENS):
        run.step(counts)
        for s in counts:
            run.sequences[s][run.done[s]] = int(run.logits[s][-1][-1].argmax())
        counts = dict.fromkeys(counts, 1)
    return [(run.sequences[s][len(prompt) :], run.result(s)) for s, prompt in enumerate(prompts)]


def placements(model: Decoder, ranks: int, spare: int) -> list[ExpertPlacement]:
    """For each MoE layer another placement, `spare` slots a rank more than needed, loads as if some were hot."""
    assert model.spec.moe is not None
    experts = model.spec.moe.experts
    slots = -(-experts // ranks) + spare
    loads = [1.0 + (expert * 7 % experts) for expert in range(experts)]
    layers = range(sum(model.spec.moe.sparse))
    return [placed(loads[layer:] + loads[:layer], Layout(ranks=ranks, slots=slots)) for layer in layers]


def serve_rank(
    rank: int, store: Store, _: Connection, folder: Path, kind: str, ranks: int, spare: int, prompts: list[list[int]]
) -> tuple[list[tuple[list[int], Any]], list[list[str]], ExchangeTraffic]:
    """Tokens and logits of this rank's `prompts` (each rank's every `ranks`th), its layers' experts, its traffic."""
    whole = load(folder, "float32").spec
    with torch.device("meta"):
        spread = placements(Decoder(whole), ranks, spare)
    model = load(folder, "float32", layout=lambda built: hold_experts(built, spread, rank)).model
    held = [one.split(".")[1:5:3] for one, _ in model.named_parameters() if ".experts." in one and "down.weight" in one]
    exchange = join(kind, exchange_shape(model, spread[0], MOST_ROWS), rank, store)
    apply_expert_parallel(model, spread, exchange)
    own, found = prompts[rank::ranks], []
    with torch.inference_mode():
        if own:
            found = greedy(model, own)
        else:
            for _ in range(NEW_TOKENS):
                idle_step(model)
    traffic = exchange.traffic
    exchange.close()
    return [(tokens, logits.numpy()) for tokens, logits in found], held, traffic
