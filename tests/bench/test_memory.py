"""Processes of a server are told apart by the commands that they show."""

from __future__ import annotations

import pytest

from bench.memory import process_name
from serving.child_process import module_command


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ((*module_command("deploy.cli"), "prefill", "model"), "prefill"),
        ((*module_command("deploy.cli"), "kvcache"), "pool node"),
        ((*module_command("deploy.cli"), "serve"), "router"),
        ((*module_command("serving.api.body_process"), "10"), "request bodies"),
        ((*module_command("serving.fork_server_process"), "22"), "fork server"),
        (("/usr/bin/sleep", "1"), "sleep"),
    ],
)
def test_what_a_process_is(command: tuple[str, ...], name: str) -> None:
    assert process_name([*command, "", ""], alone=False) == name
