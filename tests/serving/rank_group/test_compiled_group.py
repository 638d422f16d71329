"""A group of real processes that computes by the compiled kernels has the bits of one process that does."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.worker.computing import forward_of
from kvcache.memory.device import DeviceKV
from serving.loader import quantize_at_load
from serving.rank_group.compiled import compiled_form
from tests.serving.model.oracle import build, configs, save
from tests.serving.rank_group.groups import (
    COMPILED,
    LENGTHS,
    MOST_TOKENS,
    NEEDS_KERNELS,
    Side,
    compiled_alone,
    group_forward,
    harmed,
    in_int8,
    pids,
    prompt,
    spread_over,
    wait_at_a_barrier,
)

pytestmark = NEEDS_KERNELS
ALL = range(len(LENGTHS))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("mixtral"))


def compare(folder: Path, dtype: str, ranks: int) -> None:
    """Prompts and decoding, each sequence alone and all in one step; also what is drawn greedily."""
    one = Side(compiled_alone(folder, dtype))
    with spread_over(folder, ranks, dtype=dtype) as spread:
        group = Side(group_forward(spread, compiled=True))
        assert group.forward.form == f"{one.forward.form} x{ranks}"
        assert torch.equal(group.step(ALL), one.step(ALL))
        assert group.layers == list(range(spread.spec.layers))
        for sequence in ALL:
            assert torch.equal(group.step([sequence]), one.step([sequence]))
        for _ in range(2):
            same_choices(group, one)
            assert torch.equal(group.step(ALL), one.step(ALL))
        assert group.tokens == one.tokens
        traffic = spread.ranks.totals.traffic
        assert min(traffic.dispatch_bytes, traffic.combine_bytes) > 0
        assert spread.ranks.counts.losses == 0
        wait_at_a_barrier(group, one, same)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found, wanted)


@torch.inference_mode()
def same_choices(group: Side, one: Side) -> None:
    """Best tokens, logits kept beside them, and hidden states of the next step, which does not count."""
    tokens, kept = group.forward.greedy_and_logits(group.batch(ALL), None, [0, 2])
    wanted, logits = one.forward.greedy_and_logits(one.batch(ALL), None, [0, 2])
    assert torch.equal(tokens, wanted) and torch.equal(kept, logits)
    assert torch.equal(group.forward.greedy(group.batch(ALL), None), wanted)
    assert torch.equal(group.hidden(ALL), one.hidden(ALL))


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 2), pytest.param("bfloat16", 3, marks=pytest.mark.slow)])
def test_compiled_ranks_have_the_bits_of_one_compiled_process(dtype: str, ranks: int, mixtral: Path) -> None:
    compare(mixtral, dtype, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral_windows", "qwen3_moe", "qwen3_moe_dense"])
def test_any_model_that_one_process_compiles(name: str, tmp_path: Path) -> None:
    """Windows, head norms, and layers without experts between those with some."""
    compare(save(build(configs()[name]), tmp_path), "float32", 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_experts(dtype: str, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as quantizing:  # the ranks find kernels where they are, and compile none
        quantizing.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        quantizing.setattr(quantize_at_load, "calibration_tokens", lambda path, longest: [prompt(0, 40)])
        folder = in_int8(mixtral, tmp_path / "int8", dtype)
    torch.set_num_threads(1)  # as kernels leave it; several threads wait for each other in each small product
    compare(folder, dtype, 2)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_compiled_step_that_loses_a_rank_is_repeated_to_the_bit(how: signal.Signals, mixtral: Path) -> None:
    """Two of three ranks are left, then the leader alone, who computes as one process does."""
    one = Side(compiled_alone(mixtral))
    with spread_over(mixtral, 3, deadline=3.0) as spread:
        group = Side(group_forward(spread, compiled=True))
        first, second = pids(spread)
        assert torch.equal(group.step(ALL), one.step(ALL))
        found = group.step(ALL, harmed(first, how))
        if spread.ranks.counts.losses == 0:  # harm that came too late to hit the step hits the next
            assert torch.equal(found, one.step(ALL))
            found = group.step(ALL)
        assert torch.equal(found, one.step(ALL))
        assert (spread.ranks.counts.losses, spread.ranks.counts.repeated_steps) == (1, 1)
        os.kill(second, signal.SIGKILL)
        for _ in range(2):
            assert torch.equal(group.step(ALL), one.step(ALL))
        assert group.tokens == one.tokens


def test_what_cannot_be_compiled_is_told(tmp_path: Path) -> None:
    """And computed by torch, unless kernels are demanded."""
    with spread_over(save(build(configs()["deepseek_v2"]), tmp_path), 2) as spread:
        found = compiled_form(spread, COMPILED, MOST_TOKENS)
        assert isinstance(found, str) and "latent attention" in found
        planes = DeviceKV(spread.spec.kv_layers("float32"), 2, 4)
        with pytest.raises(ValueError, match=r"--kernels compiled: .*latent attention.*choose --kernels auto"):
            forward_of(spread, planes, replace(COMPILED, deterministic=False), MOST_TOKENS)
        assert group_forward(spread).form == "torch x2"
