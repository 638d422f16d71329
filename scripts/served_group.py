"""A mixture of experts over ranks behind a router in this process, to be measured while clients ask without pause.

The model has random weights and is written to disk, as ranks read it there. What is done to the ranks meanwhile is
not known here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deploy.local import LocalCluster
from router.fleet import RouterConfig
from router.router import Router
from serving.config import EngineConfig, ModelConfig
from serving.engine.plan import StepRecord
from serving.engine.tracing import TraceWriter
from serving.expert_parallel.surviving import Placements
from serving.loader.loading import LoadedModel
from serving.messages import Delta, Request, SamplingParams
from serving.rank_group.leader import SpreadModel

Prompt = tuple[int, ...]

VOCABULARY, TOPIC = 512, 8  # tokens of the model, and of them those that one topic's prompts use
PROMPT, TOKENS = 12, 48


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Of a Mixtral-shaped model."""

    layers: int = 4
    hidden: int = 256
    width: int = 512  # of an expert
    experts: int = 16
    top_k: int = 2
    heads: int = 8
    kv_heads: int = 2


def write_model(folder: Path, size: ModelSize) -> Path:
    """Random float32 weights as a checkpoint."""
    chance = torch.Generator().manual_seed(1)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=chance).mul_(columns**-0.5)

    hidden, kv = size.hidden, size.hidden // size.heads * size.kv_heads
    tensors = {name: drawn(VOCABULARY, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(size.layers):
        own = f"model.layers.{layer}."
        tensors |= {own + f"{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
        rows = {"q": hidden, "k": kv, "v": kv, "o": hidden}
        tensors |= {own + f"self_attn.{name}_proj.weight": drawn(count, hidden) for name, count in rows.items()}
        tensors[own + "block_sparse_moe.gate.weight"] = drawn(size.experts, hidden)
        for expert in range(size.experts):
            at = f"{own}block_sparse_moe.experts.{expert}."
            tensors |= {at + f"{name}.weight": drawn(size.width, hidden) for name in ("w1", "w3")}
            tensors[at + "w2.weight"] = drawn(hidden, size.width)
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "float32",
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": size.width,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads,
        "num_local_experts": size.experts, "num_experts_per_tok": size.top_k, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu", "sliding_window": None,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts(topic: int, count: int) -> list[Prompt]:
    """Of few tokens, other ones for each topic: so their rows prefer other experts."""
    chance = random.Random(topic)
    words = chance.sample(range(3, VOCABULARY), TOPIC)
    return [tuple(chance.choice(words) for _ in range(PROMPT)) for _ in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of the leader's engine, and what had been done by its end."""

    began: float  # seconds on the engine's clock
    seconds: float
    cpu_seconds: float  # of the thread that computes, since the step before
    core_seconds: float  # that the rank which waited longest for a core had to wait for it, since the step before
    sequences: int
    prompt_tokens: int
    moved_bytes: int  # of all ranks so far
    placements: int  # how often experts had been placed anew


class Steps(TraceWriter):
    """Notes each step in memory."""

    def __init__(self, spread: SpreadModel | None) -> None:
        super().__init__(Path(os.devnull), "measured")
        self.found: list[Step] = []
        self._ranks = None if spread is None else spread.ranks
        self._cpu, self._times = time.thread_time(), 0
        self._waited: dict[tuple[int, int], float] = {}
        self._placed: Placements = ()

    def step(self, record: StepRecord) -> None:
        cpu, ranks = time.thread_time(), self._ranks
        before, self._cpu = self._cpu, cpu
        if ranks is not None and ranks.placements != self._placed:
            self._placed, self._times = ranks.placements, self._times + 1
        moved = 0 if ranks is None else ranks.totals.moved_bytes
        self.found.append(
            Step(
                began=record.began,
                seconds=record.step_seconds,
                cpu_seconds=cpu - before,
                core_seconds=self._core_seconds(),
                sequences=record.load.sequences,
                prompt_tokens=record.prompt_tokens,
                moved_bytes=moved,
                placements=self._times,
            )
        )

    def _core_seconds(self) -> float:
        others = () if self._ranks is None else self._ranks.others
        threads = [(os.getpid(), threading.get_native_id()), *((one.process.pid, one.process.pid) for one in others)]
        before, self._waited = self._waited, {thread: waited_for_core(*thread) for thread in threads}
        return max(waited - before.get(thread, waited) for thread, waited in self._waited.items())


def waited_for_core(process: int, thread: int) -> float:
    """Seconds so far in which it could have run and did not; 0 where the kernel does not count them."""
    try:
        return int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Silent:
    """A router's observer that observes nothing."""

    def first_token(self, request: Request, seconds: float, cached: int) -> None: ...
    def tokens(self, seconds: float, count: int) -> None: ...
    def replaced(self, error: Exception) -> None: ...
    def finished(self, request: Request, timeline: Any, last: Delta | None, error: BaseException | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Text:
    prompt: Prompt
    tokens: tuple[int, ...]


async def asked(router: Router, prompt: Prompt, heard: list[float]) -> Text:
    """`heard` gets the times, on the monotonic clock, at which tokens come."""
    sampling, tokens = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True), list[int]()
    async for delta in router.generate(Request(request_id="measured", prompt=prompt, sampling=sampling)):
        tokens += delta.tokens
        heard.append(time.monotonic())
    return Text(prompt, tuple(tokens))


class Clients:
    """Of a router. `ask` texts once, or keep clients asking until `stop`."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.texts: list[Text] = []
        self.heard: list[list[float]] = []  # of each client
        self._asking: list[asyncio.Task[None]] = []
        self.wanted: list[Prompt] = []

    async def ask(self, wanted: Iterable[Prompt]) -> list[Text]:
        return list(await asyncio.gather(*(asked(self.router, prompt, []) for prompt in wanted)))

    def start(self, wanted: Sequence[Prompt]) -> None:
        """A client for each of these prompts, which asks for one of `wanted`, as it stands then, after the other."""
        self.wanted, self.heard = list(wanted), [[] for _ in wanted]
        self._asking = [asyncio.create_task(self._ask_on(number)) for number in range(len(wanted))]

    async def _ask_on(self, number: int) -> None:
        while True:
            self.texts.append(await asked(self.router, self.wanted[number], self.heard[number]))

    async def stop(self) -> None:
        for task in self._asking:
            task.cancel()
        for task in self._asking:
            with suppress(asyncio.CancelledError):
                await task


class Served(Clients):
    """Those of a worker behind a router in this process."""

    def __init__(self, cluster: LocalCluster, steps: Steps) -> None:
        super().__init__(cluster.router(Silent()))
        self.cluster, self.steps = cluster, steps


def engine_config(concurrency: int) -> EngineConfig:
    return EngineConfig(num_kv_blocks=16 * concurrency, max_num_batched_tokens=128, max_num_seqs=concurrency)


@asynccontextmanager
async def served(model: LoadedModel, concurrency: int) -> AsyncIterator[Served]:
    """One worker over `model`, its ranks if it has any, and a router."""
    config = RouterConfig(patience=60.0)
    cluster = LocalCluster(model, ModelConfig(dtype="float32"), engine_config(concurrency), config)
    await cluster.start()
    try:
        steps = Steps(model if isinstance(model, SpreadModel) else None)
        cluster.workers[0].engine.trace = steps
        yield Served(cluster, steps)
    finally:
        await cluster.stop()
