"""`millrace explain ID`: where a request went and why, what was predicted of that, and what it came to.

It asks a server (GET /v1/requests/ID/explain) and draws tables; every figure comes from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from deploy.admin import Server, add_server_arguments

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

Told = Mapping[str, Any]

# Rows of the table of an attempt: what it is called, and its names in the prediction and in what came.
PARTS = (
    ("queue", "queue", "queue"),
    ("prefill", "prefill", "prefill"),
    ("first token", "ttft", "ttft"),
    ("transfer", "transfer", "transfer"),
    ("each token after", "usual_tpot", "tpot"),
)
# Rows below the tokens that were not computed: where some of them were.
TIERS = {"pool": "- from the KV pool", "decode": "- held by decode worker"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace explain`."""
    parser.add_argument("id", metavar="ID", help="the `id` of a response, or its header x-request-id")
    add_server_arguments(parser)
    parser.add_argument("--cache-salt", metavar="SALT", help="the request's cache_salt, where it had one")
    parser.add_argument("--json", action="store_true", help="print the answer as it is")


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; the process's exit code. Raises MillraceError, ValueError."""
    salt = {"x-cache-salt": arguments.cache_salt} if arguments.cache_salt else None
    answer = Server.of(arguments).get("v1", "requests", arguments.id, "explain", headers=salt)
    if arguments.json:
        sys.stdout.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode() + "\n")
        return 0
    console = plain_console()
    for sequence in answer["sequences"]:
        console.print(drawn(sequence))
    return 0


def drawn(told: Told) -> Group:
    """One sequence: its ending, then each attempt with what was predicted, what came, and what else was considered."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(headline(told), style="bold"), Text(summary(told))]
    if told["error"]:
        parts.append(Text(told["error"], style="red"))
    if told["passed_over"]:
        named = ", ".join(f"{each['worker']} ({each['error']})" for each in told["passed_over"])
        parts.append(Text(f"no room was given by {named}"))
    for number, attempt in enumerate(told["attempts"], 1):
        parts += [Text(), Text(attempt_title(number, attempt)), attempt_table(attempt)]
        if attempt["error"]:
            parts.append(Text(f"  ended by {attempt['error']}", style="red"))
        if len(attempt["considered"]) > 1:
            parts.append(considered_table(attempt["considered"]))
    return Group(*parts)


def headline(told: Told) -> str:
    within = {True: "within its objectives", False: "missed its objectives", None: "still running"}
    objectives = [
        f"{name} {value:g} ms"
        for name, value in (("TTFT", told["objectives"]["ttft_ms"]), ("TPOT", told["objectives"]["tpot_ms"]))
        if value is not None
    ]
    verdict = within[told["within_slo"]] if objectives or told["within_slo"] is not True else "no objectives"
    asked = f" ({', '.join(objectives)})" if objectives else ""
    asked += "; went on without its objectives, behind all others" if told.get("degraded") else ""
    return f"{told['id']}: {told['outcome']}, {verdict}{asked}"


def summary(told: Told) -> str:
    return (
        f"class {told['service_class']}, priority {told['priority']}; {told['prompt_tokens']} prompt tokens,"
        f" {told['output_tokens']} output tokens; waited {shown(told['queued_seconds'])} for room, first token after"
        f" {shown(told['ttft_seconds'])}, then {shown(told['tpot_seconds'])} each; {shown(told['total_seconds'])}"
        " in all"
    )


def attempt_table(attempt: Told) -> Table:
    """Predicted against actual seconds; what came alone, where the policy predicts nothing."""
    predicted, actual = attempt["predicted"], attempt["actual"]
    headings = ("actual",) if predicted is None else ("predicted", "actual", "off by")
    table = plain_table(("",), headings)
    for name, before, after in PARTS:
        if predicted is not None:
            told, came = predicted.get(before, predicted[after]), actual[after]  # an older server tells no usual TPOT
            kind = " (usual)" if before == "usual_tpot" and predicted.get(before) is not None else ""
            table.add_row(name + kind, shown(told), shown(came), off_by(told, came))
        elif actual[after] is not None:
            table.add_row(name, shown(actual[after]))
    cached = attempt["cached_tokens"]
    came = "-" if cached["actual"] is None else str(cached["actual"])
    table.add_row("cached tokens", *((came,) if predicted is None else (str(cached["expected"]), came)))
    for name in ("pool", "decode"):
        if cached.get(name):
            table.add_row(TIERS[name], *((str(cached[name]),) if predicted is None else ("", str(cached[name]))))
    return table


def plain_console() -> Console:
    """Prints names as they are, whatever brackets they have."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def plain_table(texts: Sequence[str], figures: Sequence[str]) -> Table:
    """Columns of text, to the left, and of figures, to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True, header_style="bold")
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def attempt_title(number: int, attempt: Told) -> str:
    where = f"prefill on {attempt['prefill'] or '-'}"
    where += f", decode on {attempt['decode']}" if attempt["decode"] else ", no decode"
    downgrade = "; downgraded: prefill elsewhere was decided" if attempt["downgrade"] else ""
    return f"{number}. {where} ({attempt['reason']}{downgrade})"


def considered_table(considered: Sequence[Told]) -> Table:
    """The placements that were looked at, the chosen one first."""
    table = plain_table(("considered", ""), ("score", "first token", "each after (mean)"))
    for each in considered:
        predicted = each["predicted"] or {}
        score = "-" if each["score"] is None else f"{each['score']:.3f}"
        times = (shown(predicted.get("ttft")), shown(predicted.get("tpot")))
        table.add_row(each["prefill"], each["decode"] or "-", score, *times)
    return table


def shown(seconds: float | None) -> str:
    """0.0123 → `12.3 ms`."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


def off_by(predicted: float | None, actual: float | None) -> str:
    if not predicted or actual is None:
        return ""
    return f"{100 * (actual / predicted - 1):+.0f} %"
