"""Rooflines and profiles from files: near what was measured, exact where they are written out, told where wrong."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.profile_worker import profile_in
from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.hardware import Hardware, ModelShape, Roofline, roofline_profile
from deploy.simulator.profile_files import read_profile
from deploy.simulator.profiles import PROFILES, Fitted, StepWork
from deploy.simulator.run import simulate
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass, trace
from router.overview import measured
from serving.errors import NotFound
from serving.messages import Role
from tests.deploy.simulator.test_profiles import prompts

OPT13B = ModelShape(name="opt-13b", parameters=12.6e9, layers=40, hidden=5120, kv_heads=40, head_dim=128)
A100 = Hardware(flops=312e12, bandwidth=2.039e12, memory=85.9e9)
DESCRIPTION = """
[model]
name = "opt-13b"
parameters = 12.6e9
layers = 40
hidden = 5120
kv_heads = 40
head_dim = 128

[hardware]
flops = 312e12
bandwidth = 2.039e12
memory = 85.9e9
"""
MEASURED = {
    "model": "some",
    "cost": {"fixed": 1e-3, "token": 2e-4, "pair": 0, "sequence": 1e-5, "context": 1e-7, "error": 0.1, "samples": 9},
    "kv_tokens": 4096,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
}


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(prompts(512), id="a prompt"),
        pytest.param(prompts(1800), id="a long prompt"),
        pytest.param(StepWork(decoding=1, decoding_context=500), id="one sequence"),
        pytest.param(StepWork(decoding=32, decoding_context=32 * 700), id="many sequences"),
    ],
)
def test_a_roofline_comes_near_the_tables(work: StepWork) -> None:
    assert Roofline(OPT13B, A100).seconds(work) == pytest.approx(PROFILES["a100-opt13b"].seconds(work), rel=0.1)


def test_a_roofline_is_what_it_says() -> None:
    """A step reads the weights and computes its tokens; two devices halve both and add sums."""
    plain = Hardware(flops=1e14, bandwidth=1e12, memory=1e11, compute_share=1, memory_share=1, step_seconds=0)
    model = ModelShape(name="m", parameters=1e10, layers=10, hidden=1000, kv_heads=10, head_dim=100, max_model_len=64)
    one = StepWork(decoding=1, decoding_context=0)
    assert Roofline(model, plain).seconds(one) == pytest.approx(2e10 / 1e12 + 2e10 / 1e14 + 4e-5)
    long = StepWork(prompts=1, prompt_tokens=10_000)
    assert Roofline(model, plain).seconds(long) == pytest.approx(2e10 / 1e12 + 2 * 1e10 * 10_000 / 1e14)
    two = Hardware(
        flops=1e14, bandwidth=1e12, memory=1e11, compute_share=1, memory_share=1, step_seconds=0, devices=2, link=1e11,
        link_share=0.5,
    )  # fmt: skip
    sums = 2 * 10 * 1 * 1000 * 2 * 10_000 / 5e10
    assert Roofline(model, two).seconds(long) == pytest.approx(1e10 / 1e12 + 10_000 * 1e10 / 1e14 + sums)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500)), max_size=4), st.integers(0, 60))
def test_more_work_never_takes_less_on_a_roofline(chunks: list[tuple[int, int]], decoding: int) -> None:
    work, roofline = StepWork(decoding=decoding, decoding_context=decoding * 300), Roofline(OPT13B, A100)
    before = roofline.seconds(work)
    for start, count in chunks:
        work.add_prompt(start, count)
        assert roofline.seconds(work) >= before
        before = roofline.seconds(work)


def test_kv_lies_in_what_the_weights_leave() -> None:
    assert roofline_profile("a", OPT13B, A100).kv_tokens == pytest.approx(PROFILES["a100-opt13b"].kv_tokens, rel=0.05)
    with pytest.raises(ValueError, match="leave room"):
        roofline_profile("a", OPT13B, Hardware(flops=1e14, bandwidth=1e12, memory=2.5e10))


def test_a_description_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DESCRIPTION)
    found = read_profile(file)
    assert (found.name, found.kv_bytes, found.steps) == ("mine", 819_200, Roofline(OPT13B, A100))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("flops", "flop"), "hardware.flop:"),
        (("layers = 40\n", ""), "model.layers: missing"),
        (("[hardware]", "[machine]"), "a description has the tables"),
        (("hidden = 5120", "hidden = 'x'"), "model.hidden: 'x'"),
        (("[model]", "[model"), "mine.toml:"),
        (("memory = 85.9e9", "memory = 20e9"), "leave room"),
    ],
)
def test_what_is_wrong_in_a_description_is_told(change: tuple[str, str], told: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DESCRIPTION.replace(*change))
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        read_profile(file)
    assert told in str(error.value)


def test_what_a_worker_measured_becomes_a_profile(tmp_path: Path) -> None:
    few = {"name": "b", "measured": {**MEASURED, "cost": {**MEASURED["cost"], "samples": 2}}}  # type: ignore[dict-item]
    workers = [few, {"name": "a", "measured": MEASURED}, {"name": "c", "measured": None}]
    name, found = profile_in(workers, None)
    file = tmp_path / "worker.json"
    file.write_bytes(orjson.dumps({**found, "layers": 30, "kv_bytes": 23_040}))
    profile = read_profile(file)
    assert name == "a" and profile_in(workers, "b")[0] == "b"
    assert isinstance(profile.steps, Fitted) and profile.steps.cost.token == 2e-4
    assert (profile.model, profile.kv_tokens, profile.max_num_seqs, profile.layers) == ("some", 4096, 32, 30)
    for wanted in ("c", "nobody"):
        with pytest.raises(NotFound):
            profile_in(workers, wanted)


def test_what_a_simulated_worker_learned_is_near_what_it_was_given(tmp_path: Path) -> None:
    """From its heartbeat through the router's overview and the file into a profile."""
    given = PROFILES["a100-opt13b"]
    found: list[SimulatedCluster] = []

    async def watch(cluster: SimulatedCluster) -> None:
        found.append(cluster)

    traffic = Traffic(name="some", classes=(TrafficClass(prompt=Lengths(300, 0.8), output=Lengths(20, 0.8)),))
    plan = ClusterPlan.of(given, (Role.MIXED,), "least_loaded", noise=0.02)
    simulate(plan, trace(traffic, given, 80, 0), 4.0, watch=watch)
    (worker,) = found[0].workers.values()
    told = measured(worker.status())
    assert told is not None
    file = tmp_path / "worker.json"
    file.write_bytes(orjson.dumps({**told, "layers": given.layers, "kv_bytes": given.kv_bytes}))
    learned = read_profile(file)
    assert learned.kv_tokens == given.kv_tokens
    assert learned.decode_seconds(4, 320) == pytest.approx(given.decode_seconds(4, 320), rel=0.15)
    assert learned.prompt_seconds(300) == pytest.approx(given.prompt_seconds(300), rel=0.15)


def test_a_worker_file_that_is_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "worker.json"
    file.write_text('{"model": "some", "cost": {"fixed": -1}}')
    with pytest.raises(ValueError, match=r"cost\.fixed: -1"):
        read_profile(file)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", DESCRIPTION + "devices = 0.5", "hardware.devices: 0.5 is not a whole number"),
        ("a.toml", DESCRIPTION.replace("layers = 40", "layers = 1" + "0" * 400), "model.layers: 1000"),
        ("a.toml", DESCRIPTION.replace('name = "opt-13b"', "name = 5"), "model.name: 5 is no text"),
        ("a.json", {"layers": 30, "kv_bytes": 10, "kv_tokens": 0.5}, "kv_tokens: 0.5 is not a whole number"),
        ("a.json", {"cost": dict.fromkeys(("fixed", "token", "pair", "sequence", "context", "error"), 0)}, "no time"),
    ],
)
def test_sizes_that_cannot_be_are_told(name: str, text: str | dict[str, object], told: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode() if isinstance(text, str) else orjson.dumps({**MEASURED, **text}))
    with pytest.raises(ValueError, match=name) as error:
        read_profile(file)
    assert told in str(error.value)
