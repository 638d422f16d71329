"""--log-format json for every command that serves: its lines, its warnings, what ends it, and what it is told wrong."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.cli import main
from deploy.placement.compose import render
from deploy.placement.image import ImageSource
from deploy.placement.reader import read_placement
from deploy.runtime.secrets_known import secrets_of
from deploy.runtime.settings import read_settings
from serving.log_lines import RequestMarks
from serving.redaction import Redactor

SERVING = ("serve", "router", "prefill", "decode", "mixed", "kvcache")
KEY = "the-key-of-a-client"


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("command", SERVING)
def test_every_line_of_a_role_is_an_object(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(given: object, settings: object) -> int:
        logging.getLogger("a.library").warning("one\nforged, with %s", KEY)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(False)
            logging.captureWarnings(True)
            warnings.warn("old\nand new", DeprecationWarning, stacklevel=1)
        raise OSError(f"the end, {KEY}\n")

    monkeypatch.setattr(cli, "_start", serve)
    monkeypatch.setenv("MILLRACE_API_KEY", f"{KEY},another")
    assert main([command, "--log-format", "json", "--worker-name", "its name"]) == 2
    lines = objects(capsys.readouterr().err)
    assert [line["level"] for line in lines] == ["warning", "warning", "critical"]
    assert {(line["role"], line["name"], line["pid"]) for line in lines} == {(command, "its name", os.getpid())}
    assert KEY not in str(lines) and lines[2]["message"] == "the end, [redacted]\n"


@pytest.mark.parametrize("by_variable", [False, True])
def test_what_is_wrong_with_the_settings_is_told_in_an_object(
    by_variable: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_variable:
        monkeypatch.setenv("MILLRACE_LOG_FORMAT", "json")
    flags = [] if by_variable else ["--log-format", "json"]
    assert main(["decode", "--block-size", "0", *flags]) == 2
    (line,) = objects(capsys.readouterr().err)
    assert line["role"] == "decode" and "--block-size" in line["message"]


def test_a_process_knows_its_own_secrets(tmp_path: Path) -> None:
    pepper = tmp_path / "pepper"
    pepper.write_bytes(b"pepper, of a file\xff\n")
    given = {"api_key": "one-key,another-key", "cluster_key": "of-the-cluster", "key_pepper_file": str(pepper)}
    settings = read_settings(given)
    environ = {"HF_TOKEN": "hugging", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=let me in,x=y", "HOME": "/home"}
    known = secrets_of(settings, environ)
    assert {"one-key", "another-key", "of-the-cluster", "hugging", "let me in"} <= known and "/home" not in known
    assert Redactor(known).redacted(f"{pepper.read_bytes()!r}") == "b'[redacted]\\n'"
    pepper.unlink()
    assert secrets_of(settings, environ) == known - {b"pepper, of a file\xff".decode("utf-8", "surrogateescape")}


def test_a_placement_file_tells_every_service() -> None:
    text = '[common]\nlog_format = "json"\n[router]\naccess_log = true\n[kvcache]\n'
    text += '[[workers]]\nrole = "prefill"\n[[workers]]\nrole = "decode"\n'
    rendered = render(read_placement(text), ImageSource(name="millrace:cpu"))
    assert rendered.count("--log-format=json") == 4 and rendered.count("--access-log") == 1


def test_marks_without_a_request_are_none() -> None:
    assert RequestMarks().values() == {}
