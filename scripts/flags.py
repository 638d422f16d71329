"""Writes the tables of docs/cli.md from the parser of the `millrace` command, so that the page cannot fall behind.

The text around the tables is written by hand; a table stands between two markers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.cli import make_parser
from deploy.foreign_flags import FLAGS, ForeignFlag

PAGE = Path(__file__).resolve().parent.parent / "docs/cli.md"
BEGIN, END = "<!-- begin tables: make docs -->", "<!-- end tables -->"
FOREIGN_BEGIN, FOREIGN_END = "<!-- begin flags of others: make docs -->", "<!-- end flags of others -->"
PLAIN_GROUPS = ("positional arguments", "options")


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def tables(parser: argparse.ArgumentParser) -> str:
    """Every command's arguments in Markdown. A group that several commands share is shown once, with their names."""
    shown: dict[tuple[str, str], list[str]] = {}
    for name, command in commands(parser).items():
        groups: dict[str, list[str]] = {}
        for group in command._action_groups:
            title = "Arguments" if group.title in PLAIN_GROUPS else str(group.title)
            groups.setdefault(title, []).extend(row(action) for action in group._group_actions if is_shown(action))
        for title, rows in groups.items():
            if rows:
                shown.setdefault((title, "\n".join(rows)), []).append(name)
    parts = []
    for (title, text), names in shown.items():
        users = ", ".join(f"`{name}`" for name in names)
        parts.append(f"### {title}\n\nOf {users}.\n\n| argument | meaning |\n|---|---|\n{text}\n")
    return "\n".join(parts)


def is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def row(action: argparse.Action) -> str:
    name = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{(action.metavar or action.dest)}`".upper()
    if action.option_strings and action.nargs != 0 and action.metavar:
        name += f" {action.metavar}"
    meaning = " ".join((action.help or "").split()).replace("%%", "%").replace("|", "\\|")
    if action.choices:
        meaning += ": " + ", ".join(f"`{choice}`" for choice in action.choices)
    return f"| {name} | {meaning} |"


def foreign_table() -> str:
    """What becomes of the flags of other servers, in Markdown."""
    return "| flag | here |\n|---|---|\n" + "\n".join(map(foreign_row, FLAGS)) + "\n"


def foreign_row(flag: ForeignFlag) -> str:
    parts = []
    if flag.always:
        values = "" if "*" in flag.always else " or ".join(f"`{value}`" for value in flag.always if value) + ": "
        parts.append(f"{values}accepted: {flag.told}")
    if flag.to:
        renamed = ", ".join(f"`{theirs}` as `{ours}`" for theirs, ours in flag.values.items() if theirs != ours)
        parts.append(f"{'else ' if parts else ''}`{flag.to}`" + (f", {renamed}" if renamed else ""))
    if flag.instead:
        parts.append(f"{'else refused' if parts else 'refused'}: {flag.instead}")
    names = ", ".join(f"`{name}`" for name in flag.names)
    return f"| {names} | {'; '.join(parts).replace('|', '/')} |"


def render(page: str, parser: argparse.ArgumentParser) -> str:
    """The page with its tables written anew. Raises ValueError when the markers are not there."""
    return _filled(_filled(page, FOREIGN_BEGIN, foreign_table(), FOREIGN_END), BEGIN, tables(parser), END)


def _filled(page: str, begin: str, text: str, end: str) -> str:
    """The page with this text between these markers."""
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no place between {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def main() -> None:
    PAGE.write_text(render(PAGE.read_text(), make_parser()))
    print(PAGE)


if __name__ == "__main__":
    main()
