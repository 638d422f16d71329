"""What INT8 costs in quality: perplexity and agreement on the likeliest token, against the same model in bfloat16.

    python -m bench.quality [MODEL] [--text docstrings code FILE] [--json FILE]

Texts are made on the spot out of Python's standard library, its docstrings (English prose about programs) and its code:
the same for one version of Python wherever it runs, and free to use. Any file in UTF-8 is another one. Knows loading
and the decoder; nothing of serving.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench.report import aligned
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.loader.loading import load, resolve
from serving.model.decoder import Decoder
from serving.quantization.scheme import PORTABLE, ROTATED, Int8Scheme
from serving.text.tokenizer import load_tokenizer

MODULES = """
argparse logging random statistics textwrap threading zipfile decimal fractions pathlib collections csv functools
heapq http.client inspect difflib string tarfile unittest.mock urllib.request asyncio.events email.message cmd
configparser pickle sched smtplib socketserver subprocess tempfile timeit turtle uuid zipapp optparse ast
""".split()  # noqa: SIM905 - a list would take a line for each
SHORTEST = 160  # characters: shorter docstrings are labels rather than prose
SOURCE = 8000  # characters of a module
BLOCK_SIZE = 16
FORMS: tuple[tuple[str, Int8Scheme | None, tuple[str, ...]], ...] = (
    ("bfloat16", None, ("bfloat16",)),
    ("INT8, portable", PORTABLE, ("bfloat16",)),
    ("INT8", ROTATED, ("bfloat16", "int8")),
)
"""Names, what is quantized, and KV caches; agreement is with the first."""


def text() -> str:
    """Every docstring of the modules above worth reading, each once, in a fixed order."""
    kept: dict[str, None] = {}
    for name in MODULES:
        kept.update(dict.fromkeys(_docstrings(importlib.import_module(name))))
    return "\n\n".join(kept)


def code() -> str:
    """The beginnings of the same modules' sources."""
    return "\n\n".join(inspect.getsource(importlib.import_module(name))[:SOURCE] for name in MODULES)


TEXTS = {"docstrings": text, "code": code}


def read_text(name: str) -> str:
    """One of `TEXTS`, or what the file of that name holds."""
    made = TEXTS.get(name)
    return Path(name).read_text(encoding="utf-8") if made is None else made()


def _docstrings(module: ModuleType) -> Iterator[str]:
    own = [value for _, value in sorted(vars(module).items()) if getattr(value, "__module__", None) == module.__name__]
    inside = [part for value in own if inspect.isclass(value) for _, part in sorted(vars(value).items())]
    for documented in (module, *own, *inside):
        if callable(documented) or documented is module:
            found = inspect.getdoc(documented) or ""
            if len(found) >= SHORTEST and found.isascii():
                yield found


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """For each predicted token of the text: its log-probability in nats, and the token found likeliest."""

    logprobs: Tensor
    likeliest: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.double().mean()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; agreement and ratio are against the first line."""

    name: str
    perplexity: float
    ratio: float
    agreement: float
    seconds: float


@torch.inference_mode()
def score(model: Decoder, windows: Sequence[Sequence[int]], kv_dtype: str) -> Scores:
    """Reads each window alone, from an empty cache; its first token is not predicted."""
    logprobs, likeliest = [], []
    for window in windows:
        blocks = -(-len(window) // BLOCK_SIZE)
        kv = DeviceKV(model.spec.kv_layers(kv_dtype), blocks, BLOCK_SIZE).planes
        batch = RaggedBatch.build(tokens=[window], starts=[0], block_tables=[range(blocks)], block_size=BLOCK_SIZE)
        logits = model.logits(model(batch, kv)[:-1])
        targets = torch.tensor(window[1:])
        logprobs.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
        likeliest.append(logits.argmax(-1))
    return Scores(logprobs=torch.cat(logprobs), likeliest=torch.cat(likeliest))


def compare(name: str, baseline: Scores, scores: Scores, seconds: float) -> Row:
    return Row(
        name=name,
        perplexity=scores.perplexity,
        ratio=scores.perplexity / baseline.perplexity,
        agreement=float((scores.likeliest == baseline.likeliest).double().mean()),
        seconds=seconds,
    )


def measure(path: Path, texts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[Row]]:
    """The model at `path` in every form on the windows of each text."""
    rows: dict[str, list[Row]] = {name: [] for name in texts}
    baselines: dict[str, Scores] = {}
    for form, scheme, caches in FORMS:
        model = load(path, "bfloat16", quantization=None if scheme is None else "int8", scheme=scheme).model
        for kv_dtype in caches:
            for text_name, windows in texts.items():
                started = time.monotonic()
                scores = score(model, windows, kv_dtype)
                baseline = baselines.setdefault(text_name, scores)
                seconds, name = time.monotonic() - started, f"{form}, KV {kv_dtype}"
                rows[text_name].append(compare(name, baseline, scores, seconds))
                print(f"{text_name}, {name}: {seconds:.0f} s", file=sys.stderr)
    return rows


def table(name: str, rows: Sequence[Row]) -> str:
    cells = [[name, "perplexity", "ratio", "top-1 agreement"]]
    cells += [[row.name, f"{row.perplexity:.4f}", f"{row.ratio:.4f}", f"{row.agreement:.2%}"] for row in rows]
    return aligned(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description="What INT8 costs in quality.")
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a hub name (default: the demo model)")
    parser.add_argument("--tokens", type=int, default=24576, help="tokens of text to read (default: 24576)")
    parser.add_argument("--window", type=int, default=1024, help="tokens read at a time (default: 1024)")
    parser.add_argument(
        "--text",
        nargs="+",
        default=["docstrings"],
        metavar="NAME",
        help=f"{', '.join(TEXTS)} or files in UTF-8 (default: docstrings)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args(arguments)
    path = resolve(given.model)
    texts = {name: read_text(name) for name in given.text}
    windows = {name: cut(path, read, given.tokens, given.window) for name, read in texts.items()}
    rows = measure(path, windows)
    for name in texts:
        print(table(name, rows[name]))
    if given.json is not None:
        reports = [report(path, name, read, windows[name], rows[name]) for name, read in texts.items()]
        given.json.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    return 0


def cut(path: Path, read: str, count: int, window: int) -> list[list[int]]:
    """The first `count` tokens of a text in whole windows, by the tokenizer of the model at `path`."""
    tokens = load_tokenizer(path).encode(read, add_special_tokens=False)[:count]
    if len(tokens) < window:
        raise ValueError(f"the text has {len(tokens)} tokens, which is less than a window of {window}")
    return [tokens[at : at + window] for at in range(0, len(tokens) - window + 1, window)]


def report(path: Path, name: str, read: str, windows: Sequence[Sequence[int]], rows: Sequence[Row]) -> dict[str, Any]:
    """All that is needed to say whether two reports are of the same text, and the figures."""
    return {
        "model": path.name,
        "text": name,
        "python": platform.python_version(),
        "text_sha256": hashlib.sha256(read.encode()).hexdigest(),
        "tokens": sum(map(len, windows)),
        "window": len(windows[0]),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
