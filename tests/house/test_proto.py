"""The generated gRPC code is what its .proto files say, and asks for no newer libraries than the project does."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tests.house.source import ROOT

if importlib.util.find_spec("grpc_tools") is None:
    pytest.skip("grpcio-tools, of the extra `dev`, is not installed", allow_module_level=True)

from scripts.proto import PROTO, descriptors, generate, sources

SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
GRPC_VERSION = re.compile(r"GRPC_GENERATED_VERSION = '([\d.]+)'")
PROTOBUF_VERSION = re.compile(r"^# Protobuf Python Version: ([\d.]+)", re.MULTILINE)


def stems() -> list[str]:
    return [Path(source).stem for source in sources()]


def checked_in(name: str) -> str:
    return (ROOT / PROTO / name).read_text()


def test_every_proto_has_its_stubs_and_every_stub_its_proto() -> None:
    assert stems()
    present = {path.name for path in (ROOT / PROTO).glob("*_pb2*")}
    assert present == {stem + suffix for stem in stems() for suffix in SUFFIXES}


@pytest.mark.parametrize("stem", stems())
def test_stubs_say_what_the_proto_says(stem: str, tmp_path: Path) -> None:
    """Whatever version of the compiler wrote them: names, numbers and types are compared, not text."""
    descriptors(tmp_path / "compiled")
    compiled = FileDescriptorSet.FromString((tmp_path / "compiled").read_bytes())
    (expected,) = (file for file in compiled.file if file.name == f"{PROTO.as_posix()}/{stem}.proto")
    module = importlib.import_module(f"serving.proto.{stem}_pb2")
    ours = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(ours)
    assert without_json_names(ours) == without_json_names(expected)


def without_json_names(message: Any) -> Any:
    """A descriptor less the names its fields have in JSON: they follow from the others, and stubs leave them out."""
    for field, value in message.ListFields():
        if field.name == "json_name":
            message.ClearField("json_name")
        elif field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                without_json_names(part)
    return message


@pytest.mark.parametrize("stem", stems())
def test_stubs_are_what_the_compiler_writes(stem: str, tmp_path: Path) -> None:
    """By the compiler that wrote those checked in; another version may write the same things differently."""
    generate(tmp_path)
    written = {suffix: (tmp_path / PROTO / (stem + suffix)).read_text() for suffix in SUFFIXES}
    ours = {suffix: checked_in(stem + suffix) for suffix in SUFFIXES}
    if GRPC_VERSION.findall(written["_pb2_grpc.py"]) != GRPC_VERSION.findall(ours["_pb2_grpc.py"]):
        pytest.skip("the stubs were written by another version of grpcio-tools")
    for suffix in SUFFIXES:
        assert written[suffix] == ours[suffix], f"{stem}{suffix}: run `make proto`"


@pytest.mark.parametrize("stem", stems())
@pytest.mark.parametrize(
    ("package", "suffix", "pattern"),
    [("grpcio", "_pb2_grpc.py", GRPC_VERSION), ("protobuf", "_pb2.py", PROTOBUF_VERSION)],
)
def test_the_project_asks_for_libraries_new_enough_for_the_stubs(
    stem: str, package: str, suffix: str, pattern: re.Pattern[str]
) -> None:
    (needed,) = pattern.findall(checked_in(stem + suffix))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (found[1] for line in dependencies if (found := re.match(rf"{package}>=([\d.]+)", line)))
    assert parts(bound) >= parts(needed)


def parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
