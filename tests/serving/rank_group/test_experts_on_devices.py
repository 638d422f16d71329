"""Ranks that hold some experts each, on a device of its own, say what one process says. The devices are CPUs here
(test_device_group).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.parallel.layout import ParallelLayout
from serving.rank_group.device_leader import ModelOnDevices, load_on_devices
from tests.fakes.awake import retaken
from tests.serving.parallel.models import written
from tests.serving.rank_group.groups import DEADLINE, LENGTHS, Side, alone
from tests.serving.rank_group.test_device_group import close, forward_over, own_kv, same_kv, told_of_its_loss

MOST = range(len(LENGTHS))
NEW_TOKENS = 4
NAMES = ("mixtral", "mixtral_int8", "deepseek_v3_plain")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return written(tmp_path_factory.mktemp("models"), NAMES)


@contextmanager
def spread_on_devices(folder: Path, ranks: int = 2, deadline: float = DEADLINE) -> Iterator[ModelOnDevices]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layout = ParallelLayout(sequence=ranks, spread_experts=True)
    try:
        shared = load_on_devices(folder, "float32", layout, deadline, "cpu")
        try:
            yield shared
        finally:
            shared.ranks.close()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_some_experts_each_say_what_one_process_says(name: str, folders: dict[str, Path]) -> None:
    """Prompts of which each rank has some rows, a step of fewer rows than ranks, and KV that leaves."""
    one = Side(reference := alone(folders[name]))
    with spread_on_devices(folders[name]) as shared:
        layers = len(reference.planes)
        kv = own_kv(shared)
        group = Side(forward_over(shared, kv))
        assert group.forward.form.endswith("ep2")
        for _ in range(NEW_TOKENS):
            close(group.step(MOST), one.step(MOST))
            assert group.layers == list(range(layers))
        close(group.step([2]), one.step([2]))
        assert group.tokens == one.tokens
        close(group.hidden(MOST), one.hidden(MOST))
        same_kv(kv, reference, one)
        assert shared.ranks.bytes_sent > 0


def test_layers_are_told_of_at_the_end_of_a_step_that_not_all_ranks_have_rows_in(folders: dict[str, Path]) -> None:
    """The leader may have none, and be a layer ahead of who writes KV: told as it goes, old KV would leave."""
    with spread_on_devices(folders["mixtral"]) as shared:
        group = Side(forward_over(shared, own_kv(shared)))
        group.step(MOST)
        model, computing = shared.model, list[bool]()
        handle = model.norm.register_forward_hook(lambda *_: computing.append(True))
        told: list[bool] = []
        group.step([0], lambda _: told.append(bool(computing)))
        handle.remove()
        assert told == [True] * shared.spec.layers


def test_each_rank_holds_its_experts_alone(folders: dict[str, Path]) -> None:
    with spread_on_devices(folders["mixtral"]) as shared:
        held = {name.split(".")[4] for name, _ in shared.model.named_parameters() if ".experts." in name}
        assert held == {"0", "1"}, "of five experts the other rank has three"


def test_rows_travel_as_int8_to_int8_experts(folders: dict[str, Path]) -> None:
    """What all ranks send in a step of one row each, by count: of INT8 half of it is in bytes, not in floats."""
    sent: dict[str, int] = {}
    for name in ("mixtral", "mixtral_int8"):
        with spread_on_devices(folders[name]) as shared:
            group = Side(forward_over(shared, own_kv(shared)))
            group.step(MOST)
            before = shared.ranks.bytes_sent
            group.step([0, 1])
            sent[name] = shared.ranks.bytes_sent - before
            spec = shared.spec
    assert spec.moe is not None
    narrower = spec.hidden * 3 - 4  # of a row: three bytes of each number, less a scale
    rows = 2 * sum(spec.moe.sparse)
    assert abs(sent["mixtral"] - sent["mixtral_int8"] - rows * narrower) <= rows * 16  # a row ends at 16 bytes


@retaken
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=str)
def test_a_lost_rank_is_named_and_no_process_stays(how: signal.Signals, folders: dict[str, Path]) -> None:
    deadline = 2.0 if how is signal.SIGSTOP else DEADLINE
    with spread_on_devices(folders["mixtral"], deadline=deadline) as shared:
        told_of_its_loss(shared, how)


def test_buffers_stay_where_they_are_from_one_step_to_the_next(folders: dict[str, Path]) -> None:
    with spread_on_devices(folders["mixtral"]) as shared:
        group = Side(forward_over(shared, own_kv(shared)))
        group.step(MOST)
        layers: Any = shared.model.layers
        [exchange] = {layer.mlp.exchange for layer in layers}

        def places() -> dict[str, int]:
            memory: dict[str, Tensor] = exchange._memory
            return {name: room.data_ptr() for name, room in memory.items()}

        before = places()
        for _ in range(3):
            group.step(MOST)
        assert places() == before and len(before) == 4
