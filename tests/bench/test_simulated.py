"""Measured runs and their repetition: what the simulator is given, what is kept, and where an ended run goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench import served_runs, simulated
from bench.connection import HttpClient
from bench.deployments import (
    DEPLOYMENTS,
    PRELUDE_SECONDS,
    WARM_TEXTS,
    cases_of,
    deployments,
    mean_profile,
    pace,
    prelude,
    row_of,
    salted,
    slower,
)
from bench.endpoint import Endpoint, RequestShape, Target
from bench.mixture import MIXTURES
from bench.own_simulator import simulator_flags
from bench.premises import STEADY, VARIABLE, Premises, premises
from bench.prompts import IdPrompts
from bench.simulated import MeasuredTwice, asked, options_of
from bench.sitting import OpenServer
from bench.sse import Outcome
from deploy import cli
from deploy.placement.given import load_placement
from deploy.simulator.command import study_of
from deploy.simulator.trace_files import as_arrivals, read_trace
from serving.messages import Slo
from serving.step_cost import StepCost
from tests.fakes.openai_server import ScriptedServer

PROFILE: dict[str, Any] = {
    "model": "some",
    "cost": {"fixed": 9e-3, "token": 8e-4, "pair": 0.0, "sequence": 1e-4, "context": 0.0, "error": 0.2, "samples": 900},
    "kv_tokens": 16384,
    "max_model_len": 2048,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 512,
    "layers": 30,
    "kv_bytes": 23040,
}
FIGURES = {
    **{"rate": 1.0, "offered": 36, "attainment": 1.0, "errors": {}},
    **dict.fromkeys(("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90"), 0.5),
}


@pytest.mark.parametrize("workload", MIXTURES)
def test_a_measured_run_is_a_trace_of_the_same_requests(workload: str, tmp_path: Path) -> None:
    mixture = MIXTURES[workload]
    timed = salted(mixture.timed(2.0, 40, seed=3), "a run")
    outcome = Outcome(prompt_tokens=1, max_tokens=1, sent=1.0, first=1.5, last=1.5, reported=1)
    rows = [row_of(one, outcome) for one in timed]
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    found = as_arrivals(read_trace(file), Slo(ttft_ms=1.0, tpot_ms=1.0))
    assert [len(one.request.prompt) for one in found] == [one.ask.prompt_tokens for one in timed]
    assert [one.output_tokens for one in found] == [one.ask.output_tokens for one in timed]
    assert [one.request.slo.ttft_ms for one in found] == [one.kind.slo.ttft_ms for one in timed]
    assert [one.request.service_class for one in found] == [one.kind.service_class or "standard" for one in timed]
    count = max(kind.prefix_tokens for kind in mixture.kinds)
    if count:
        measured = [one.ask.pieces[:count] for one in timed]
        simulated_ = [one.request.prompt[:count] for one in found]
        for number, pieces in enumerate(measured):
            assert measured.index(pieces) == simulated_.index(simulated_[number])
        assert len(set(measured)) < len(measured)


def test_shared_texts_are_cached_before_they_are_asked_for_and_not_counted(tmp_path: Path) -> None:
    timed = salted(MIXTURES["shared-prefix"].timed(2.0, 60, seed=3), "a run")
    before, outcome = prelude(timed), Outcome(prompt_tokens=1, max_tokens=1, sent=1.0, first=1.5, last=1.5, reported=1)
    texts = [one.ask.pieces[:896] for one in before]
    assert len(set(texts)) == len(texts) == WARM_TEXTS and set(texts) <= {one.ask.pieces[:896] for one in timed}
    rows = [row_of(one, outcome, counted=False) for one in before] + [row_of(one, outcome) for one in timed]
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    found = read_trace(file)
    assert [one.counted for one in found] == [False] * WARM_TEXTS + [True] * 60
    assert found[WARM_TEXTS].arrival_s - found[WARM_TEXTS - 1].arrival_s >= PRELUDE_SECONDS
    assert prelude(salted(MIXTURES["chat"].timed(2.0, 9, seed=3), "a run")) == []


def test_profiles_are_taken_in_the_mean_and_compared_by_what_a_request_takes() -> None:
    thrice = {**PROFILE, "cost": {name: 3 * value for name, value in PROFILE["cost"].items()}}
    both = mean_profile([PROFILE, thrice])
    assert both["cost"]["token"] == pytest.approx(16e-4) and both["kv_tokens"] == PROFILE["kv_tokens"]
    assert pace(thrice, PROFILE) == pytest.approx(2.0) and pace(both, both) == 0.0
    assert slower({"prefill": thrice, "decode": PROFILE}, {"prefill": PROFILE, "decode": PROFILE}) == pytest.approx(2.0)


def test_threads_are_each_workers_own(tmp_path: Path) -> None:
    embedded, split = deployments(4)["embedded"], deployments(4)["split"]
    assert embedded.flags(tmp_path) == ("--threads", "3") and options_of(asked([])).base[:1] != ("--threads",)
    (tmp_path / "split.toml").write_text(split.placement)
    plan = load_placement(split.flags(tmp_path)[1])
    assert [(group.kind, group.settings["threads"]) for group in plan.workers] == [("prefill", 2), ("decode", 1)]
    assert {name: each.threads for name, each in deployments(2).items()} == {
        "embedded": {"mixed": 1},
        "split": {"prefill": 1, "decode": 1},
    }
    assert deployments(1) == deployments(2)


def test_runs_share_no_text_with_each_other() -> None:
    timed = MIXTURES["shared-prefix"].timed(2.0, 40, seed=3)
    one, other = ({each.ask.pieces[:896] for each in salted(timed, name)} for name in ("one", "other"))
    assert len(one) == len(other) == len({each.ask.pieces[:896] for each in timed}) and not one & other


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_the_simulator_is_given_the_workers_as_they_were_learned(deployment: str, tmp_path: Path) -> None:
    """The flags are those of the command, and name each role's own profile, the front and the end of a handoff."""
    chosen = DEPLOYMENTS[deployment]
    profiles = {role: {**PROFILE, "kv_tokens": 4096 * (1 + place)} for place, role in enumerate(chosen.roles)}
    learned = {"profiles": profiles, "front_ms": 3.0, "commit_ms": 4.0}
    flags = simulator_flags(chosen, learned, profiles, tmp_path / "found")
    parsed = cli.make_parser().parse_args(["simulate", *flags])
    plan = study_of(parsed, parsed.policy).plan
    assert [plan.hardware(role).kv_tokens for role in plan.roles] == [each["kv_tokens"] for each in profiles.values()]
    assert [role.value for role in plan.roles] == [*chosen.roles] and plan.learned
    assert {role.value: noise for role, noise in plan.noise_of.items()} == dict.fromkeys(chosen.roles, 0.2)
    assert plan.front_seconds == pytest.approx(3e-3) and plan.network.commit_seconds == pytest.approx(4e-3)
    assert plan.network.message_seconds == (0.0 if deployment == "embedded" else pytest.approx(2e-4))


