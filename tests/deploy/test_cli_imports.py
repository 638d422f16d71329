"""The command line imports what the command asked for needs, and nothing else: each child of a server starts by it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deploy.cli import ALONE, COMMANDS, main, make_parser
from scripts.flags import commands

API = {"fastapi", "starlette", "pydantic"}
WEB = {*API, "uvicorn"}


def imported(program: str) -> set[str]:
    """What is imported in a process of its own, by the first part of its name, once it has run this."""
    told = f"{program}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(ended.stdout.split("\n")[-2].split())


@pytest.mark.parametrize("name", [*COMMANDS, "kvcache", *ALONE])
def test_a_command_has_all_its_flags_where_others_have_none(name: str) -> None:
    every, asked = commands(make_parser()), commands(make_parser(name))
    assert list(asked) == list(every)
    assert asked[name].format_help() == every[name].format_help()
    flags = {other: len(parser._actions) for other, parser in asked.items()}
    assert flags.pop(name) > 1 and set(flags.values()) == {1}, "but for --help"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nonsense"], ["--nonsense", "serve"]])
def test_without_a_command_all_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    told = "".join(capsys.readouterr())
    assert "COMMAND" in told if not arguments or arguments[0] == "--nonsense" else "upcycle" in told


def test_help_is_quick() -> None:
    program = "from deploy.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert not imported(program) & {*WEB, "torch", "numpy", "rich"}


def test_what_is_no_command_is_told_of_as_among_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--nonsense", "serve", "model", "--port", "1"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --nonsense\n")


def test_a_command_that_runs_imports_no_other() -> None:
    """A node that has room nowhere, and so ends once it has looked at its settings."""
    program = "import sys; from deploy.cli import main; code = main(['kvcache', '--ram', '0'])"
    begun = "'deploy.kvcache_process' in sys.modules and 'deploy.autoscale' not in sys.modules"
    told = imported(f"{program}; assert code == 2 and {begun}")
    assert not told & {*WEB, "torch", "bench"}


def test_children_begin_before_the_api_is_imported() -> None:
    """It is imported in a thread of the front, once they have been started (`deploy.serve._frontend`)."""
    assert not imported("import deploy.cli, deploy.serve") & API


def test_a_pool_node_waits_for_neither_torch_nor_a_web_framework() -> None:
    assert not imported("import deploy.cli, deploy.kvcache_process") & {*WEB, "torch"}


def test_a_worker_waits_for_no_web_framework() -> None:
    """It has one where it opens its door: --metrics-port."""
    assert not imported("import deploy.cli, deploy.worker.process") & WEB
