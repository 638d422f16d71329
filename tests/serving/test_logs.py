"""Log lines: the marks of their request, one line each whatever they say, and everything that Python would print."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import logs
from serving.child_process import module_command
from serving.log_config import LogConfig
from serving.log_lines import (
    FIELDS,
    MOST_CHARACTERS,
    NO_REQUEST,
    JsonFormatter,
    LogSetup,
    RequestMarks,
    TextFormatter,
    setup_of,
)
from serving.logs import _marks, bare_line, mark_task, request_context, set_worker, setup_logging
from serving.messages import Request, SamplingParams, owned, shown_tenant
from serving.redaction import Redactor
from serving.tracing import TraceContext

TRACE = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
SETUP = LogSetup(name="decode-0", role="decode", form="json")
ALWAYS = {"timestamp", "level", "logger", "message", "role", "name", "pid"}
log = logging.getLogger("tests.logs")


def request(name: str, **fields: Any) -> Request:
    return Request(request_id=name, prompt=(1,), sampling=SamplingParams(max_tokens=1), **fields)


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def answers() -> AsyncGenerator[str]:
    with request_context(request("r")):
        yield _marks.get().request_id
        yield _marks.get().request_id


def test_the_marks_are_there_inside_alone() -> None:
    with request_context(request("r", trace=TRACE, service_class="batch", tenant=owned("digest", "a salt"))):
        told = _marks.get().values()
        assert told == {
            "request_id": "r",
            "trace_id": "0af7651916cd43dd8448eb211c80319c",
            "span_id": "b7ad6b7169203331",
            "class": "batch",
            "tenant": shown_tenant("digest"),
        }
        with request_context(request("other")):
            assert _marks.get() == RequestMarks(request_id="other", service_class="standard")
        assert _marks.get().values() == told
    assert _marks.get() == NO_REQUEST


async def test_a_stream_that_was_left_may_be_ended_by_another_task() -> None:
    """So gRPC does with a call whose connection broke."""
    stream = answers()
    assert await asyncio.create_task(anext(stream)) == "r"
    await asyncio.create_task(stream.aclose())
    assert _marks.get() == NO_REQUEST


async def test_a_tasks_own_marks_are_gone_with_it() -> None:
    async def serve() -> str:
        mark_task("served")
        return _marks.get().request_id

    assert await asyncio.create_task(serve()) == "served"
    assert _marks.get() == NO_REQUEST


def test_an_object_has_the_fields_of_every_line_and_those_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(SETUP)
    before = datetime.now(UTC)
    with request_context(request("r")):
        log.warning("took %d ms", 5, extra={FIELDS: {"status": 200, "route": "mr-abcd-secret12"}})
    (line,) = objects(capsys.readouterr().err)
    assert line.keys() == ALWAYS | {"request_id", "class", "status", "route"}
    assert (line["level"], line["logger"], line["message"]) == ("warning", "tests.logs", "took 5 ms")
    assert (line["role"], line["name"], line["request_id"], line["status"]) == ("decode", "decode-0", "r", 200)
    assert line["route"] == "mr-abcd-[redacted]"
    assert line["timestamp"].endswith("Z") and before <= datetime.fromisoformat(line["timestamp"]) <= datetime.now(UTC)


def test_a_workers_lines_name_its_generation_once_it_is_known_and_the_role_it_has_now(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging(SETUP)
    set_worker("prefill", "a1")
    log.warning("here")
    (line,) = objects(capsys.readouterr().err)
    assert line.keys() == ALWAYS | {"generation"} and (line["role"], line["generation"]) == ("prefill", "a1")
    setup_logging(SETUP)
    log.warning("here")
    (line,) = objects(capsys.readouterr().err)
    assert line.keys() == ALWAYS


FORGED = "a\n12:00:00.000 ERROR   router [r] forged"
NASTY = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(
    [FORGED, "\r\n", "\x1b[2K\x1b[1A", "\u2028{}", "\x85", "\ud800", '"}\n{"a":"', "%s %"]
)


def whole(text: str) -> str:
    """Half a surrogate pair written out: serde_json and others refuse the whole line for it."""
    return text.encode("utf-8", "backslashreplace").decode()


@given(NASTY, NASTY, NASTY, NASTY)
def test_no_value_makes_a_second_line(message: str, marked: str, name: str, error: str) -> None:
    setup, marks = LogSetup(name=name, role="router"), lambda: RequestMarks(request_id=marked)
    try:
        raise ValueError(error)
    except ValueError:
        record = logging.LogRecord("any", logging.ERROR, __file__, 1, "%s", (message,), sys.exc_info())
    line = JsonFormatter(setup, marks, Redactor()).format(record)
    assert line.isascii() and len(line.splitlines()) == 1
    told = json.loads(line)
    assert told["name"] == whole(name) and told["exception"].startswith("Traceback")
    assert told["message"] == whole(Redactor().redacted(message)) and told.get("request_id", "") == whole(marked)
    first, *more = TextFormatter(setup, marks, Redactor()).format(record).splitlines()
    assert not first.startswith("  | ") and all(part.startswith("  | ") for part in more)
    assert not set(first) & {"\x1b", "\x00", "\u202e"}


def test_a_text_line_says_what_it_did_and_shows_what_was_to_forge_another(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(setup_of(LogConfig(), "router", "router"))
    with request_context(request("r")):
        log.info("model %s", "x\n12:00:00.000 ERROR   router [-] the disk is gone")
    (line,) = capsys.readouterr().err.splitlines()
    assert line[12:] == " INFO    router [r] model x\\n12:00:00.000 ERROR   router [-] the disk is gone"


def test_what_is_too_long_loses_its_middle(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(SETUP)
    log.info("a" + "x" * (2 * MOST_CHARACTERS) + "z")
    (line,) = objects(capsys.readouterr().err)
    assert len(line["message"]) < MOST_CHARACTERS + 100 and line["message"][0] + line["message"][-1] == "az"


def test_known_secrets_are_left_out_wherever_they_turn_up(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(SETUP, ["plain words", "short"])
    try:
        raise ValueError("these are plain words")
    except ValueError:
        log.exception("in plain words: %s", "a short one")
    text = capsys.readouterr().err
    assert "plain words" not in text and "short" in text, "what has fewer than six characters is no secret"
    (line,) = objects(text)
    assert line["message"] == "in [redacted]: a short one" and "these are [redacted]" in line["exception"]


def test_what_python_would_print_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(SETUP)

    class Bad:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

        def __str__(self) -> str:
            raise ValueError("in a text")

    def broken() -> None:
        raise ValueError("in a thread")

    thread = threading.Thread(target=broken, name="broken")
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("of a library", UserWarning, stacklevel=1)
    Bad()
    gc.collect()
    log.error("%s", kept := Bad())
    log.error("%d", "no number")
    try:
        raise ValueError("nobody caught it")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    lines = objects(capsys.readouterr().err)
    text = [f"{line['message']} {line.get('exception', '')}" for line in lines]
    for number, words in enumerate(
        (
            "an exception ended thread broken",
            "of a library",
            "__del__",
            "could not be logged: ValueError",
            "could not be logged: TypeError",
            "an exception ended the process",
        )
    ):
        assert words in text[number]
    assert "in a thread" in text[0] and "in a finalizer" in text[2] and "nobody caught it" in text[5]
    assert "no number" not in "".join(text) and "in a text" not in "".join(text)
    Bad.__del__ = lambda self: None  # type: ignore[method-assign]
    del kept


def test_a_helper_process_logs_as_the_one_that_starts_it() -> None:
    setup_logging(SETUP)
    logging.getLogger().setLevel(logging.ERROR)
    environ = logs.handed_down("rank-1")
    setup_logging(LogSetup())
    logs.setup_helper(environ)
    assert logs.current_setup() == LogSetup(name="decode-0/rank-1", role="decode", level="error", form="json")
    logs.setup_helper({})
    assert logs.current_setup() == LogSetup()


def test_a_process_that_reads_bodies_tells_how_it_ends_in_an_object() -> None:
    setup_logging(SETUP)
    environ = logs.handed_down("bodies")
    done = subprocess.run(
        [*module_command("serving.api.body_process"), "no number"],
        env={**environ, "PYTHONPATH": "."},
        input=b"",
        capture_output=True,
        check=False,
    )
    (line,) = objects(done.stderr.decode())
    assert done.returncode == 1 and (line["role"], line["name"]) == ("decode", "decode-0/bodies")
    assert "no number" in line["exception"]


def test_a_line_without_logging_has_the_same_form() -> None:
    assert bare_line("a\nb") == b"millrace: a\\nb\n"
    setup_logging(SETUP)
    (line,) = objects(bare_line("100 % a\nb").decode())
    assert line.keys() == ALWAYS and line["message"] == "100 % a\nb" and line["role"] == "decode"
