"""The comparison as a whole, over servers that are scripted: who takes turns, what is kept, what is resumed."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import pytest

from bench.ledger import Ledger
from bench.policies import add_arguments, comparisons_of, options_of
from bench.referee import Comparison, Referee
from tests.fakes.awake import retaken
from tests.fakes.openai_server import scripted_server


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def comparisons(*flags: str) -> list[Comparison]:
    return comparisons_of(parse(*flags))


def test_without_flags_the_policies_are_compared_on_every_workload() -> None:
    found = comparisons()
    assert [one.mixture.name for one in found] == ["chat", "long-mixed", "shared-prefix"]
    assert [one.name for one in found[0].contenders] == ["goodput", "least_loaded", "round_robin", "prefix_aware"]


def test_presets_are_comparisons_of_their_own_and_peers_join_each() -> None:
    found = comparisons(
        "--preset", "modes,chunks", "--workloads", "chat", "--url", "vllm=http://x", "--only", "auto,vllm,slack"
    )
    assert [[one.name for one in each.contenders] for each in found] == [["auto", "vllm"], ["slack", "vllm"]]
    assert len({each.case for each in found}) == 2


def test_more_servers_than_may_be_up_at_once_are_compared_in_groups_with_the_first_in_each() -> None:
    found = comparisons("--preset", "ablation", "--workloads", "chat", "--at-once", "4")
    assert [len(each.contenders) for each in found] == [4, 4]
    assert [each.contenders[0].name for each in found] == ["everything", "everything"]
    assert [each.name for each in found] == ["ablation 1", "ablation 2"]
    together = {one for each in found for one in each.contenders}
    assert together == set(comparisons("--preset", "ablation", "--workloads", "chat", "--at-once", "9")[0].contenders)
    with pytest.raises(ValueError, match="--at-once"):
        comparisons("--at-once", "1")


def test_settings_that_change_what_is_measured_change_the_name_it_is_kept_under() -> None:
    ways = [(), ("--seconds", "20"), ("--slo-scale", "2"), ("--serve-flags", "--quantization int8")]
    assert len({comparisons(*flags)[0].case for flags in ways}) == len(ways)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--preset", "all"], "--preset all"),
        (["--workloads", "chats"], "chats"),
        (["--contender", "a=--mixed 1", "--contender", "a=--mixed 2"], "names"),
        (["--only", "nobody"], "names"),
    ],
)
def test_what_means_nothing_is_refused(flags: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        comparisons(*flags)
    with pytest.raises(ValueError, match="positive"):
        options_of(parse("--seconds", "0"))


def fresh(folder: Path) -> Path:
    """A folder in it that no earlier sitting has written to."""
    return Path(tempfile.mkdtemp(dir=folder))


@pytest.mark.thorough
@retaken
async def test_servers_take_turns_and_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    out = fresh(tmp_path) / "found"
    async with scripted_server() as quick, scripted_server() as slow:

        async def late(number: int, chunk: int) -> None:
            await asyncio.sleep(1.2 if chunk == 0 else 0)

        flags = ["--url", f"quick={quick.url}", "--url", f"slow={slow.url}", "--workloads", "chat", "--out", str(out)]
        flags += ["--seconds", "0.2", "--seeds", "2", "--rate", "50", "--warm-up", "0.2", "--rate-tolerance", "0.9"]
        args = parse(*flags)
        referee = Referee(options_of(args))
        add = referee.ledger.add

        def once(trial: object) -> None:
            add(trial)  # type: ignore[arg-type]
            if len(referee.ledger.trials) == 3:
                slow.script.before_chunk = late
                referee.interrupted.set()

        referee.ledger.add = once  # type: ignore[assignment]
        await referee.run(comparisons_of(args))
        kept = list(Ledger(out.with_suffix(".jsonl")).trials.values())
        assert [(one.key.contender.partition("=")[0], one.key.rate, one.key.seed) for one in kept] == [
            ("quick", 50.0, 0),
            ("slow", 50.0, 0),
            ("quick", 50.0, 1),
        ]
        assert all(one.offered == one.met == 12 for one in kept)
        assert "unfinished" in out.with_suffix(".md").read_text()

        args.warm_up = 1.5  # the slow one has to answer something
        again = Referee(options_of(args))
        async with asyncio.timeout(60):
            running = asyncio.create_task(again.run(comparisons_of(args)))
            while len(again.ledger.trials) < 6 and not running.done():
                await asyncio.sleep(0.05)
            again.interrupted.set()
            await running
    told = json.loads(out.with_suffix(".json").read_text())
    stands = {one["name"]: one for one in told["cases"][0]["contenders"]}
    assert stands["quick"]["goodput"] >= 50.0 and stands["slow"]["failing"] == 50.0
    assert again.ledger.trials.items() >= referee.ledger.trials.items()


@pytest.mark.thorough
@retaken
async def test_the_budget_ends_a_comparison_and_what_is_known_is_written(tmp_path: Path) -> None:
    out = fresh(tmp_path) / "found"
    async with scripted_server() as server:
        args = parse(
            "--url", f"it={server.url}", "--workloads", "chat,long-mixed", "--out", str(out), "--warm-up", "0.1"
        )
        args.seconds, args.budget_minutes = 0.1, 2.0 / 60
        began = time.monotonic()
        await Referee(options_of(args)).run(comparisons_of(args))
    assert time.monotonic() - began < 10
    text = out.with_suffix(".md").read_text()
    assert "## peers: chat" in text and "## peers: long-mixed" in text
