"""No circle of packages or of files, and inside a room no lower layer imports a higher one.

Imports of every kind count: at the start of a file, inside functions, and for types alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.source import Checkout, circles
from tests.house.source import HOUSE, ROOT

# Lowest first. A folder imports folders before it; those of one line leave each other alone. What lies in a folder's
# own folders belongs to it, except for the room itself: `serving` is the files that lie right there.
LAYERS = {
    "serving": (
        ("serving/proto",),
        ("serving",),
        ("serving/batch", "serving/text"),
        ("serving/grammar",),
        ("serving/kernels",),
        ("serving/model",),
        ("serving/sampling", "serving/checkpoint", "serving/expert_parallel"),
        ("serving/quantization", "serving/parallel"),
        ("serving/loader",),
        ("serving/forward",),
        ("serving/rank_group",),
        ("serving/engine", "serving/api"),
        ("serving/proposers",),
    ),
    "kvcache": (
        ("kvcache/blocks", "kvcache/transfer"),
        ("kvcache/memory", "kvcache/pool"),
        ("kvcache",),
        ("kvcache/handoff", "kvcache/connector"),
    ),
}
# What a folder may import of its room, where that is less than everything below it.
BESIDE = {"serving/text": {"serving"}, "serving/api": {"serving", "serving/text", "serving/grammar"}}


@pytest.mark.parametrize("kind", ["file", "package"])
def test_no_circle_in_the_rooms(kind: str) -> None:
    graph = HOUSE.file_graph() if kind == "file" else HOUSE.package_graph()
    assert len(graph) > 20
    assert any(graph.values())
    assert circles(graph) == []


@pytest.mark.parametrize("room", LAYERS)
def test_no_lower_layer_imports_a_higher_one(room: str) -> None:
    wrong = [
        f"{file} imports {target}"
        for file, targets in HOUSE.file_graph().items()
        for target in sorted(targets)
        if Path(file).parts[0] == Path(target).parts[0] == room and not allowed(folder(file), folder(target))
    ]
    assert wrong == []


@pytest.mark.parametrize("room", LAYERS)
def test_every_folder_has_its_layer(room: str) -> None:
    stated = [name for layer in LAYERS[room] for name in layer]
    assert sorted(stated) == sorted(
        {folder(path.as_posix()) for path in HOUSE.files(room)} | {"serving/proto"} & {*stated}
    )
    assert set(BESIDE) <= {name for layers in LAYERS.values() for layer in layers for name in layer}


def folder(file: str) -> str:
    """The room, or the folder right in it, that a file lies in."""
    return "/".join(Path(file).parent.parts[:2])


def allowed(importer: str, imported: str) -> bool:
    layers = LAYERS[importer.partition("/")[0]]
    level = {name: number for number, layer in enumerate(layers) for name in layer}
    if importer == imported:
        return True
    return level[imported] < level[importer] and imported in BESIDE.get(importer, {imported})


def test_layers_order_folders() -> None:
    assert allowed("serving/model", "serving/kernels")
    assert allowed("serving/model", "serving/model")
    assert not allowed("serving/kernels", "serving/model")
    assert not allowed("serving/sampling", "serving/checkpoint")
    assert not allowed("serving/api", "serving/model")


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({}, []),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, []),
        ({"a": ["a"]}, [["a"]]),
        ({"a": ["b"], "b": ["a"], "c": ["a"]}, [["a", "b"]]),
        ({"a": ["b"], "b": ["c"], "c": ["d"], "d": ["b"]}, [["b", "c", "d"]]),
        ({"a": ["b"], "b": ["a"], "c": ["d", "a"], "d": ["c"]}, [["a", "b"], ["c", "d"]]),
        ({"a": ["b", "c"], "b": ["a"], "c": ["a"]}, [["a", "b", "c"]]),
        ({"a": ["elsewhere"]}, []),
    ],
)
def test_circles_are_found(graph: dict[str, list[str]], expected: list[list[str]]) -> None:
    assert circles(graph) == expected


def test_imports_of_every_kind_draw_a_circle(tmp_path: Path) -> None:
    written = {
        "serving/__init__.py": "",
        "serving/low/__init__.py": "",
        "serving/low/one.py": "def late():\n    from serving.high import two\n    return two\n",
        "serving/high/__init__.py": "",
        "serving/high/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import serving.low.one\n",
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    made_up = Checkout(tmp_path)
    assert circles(made_up.file_graph()) == [["serving/high/two.py", "serving/low/one.py"]]
    assert circles(made_up.package_graph()) == [["serving/high", "serving/low"]]
    assert made_up.root != ROOT
