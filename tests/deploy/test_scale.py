"""When `millrace scale` has its answer, and what it says of one that is lost or that another command has overtaken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deploy import cli, scale
from deploy.on_ray.actors import Deployed, DeploymentActor
from deploy.scale import is_answered
from tests.deploy.on_ray.played_ray import PlayedRay, remote

RUNNING, WAITING = {"prefill-0": "running"}, {"prefill-0": "running", "prefill-1": "waiting"}


@pytest.mark.parametrize(
    ("deployed", "answered"),
    [
        (Deployed(counts={}, services=RUNNING, scaled=1), False),
        (Deployed(counts={}, services=WAITING, scaled=2), False),
        (Deployed(counts={}, services=RUNNING, scaled=2), True),
        (Deployed(counts={}, services=RUNNING, scaled=3), True),
    ],
    ids=["taken before", "not there yet", "there", "a later one"],
)
def test_a_command_is_answered_by_what_is_told_of_it(deployed: Deployed, answered: bool) -> None:
    assert is_answered(deployed, 2) is answered


class Commanded:
    """A deployment whose router's process takes what is wished each time somebody asks how things are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: dict[str, int] | None = None):
        self.ray, self.others = PlayedRay(), others or {}
        self.holder = DeploymentActor(("prefill", "decode"))
        handle = SimpleNamespace(scale=remote(self.holder.scale), deployed=remote(self.deployed))
        for name in ("get_actor", "shutdown"):
            setattr(self.ray, name, lambda *_, **__: handle)
        monkeypatch.setattr(scale, "connect", lambda *_, **__: self.ray)
        monkeypatch.setattr(scale, "POLL_SECONDS", 0.0)

    def deployed(self) -> Deployed | None:
        before = self.holder.deployed() or Deployed(counts={"prefill": 1, "decode": 1}, services={})
        command, wanted = self.holder.exchange(before)
        counts = {**before.counts, **wanted, **self.others}
        self.holder.exchange(Deployed(counts=counts, services={}, scaled=command))
        return self.holder.deployed()


def test_a_look_that_is_lost_is_followed_by_another(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    there = Commanded(monkeypatch)
    losing, answers = there.ray.get, []

    def get(asked: Any, timeout: float) -> Any:
        answers.append(asked)
        there.ray.lost = int(len(answers) in (2, 3))
        return losing(asked, timeout)

    monkeypatch.setattr(there.ray, "get", get)
    assert cli.main(["scale", "decode=2"]) == 0
    assert capsys.readouterr().out == "prefill=1 decode=2\n" and len(answers) == 4


def test_a_command_of_which_nobody_knows_whether_it_was_taken_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    there = Commanded(monkeypatch)
    there.ray.lost = 1
    assert cli.main(["scale", "decode=2"]) == 2
    assert "may have been taken, or not" in capsys.readouterr().err


def test_a_command_that_another_has_overtaken_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    Commanded(monkeypatch, others={"decode": 3})
    assert cli.main(["scale", "decode=2"]) == 2
    assert "another command has changed it since; there are prefill=1 decode=3" in capsys.readouterr().err


def test_a_command_that_cannot_be_granted_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Commanded(monkeypatch)
    assert cli.main(["scale", "draft=2"]) == 2
    assert capsys.readouterr().err == "millrace: there is no group 'draft'; there are prefill, decode\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("decode=2", "decode=3"), "a group is named twice"),
        (("decode=2", "--timeout", "nan"), "'nan' is no number of seconds from 0"),
        (("decode=2", "--timeout", "-1"), "'-1' is no number of seconds from 0"),
        ((f"decode={2**64}",), "a group has from 1 to 1000 services"),
        (("decode=-1",), "not of the form"),
    ],
)
def test_a_command_that_means_nothing_is_refused_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: tuple[str, ...], told: str
) -> None:
    there = Commanded(monkeypatch)
    try:
        code = cli.main(["scale", *arguments])
    except SystemExit as ended:  # argparse's
        code = int(ended.code or 0)
    assert code == 2 and told in capsys.readouterr().err
    assert there.holder.exchange(Deployed(counts={}, services={}))[1] == {}


def test_while_it_waits_it_says_for_what_once(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    there = Commanded(monkeypatch)
    looks = iter([{"decode-1": "waiting"}] * 3 + [{"decode-1": "starting"}] * 2)

    def deployed() -> Deployed:
        return Deployed(counts={"decode": 2}, services=next(looks, {"decode-1": "running"}), scaled=2**63)

    handle = SimpleNamespace(scale=remote(there.holder.scale), deployed=remote(deployed))
    monkeypatch.setattr(there.ray, "get_actor", lambda *_, **__: handle)
    assert cli.main(["scale", "decode=2"]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == ["waiting: decode=2 (decode-1 waiting)", "waiting: decode=2 (decode-1 starting)"]
    assert told.out == "decode=2\n"
