"""A tokenizer from a Hugging Face folder: tokenizer.json or vocab.json with merges.txt, and the files beside them.

Where the files disagree the precedence is that of `transformers`, which is the oracle in the tests; it is not used
here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from serving.text.parts import TokenizerParts, byte_level_bpe, frame_with

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_folder(folder: Path) -> TokenizerParts:
    """Raises `ValueError` when the folder has no tokenizer in a supported form."""
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    backend = _read_backend(folder, config)
    special_tokens = {role: text for role in _ROLES if (text := _token_text(config.get(role))) is not None}
    _add_configured_tokens(backend, config, special_tokens)
    if not (folder / "tokenizer.json").exists():  # which says itself what surrounds a text
        frame_with(
            backend,
            bos=special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            eos=special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    return TokenizerParts(
        backend=backend, special_tokens=special_tokens, chat_templates=_read_chat_templates(folder, config)
    )


def _read_backend(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    if (file := folder / "tokenizer.json").exists():
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.exists() and merges.exists()):
        raise ValueError(f"{folder} has neither a tokenizer.json nor a vocab.json with merges.txt")
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ", 1) for line in lines if line and not line.startswith("#version")]
    return byte_level_bpe(
        _read_json(vocab),
        [(left, right) for left, right in pairs],
        add_prefix_space=bool(config.get("add_prefix_space", False)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    """A token is written as its text, or as an object with its text and matching rules."""
    return token["content"] if isinstance(token, dict) else token


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Make whole tokens of those that only the configuration marks as such; never an id the file does not know."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    configured: dict[str, dict[str, Any]] = config.get("added_tokens_decoder", {})
    for _, token in sorted(configured.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            rules = {rule: token.get(rule, False) for rule in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([tokenizers.AddedToken(token["content"], special=token.get("special", False), **rules)])
            known.add(token["content"])
    for text in special_tokens.values():
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    if (file := folder / "chat_template.jinja").exists():
        templates = {"default": file.read_text(encoding="utf-8")}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[extra.stem] = extra.read_text(encoding="utf-8")
        return templates
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    return {named["name"]: named["template"] for named in template}
