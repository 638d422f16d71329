"""A group of real processes over a tiny model, and one process beside it that computes the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deploy.model_folder import read_config
from kvcache.memory.device import DeviceKV
from serving.batch.layer_barrier import LayerBarrier
from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.forward.choose import make_forward
from serving.forward.forward import EagerForward, Forward
from serving.forward.layer_events import LayerDone
from serving.kernels import cpu
from serving.loader.loading import LoadedModel, load
from serving.model.decoder import Planes
from serving.quantization.folder import write_model
from serving.quantization.scheme import PORTABLE
from serving.rank_group.compiled import compiled_form
from serving.rank_group.forward import GroupForward
from serving.rank_group.leader import SpreadModel, join_group, load_spread
from serving.rank_group.messages import Balancing
from tests.fakes.stopping import harm
from tests.serving.model.oracle import VOCAB

NEEDS_KERNELS = pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here")
COMPILED = EngineConfig(kernels="compiled", deterministic=True, threads=2)
BLOCK, BLOCKS_EACH = 4, 10
LENGTHS = (9, 6, 14, 5)
MOST_TOKENS = 64
DEADLINE = 20.0


def prompt(number: int, length: int) -> list[int]:
    return [random.Random(number).randrange(VOCAB) for _ in range(length)]


class Side:
    """A forward pass, its KV and how far each of the sequences has come in it."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.done = [0] * len(LENGTHS)
        self.tokens = [prompt(number, length) for number, length in enumerate(LENGTHS)]
        self.layers: list[int] = []  # as they were told of in the last step

    @torch.inference_mode()
    def step(self, chosen: Sequence[int], layer_done: LayerDone | None = None) -> Tensor:
        """All uncomputed tokens of these sequences, [sequences, V]; each goes on with its likeliest next token."""
        self.layers = []
        logits = self.forward.logits(self.batch(chosen), layer_done or self.layers.append)
        self.take(chosen, logits)
        return logits

    @torch.inference_mode()
    def hidden(self, chosen: Sequence[int]) -> Tensor:
        """The same before the head, [sequences, H]; `take` is to follow."""
        return self.forward.hidden(self.batch(chosen), None)

    def take(self, chosen: Sequence[int], logits: Tensor) -> None:
        for one, row in zip(chosen, logits, strict=True):
            self.done[one] = len(self.tokens[one])
            self.tokens[one].append(int(row.argmax()))

    def batch(self, chosen: Sequence[int]) -> RaggedBatch:
        return RaggedBatch.build(
            tokens=[self.tokens[one][self.done[one] :] for one in chosen],
            starts=[self.done[one] for one in chosen],
            block_tables=[list(range(BLOCKS_EACH * one, BLOCKS_EACH * (one + 1))) for one in chosen],
            block_size=BLOCK,
        )


@contextmanager
def spread_over(
    folder: Path,
    ranks: int,
    deadline: float = DEADLINE,
    redundant: int = 0,
    balancing: Balancing | None = None,
    dtype: str = "float32",
) -> Iterator[SpreadModel]:
    """The model at `folder`, one thread a rank; this process has as many threads afterwards as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(ranks)
    try:
        spread = load_spread(folder, dtype, None, ranks, deadline, redundant=redundant, balancing=balancing)
        try:
            yield spread
        finally:
            spread.ranks.close()
    finally:
        torch.set_num_threads(threads)


def group_forward(spread: SpreadModel, *, compiled: bool = False) -> GroupForward:
    specs = spread.spec.kv_layers("float32")
    planes = spread.ranks.share_planes(specs, BLOCKS_EACH * len(LENGTHS), BLOCK)
    form = compiled_form(spread, COMPILED, MOST_TOKENS) if compiled else None
    assert not isinstance(form, str), form
    return join_group(spread, planes, MOST_TOKENS, form)


def alone(folder: Path) -> EagerForward:
    """With as many threads as this process has."""
    loaded = load(folder, "float32")
    return EagerForward(loaded.model, own_planes(loaded))


def compiled_alone(folder: Path, dtype: str = "float32") -> Forward:
    """One process by the compiled kernels, as a worker without ranks."""
    loaded = load(folder, dtype)
    return make_forward(loaded, own_planes(loaded), COMPILED, MOST_TOKENS, releases=True)


def in_int8(folder: Path, out: Path, dtype: str) -> Path:
    """The model at `folder` with INT8 layers, in a folder of its own."""
    loaded = load(folder, dtype, quantization="int8", scheme=PORTABLE)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    write_model(loaded.model, read_config(folder), out)
    return out


def own_planes(loaded: LoadedModel) -> Sequence[Planes]:
    return DeviceKV(loaded.spec.kv_layers("float32"), BLOCKS_EACH * len(LENGTHS), BLOCK).planes


def pids(spread: SpreadModel) -> list[int]:
    return [other.process.pid for other in spread.ranks.others]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_at_a_barrier(group: Side, one: Side, same: Callable[[Tensor, Tensor], None]) -> None:
    """A step waits for its whole prefix; where it leaves, the ranks have not begun. `same` asserts."""
    barrier, layers = LayerBarrier(), len(group.forward.planes)
    batch = group.batch([0])
    barrier.open(layers - 1)
    barrier.hurry()
    with torch.inference_mode():
        group.forward.logits(replace(batch, barrier=barrier), None)
        assert barrier.left
        barrier.begin()
        barrier.open(layers)
        same(group.forward.logits(replace(batch, barrier=barrier), None), one.step([0]))
    assert not barrier.left


def harmed(pid: int, how: signal.Signals) -> Callable[[int], None]:
    """Harms this process in the middle of a step: when the first layer is done."""
    left = [pid]

    def layer_done(_: int) -> None:
        if left:
            harm(left.pop(), how)

    return layer_done
