"""Text to token ids and back: one `Tokenizer` for every kind of vocabulary and every file it comes in.

It knows nothing of models or requests; chat templates are only carried here, and rendered in `serving.text.chat`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from serving.text.folder_tokenizer import read_folder
from serving.text.gguf_tokenizer import read_gguf
from serving.text.parts import TokenizerParts
from serving.text.token_bytes import TokenBytes


class Tokenizer:
    """Immutable after construction and safe to share between threads.

    `special_tokens` maps roles as templates name them ("bos_token") to their text; `special_ids` are the tokens that
    are left out of text when special tokens are skipped.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        self._parts = parts
        self._backend = backend
        self.bytes_of = TokenBytes(backend)
        self.special_tokens = dict(parts.special_tokens)
        self.chat_template = parts.chat_templates.get("default")  # Jinja source; None when the model has none
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        roles = {role: backend.token_to_id(token) for role, token in parts.special_tokens.items()}
        self.bos_id: int | None = roles.get("bos_token")
        self.eos_id: int | None = roles.get("eos_token")
        marked = {token_id for token_id, token in added.items() if token.special}
        self.special_ids: frozenset[int] = frozenset(marked | {i for i in roles.values() if i is not None})

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[TokenizerParts]]:
        return Tokenizer, (self._parts,)  # in another process it is made anew

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`; `add_special_tokens` adds what the model expects around a text, such as BOS.

        Takes time linear in the text and releases the interpreter lock, so long texts belong in a thread.
        """
        # The batch form is the one that releases the lock; "fast" leaves out character offsets.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of `ids`, bytes that are no UTF-8 replaced by U+FFFD as the Unicode standard recommends.

        `continues` says that other tokens come before, so that a SentencePiece word keeps the space before it.
        """
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        bytes_of = self.bytes_of
        text = b"".join([bytes_of[token] for token in ids if token not in skip]).decode("utf-8", errors="replace")
        return text if continues else strip_leading(text, bytes_of.leading_spaces)

    def special_marks(self, marks: Iterable[str]) -> dict[str, int]:
        """Those of the marks that are one special token each, and that token."""
        spelled = {mark: self.encode(mark, add_special_tokens=False) for mark in marks}
        return {mark: ids[0] for mark, ids in spelled.items() if len(ids) == 1 and ids[0] in self.special_ids}

    def token_text(self, token_id: int) -> str:
        """How one token reads alone, in a continued text; U+FFFD stands for bytes that are no whole character."""
        return self.bytes_of[token_id].decode("utf-8", errors="replace")


def strip_leading(text: str, spaces: int) -> str:
    """`text` without up to that many spaces at its start."""
    kept = text.lstrip(" ")
    return text[min(spaces, len(text) - len(kept)) :]


def load_tokenizer(path: Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a .gguf file; with another chat template than its own, where given.

    Raises `FileNotFoundError`, or `ValueError` when what is there cannot be read or is not supported.
    """
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer at {path}: there is no such file or folder")
    parts = read_folder(path) if path.is_dir() else read_gguf(path)
    if chat_template is not None:
        parts = replace(parts, chat_templates={"default": chat_template})
    return Tokenizer(parts)
