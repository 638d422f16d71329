"""Who may import whom, which files must not know torch, and which files are the one door to a library."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import (
    GENERATED,
    ROOMS,
    ROOT,
    files,
    imports,
    matching,
    module_file,
    room_files,
    start_closure,
    tree,
)  # fmt: skip

# What each room may import besides itself. docs/way.md says why; a name with a dot allows that module alone.
MAY_IMPORT = {
    "serving": (),
    "kvcache": ("serving",),
    "prefill": ("kvcache", "serving"),
    "decode": ("kvcache", "serving"),
    "router": ("kvcache.blocks.prefix", "serving"),
    "deploy": ("router", "prefill", "decode", "kvcache", "serving", "bench"),
    "bench": ("router", "prefill", "decode", "kvcache", "serving"),
}

# The front starts quickly and messages are light, so neither waits for torch. Code that decides has test_pure.py.
TORCH_FREE = (
    "router/*",
    "serving/api/*",
    "serving/text/*",
    "serving/proto/*",
    "serving/config.py",
    "serving/grammar/*",
    "serving/options.py",
    "serving/errors.py",
    "serving/kvspec.py",
    "serving/links.py",
    "serving/logs.py",
    "serving/messages.py",
    "serving/*metrics.py",
    "serving/rpc.py",
    "serving/service_c*.py",
    "serving/timeline.py",
    "serving/tracing*.py",
    "serving/wire.py",
    "serving/model/hf_*.py",
    "serving/model/spec.py",
    "serving/checkpoint/hub.py",
    "serving/batch/layer_barrier.py",
    "kvcache/pool/*",
    "deploy/cli.py",
    "deploy/autoscale.py",
    "deploy/autoscaler/*",
    "deploy/cache.py",
    "deploy/explain.py",
    "deploy/kvcache_process.py",
    "deploy/placement/*",
    "deploy/planner/*",
    "deploy/top.py",
    "serving/checkpoint/json_file.py",
    "serving/checkpoint/safetensors_files.py",
    "serving/cache_folder.py",
)

# Where a library may be imported at all. Nothing below is imported anywhere else in the rooms.
DOORS = {
    "fastapi": ("serving/api/*", "deploy/*"),
    "starlette": ("serving/api/*",),
    "uvicorn": ("deploy/*",),
    "pydantic": ("serving/api/*",),
    "prometheus_client": ("serving/*metrics.py",),
    "opentelemetry": ("serving/otel_tracer.py",),
    "rich": ("deploy/*",),
    "grpc": (
        "serving/rpc.py",
        "serving/grpc_tls.py",
        "prefill/service.py",
        "decode/service.py",
        "kvcache/pool/service.py",
        "router/service.py",
    ),
    "tokenizers": ("serving/text/*", "bench/prompts.py", "bench/random_folder.py"),
    "jinja2": ("serving/text/*",),
    "safetensors": (
        "serving/checkpoint/*",
        "serving/loader/*",
        "serving/quantization/*",
        "bench/proposers.py",
        "bench/random_folder.py",
    ),
    "gguf": ("serving/checkpoint/*",),
    "huggingface_hub": ("serving/checkpoint/hub.py",),
    "xxhash": ("serving/checkpoint/fingerprint.py", "kvcache/handoff/tree_digest.py", "kvcache/pool/block.py"),
    "triton": ("serving/kernels/gpu/*",),
    "flashinfer": ("serving/kernels/gpu/flashinfer_prompts.py",),
    "matplotlib": ("deploy/planner/charts.py",),
    "pymoo": ("deploy/planner/front.py",),
}
# Where one file, whichever it is, is the door.
ONE_FILE = {"nixl": "kvcache/*"}
# Libraries of tests, and those that nothing uses yet.
NOWHERE = ("transformers", "openai", "ray")


def test_what_rooms_may_import_is_there() -> None:
    assert set(MAY_IMPORT) == set(ROOMS)
    assert [name for names in MAY_IMPORT.values() for name in names if module_file(name) is None] == []


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    def allowed(name: str) -> bool:
        return any(name == permitted or name.startswith(permitted + ".") for permitted in (room, *MAY_IMPORT[room]))

    wrong = [
        f"{path}:{found.line} imports {found.name}"
        for path in files(room)
        for found in imports(path)
        if found.top in (*ROOMS, "tests", "scripts")
        and not allowed(found.name)
        # `from kvcache import prefix` names the package too; the module is looked at by itself.
        and not any(permitted.startswith(found.name + ".") for permitted in MAY_IMPORT[room])
    ]
    assert wrong == []


def test_every_project_import_leads_to_a_file() -> None:
    wrong = [
        f"{path}:{found.line} imports {found.name}"
        for path in files(*ROOMS, "tests", "scripts")
        for found in imports(path)
        if found.top in ROOMS and module_file(found.name) is None and not (ROOT / Path(*found.name.split("."))).is_dir()
    ]
    assert wrong == []


def test_every_imported_name_is_in_its_module() -> None:
    """Many tests run in a process of their own, for a device or an interpreter; no type checker reads tests."""
    wrong = [
        f"{path}:{statement.lineno} imports {name} from {statement.module}"
        for path in files(*ROOMS, "tests", "scripts")
        for statement in ast.walk(tree(path))
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for name in _absent(statement.module, [alias.name for alias in statement.names])
    ]
    assert wrong == []


def _absent(module: str, imported: list[str]) -> list[str]:
    """Of names that are imported from a project's module, those that it neither binds nor has as a module."""
    file = module_file(module)
    bound = _bound(file) if file is not None and not any(file.match(pattern) for pattern in GENERATED) else imported
    return [name for name in imported if name not in bound and module_file(f"{module}.{name}") is None]


@cache
def _bound(file: Path) -> frozenset[str]:
    """Every name that some statement of the file binds, wherever."""
    nodes = list(ast.walk(tree(file)))
    made = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    kept = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    aliases = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    return frozenset(made | kept | {alias.asname or alias.name.partition(".")[0] for alias in aliases})


@pytest.mark.parametrize("pattern", TORCH_FREE)
def test_torch_free_files_do_not_reach_torch(pattern: str) -> None:
    for path in matching(pattern):
        closure = start_closure(path)
        assert "torch" not in closure, f"{path} imports torch through {closure['torch']}"
        late = [found.line for found in imports(path) if found.top == "torch"]
        assert not late, f"{path}:{late[0]} imports torch"


@pytest.mark.parametrize(
    "module",
    ["router.router", "prefill.scheduler", "decode.scheduler", "serving.messages", "deploy.cli", "deploy.serve"],
)
def test_importing_leaves_torch_out(module: str) -> None:
    assert module_file(module) is not None
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"{module} imports torch"


@pytest.mark.parametrize("library", DOORS)
def test_a_library_is_imported_only_at_its_doors(library: str) -> None:
    doors = DOORS[library]
    wrong = [path for path in users(library) if not any(fnmatch(path, door) for door in doors)]
    assert wrong == []
    assert [door for door in doors if not any(fnmatch(path, door) for path in users(library))] == []


@pytest.mark.parametrize("library", ONE_FILE)
def test_a_library_is_imported_in_one_file(library: str) -> None:
    (found,) = users(library)
    assert fnmatch(found, ONE_FILE[library])


@pytest.mark.parametrize("library", NOWHERE)
def test_a_library_is_imported_nowhere(library: str) -> None:
    """Whatever comes to use it moves it to the doors above."""
    assert users(library) == []


def users(library: str) -> list[str]:
    return [path.as_posix() for path in room_files() if any(found.top == library for found in imports(path))]
