"""What tells how fast the simulator is refuses what cannot be before it begins, naming the flag."""

from __future__ import annotations

import pytest

from deploy.simulator import speed


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--jobs", each) for each in ("0", "-1")),
        *(("--requests", each) for each in ("0", "3")),
        *(("--further", each) for each in ("1", "-1")),
        *(("--rate", each) for each in ("0", "nan", "inf")),
        *(("--noise", each) for each in ("-1", "nan")),
        *(("--every", each) for each in ("-1", "100")),
        ("--num-kv-blocks", "0"),
        ("--workers", "mixed"),
        ("--workload", "chatter"),
    ],
)
def test_what_cannot_be_is_refused(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def began(*_: object) -> None:
        raise AssertionError("a run was begun")

    monkeypatch.setattr(speed, "measure", began)
    with pytest.raises(SystemExit) as left:
        speed.main([f"{flag}={value}"])
    assert left.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert flag in told or value in told


def test_memory_is_told_once_for_every_so_many_that_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    ended = speed._teller(10)
    for count in (4, 5, 3, 2, 25):
        ended(count)
    speed._teller(0)(100)
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["12", "39"]
    assert all(" MB, " in line for line in told)