@pytest.fixture
async def measuring(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """A scripted server in the place of ours, and what was done, in order."""
    done: list[str] = []
    client = HttpClient(server.url)
    endpoint = Endpoint(Target(name="it", url=server.url), client, RequestShape(model="scripted"))

    async def opened(contender: Any, *_: object, **__: object) -> OpenServer:
        done.append(f"opened {contender.name}")
        return OpenServer(endpoint=endpoint, prompts=IdPrompts(pool=(5, 6, 7)))

    async def warmed(*_: object) -> float:
        done.append("warmed")
        return 100.0

    async def profiled(one: served_runs.ServedDeployment) -> served_runs.Profiles:
        done.append("profiled")
        return dict.fromkeys(one.deployment.roles, PROFILE)

    async def simulated_(rows: Sequence[object], flags: Sequence[str]) -> dict[str, Any]:
        done.append(f"simulated {len(rows)}")
        return dict(FIGURES)

    async def settled(_: OpenServer) -> None:
        """There is no server of ours to wait for."""

    for name, fake in (("open_server", opened), ("warm_up", warmed), ("simulate", simulated_)):
        monkeypatch.setattr(simulated, name, fake)
    monkeypatch.setattr(served_runs.ServedDeployment, "profiles", profiled)
    monkeypatch.setattr(served_runs, "settle", settled)
    monkeypatch.setattr(simulated, "model_sizes", lambda model: (30, 23_040))
    monkeypatch.setattr(simulated, "commit", str)
    for name in ("HEARTBEAT_SECONDS", "LONE_PAUSE"):
        monkeypatch.setattr(served_runs, name, 0.0)
    yield done
    await client.close()


async def test_an_ended_measurement_goes_on_where_it_was(measuring: list[str], tmp_path: Path) -> None:
    flags = ("--deployments", "split", "--workloads", "chat", "--seconds", "0.1", "--rounds", "2")
    flags += ("--out", str(tmp_path / "found"))
    first = MeasuredTwice(options_of(asked([*flags])), Premises())
    note = first.ledger.note

    def once(name: str, value: Any) -> None:
        note(name, value)
        if name.startswith("run"):
            first.interrupted.set()

    first.ledger.note = once  # type: ignore[method-assign]
    await first.run()
    around = ["simulated 12"] * 2  # once the server has ended, and with it the trace of its steps
    learned = ["opened split", *["warmed", "profiled"] * 3]
    assert measuring == [*learned, *["profiled"] * 3, *around, "simulated 12"]
    measuring.clear()
    await MeasuredTwice(options_of(asked([*flags])), Premises()).run()
    assert measuring == ["opened split", "warmed", *["profiled"] * 3, "simulated 12"], "what there was is kept"
    told = json.loads((tmp_path / "found.json").read_text())
    assert [(one["share"], len(one["pairs"])) for one in told["cases"]] == [(0.6, 2)]
    text = " ".join((tmp_path / "found.md").read_text().split())
    assert "split | chat" in text and "took +0%, +0% in the runs" in text
    measuring.clear()
    await MeasuredTwice(options_of(asked([*flags, "--again"])), Premises()).run()
    assert measuring == ["simulated 12"] * 2
    with pytest.raises(ValueError, match="give another --out"):
        MeasuredTwice(options_of(asked([*flags, "--seed", "1"])), Premises())


def learned_token(profile: Path) -> float:
    found: float = json.loads(profile.read_text())["cost"]["token"]
    return found


async def test_what_was_learned_in_part_is_learned_again(measuring: list[str], tmp_path: Path) -> None:
    """A command that was killed has told nothing of what is around the steps, and its trace is written over."""
    flags = ["--deployments", "split", "--workloads", "chat", "--seconds", "0.1", "--rounds", "1"]
    twice = MeasuredTwice(options_of(asked([*flags, "--out", str(tmp_path / "found")])), Premises())
    twice.ledger.note("learned split", {"capacity": {"chat": 1.0}, "profiles": {}, "short": [], "usual": []})
    twice.write()
    assert "split" not in json.loads((tmp_path / "found.json").read_text())["learned"]
    await twice.run()
    assert measuring[1:7] == ["warmed", "profiled"] * 3
    assert twice.ledger.notes["learned split"]["capacity"]["chat"] == 100.0
    assert {"front_ms", "commit_ms"} <= twice.ledger.notes["learned split"].keys()


async def test_killed_before_it_knew_what_is_around_the_steps_it_goes_on_from_there(
    measuring: list[str], tmp_path: Path
) -> None:
    """All runs are measured, and the traces are as the servers left them."""
    flags = ["--deployments", "split", "--workloads", "chat", "--seconds", "0.1", "--rounds", "1"]
    flags += ["--out", str(tmp_path / "found")]
    first = MeasuredTwice(options_of(asked(flags)), Premises())
    await first.run()
    known = first.ledger.notes["learned split"]
    left = {name: value for name, value in known.items() if name not in ("front_ms", "commit_ms")}
    first.ledger.note("learned split", left)
    measuring.clear()
    again = MeasuredTwice(options_of(asked([*flags, "--again"])), Premises())
    await again.run()
    assert measuring == ["simulated 12"] * 3, "what single requests took, and the run; nothing is measured"
    assert again.ledger.notes["learned split"].keys() == known.keys()


async def test_a_run_is_simulated_by_what_was_learned_at_its_time(
    measuring: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is three times as slow as when capacity was measured: so is the rate, and all that is simulated."""
    flags = ("--deployments", "split", "--workloads", "chat", "--seconds", "0.1", "--rounds", "1")
    twice = MeasuredTwice(options_of(asked([*flags, "--out", str(tmp_path / "found")])), Premises())
    note = {"capacity": {"chat": 300.0}, "front_ms": 7.0, "commit_ms": 1.0}
    twice.ledger.note("learned split", {**note, "profiles": dict.fromkeys(("prefill", "decode"), PROFILE)})
    cost: dict[str, float] = PROFILE["cost"]
    slow = {**PROFILE, "cost": {name: 3 * value for name, value in cost.items()}}

    async def profiled(_: served_runs.ServedDeployment) -> served_runs.Profiles:
        return {"prefill": slow, "decode": slow}

    asked_for: dict[str, float] = {}

    async def simulated_(rows: Sequence[object], given: Sequence[str]) -> dict[str, Any]:
        asked_for["front"] = float(given[given.index("--front-ms") + 1])
        asked_for["token"] = await asyncio.to_thread(learned_token, Path(given[given.index("--profile") + 1]))
        return dict(FIGURES)

    monkeypatch.setattr(served_runs.ServedDeployment, "profiles", profiled)
    monkeypatch.setattr(simulated, "simulate", simulated_)
    await twice.run()
    (run,) = (kept for name, kept in twice.ledger.notes.items() if name.startswith("run "))
    assert run["rate"] == pytest.approx(60.0)
    assert asked_for["front"] == pytest.approx(21.0)
    assert asked_for["token"] == pytest.approx(3 * cost["token"])


def test_paced_servers_are_given_a_pace_and_a_model_of_their_own() -> None:
    before = os.environ.get(VARIABLE)
    with premises(STEADY) as on:
        assert on.model is not None and (on.model / "config.json").exists() and on.module == "scripts.paced"
        assert StepCost(**json.loads(os.environ[VARIABLE])) == STEADY
        split, embedded = (DEPLOYMENTS[name].flags(on.model.parent, on.model) for name in ("split", "embedded"))
        given = cli.make_parser().parse_args(["serve", *split, *options_of(asked(["--paced"])).base])
        assert (given.prefill, given.decode, given.mixed) == (1, 1, 0)
        assert not cli.children_of(vars(cli.make_parser().parse_args(["serve", *embedded])))
    assert os.environ.get(VARIABLE) == before and not on.model.exists()
    with premises(None) as on:
        assert on == Premises()


async def test_ended_in_between_it_writes_what_there_is(
    measuring: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However far from a run's end it is."""

    async def endless(*_: object) -> float:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(simulated, "warm_up", endless)
    assert await simulated.measure(options_of(asked(["--out", str(tmp_path / "found")])), Premises()) == 130
    assert measuring == ["opened embedded", "opened split"] and "wrote" in capsys.readouterr().err
    assert (tmp_path / "found.json").exists()


async def test_nothing_begins_after_the_time(measuring: list[str], tmp_path: Path) -> None:
    twice = MeasuredTwice(options_of(asked(["--minutes", "0.0001", "--out", str(tmp_path / "found")])), Premises())
    await asyncio.sleep(0.01)
    await twice.run()
    assert measuring == [] and (tmp_path / "found.md").exists()


def test_deployments_take_turns_and_everything_comes_once_before_it_comes_again() -> None:
    cases = [case.key for case in cases_of(asked(["--workloads", "chat,long-mixed", "--rounds", "2"]))]
    begin = ["embedded, chat, 0.6", "split, chat, 0.6", "embedded, long-mixed, 0.6"]
    assert cases[:3] == [f"{case}, round 1" for case in begin]
    assert len(set(cases)) == 8 and all("round 1" in case for case in cases[:4])


@pytest.mark.parametrize(
    "wrong", [("--shares", "0.6,x"), ("--shares", "0"), ("--deployments", "x"), ("--seconds", "0"), ("--rounds", "0")]
)
def test_what_cannot_be_is_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=wrong[0]):
        options_of(asked([*wrong]))
