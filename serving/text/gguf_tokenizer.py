"""A tokenizer from the metadata of a GGUF file, which holds a vocabulary but names its rules only by a word.

The rules behind each word (how text is cut, what surrounds it) are those of the tokenizer the vocabulary was
learned with. Nothing here reads tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, normalizers

from serving.gguf_header import GgufHeader
from serving.text.parts import TokenizerParts, byte_level_bpe, frame_with
from serving.text.token_bytes import byte_alphabet

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre → the expression that cuts text before BPE; None is GPT-2's own.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,  # but around single digits, see _SINGLE_DIGITS
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_SINGLE_DIGITS = ("smollm",)  # it was trained so, and llama.cpp reads it so; transformers forgets it for GGUF files
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")  # whole words of the vocabulary win over merges; BOS by default

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_gguf(path: Path) -> TokenizerParts:
    """Raises `ValueError` when the file holds no tokenizer or one of an unsupported kind."""
    metadata = GgufHeader(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata), True
    else:
        raise ValueError(f"{path}: a GGUF tokenizer of kind {kind!r} is not supported")
    special_tokens = _special_tokens(metadata)
    _mark_added_tokens(backend, metadata, byte_level=kind == "gpt2")
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in special_tokens.values()])
    frame_with(
        backend,
        bos=special_tokens.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        eos=special_tokens.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return TokenizerParts(backend=backend, special_tokens=special_tokens, chat_templates=_chat_templates(metadata))


def _array(metadata: dict[str, Any], key: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ValueError(f"the GGUF file has no list tokenizer.ggml.{key}")
    return value


def _byte_level(metadata: dict[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """The backend, and whether BOS comes first where the file does not say."""
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in _SPLITS:
        raise ValueError(f"the GGUF pre-tokenizer {name!r} is not supported (known: {', '.join(sorted(_SPLITS))})")
    vocab = {token: token_id for token_id, token in enumerate(_array(metadata, "tokens"))}
    merges = [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in _array(metadata, "merges")]
    is_llama3 = name in _LLAMA3_NAMES
    backend = byte_level_bpe(
        vocab, merges, split=_SPLITS[name], ignore_merges=is_llama3, single_digits=name in _SINGLE_DIGITS
    )
    return backend, is_llama3


def _sentencepiece(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback. Each text between special tokens starts with a space mark."""
    tokens = _array(metadata, "tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, _array(metadata, "scores")),
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    marks = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "▁")])
    strips = [decoders.Strip(content=" ", left=1)] if prefixed else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips])
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every cut of every token, best token first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, token_id in vocab.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        ranked.extend((-scores[token_id], vocab[left], vocab[right], (left, right)) for left, right in pairs)
    return [pair for *_, pair in sorted(ranked)]


def _mark_added_tokens(backend: tokenizers.Tokenizer, metadata: dict[str, Any], *, byte_level: bool) -> None:
    """Control tokens are special; user-defined ones are only kept whole. Both are matched in the raw text."""
    alphabet = byte_alphabet().keys()
    added = []
    for token, kind in zip(_array(metadata, "tokens"), _array(metadata, "token_type"), strict=True):
        # In a byte-level vocabulary a control token outside the byte alphabet is a converter's mistake, not a token.
        if kind == _CONTROL and (not byte_level or set(token) <= alphabet):
            added.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            added.append(tokenizers.AddedToken(token, special=False, normalized=False))
    backend.add_tokens(added)


def _special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = _array(metadata, "tokens")
    ids = {role: metadata.get(f"tokenizer.ggml.{key}") for role, key in _ROLES.items()}
    return {role: tokens[token_id] for role, token_id in ids.items() if isinstance(token_id, int)}


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    found = {"default": metadata[key], **named} if key in metadata else named
    return {name: text for name, text in found.items() if isinstance(text, str)}
