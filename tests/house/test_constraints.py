"""constraints.txt has a version for whatever the environment of developers asks for, and one that it allows."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.constraints import OWN
from tests.house.source import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [Requirement(line) for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]]
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
)


def test_every_package_we_ask_for_has_a_version() -> None:
    asked = {canonicalize_name(one.name) for one in ASKED} - OWN
    assert asked - PINNED.keys() == set(), "make constraints"


def test_the_versions_are_such_as_we_ask_for() -> None:
    wrong = [
        f"{one}: {version}"
        for one in ASKED
        if (version := PINNED.get(canonicalize_name(one.name))) is not None and not one.specifier.contains(version)
    ]
    assert wrong == []
