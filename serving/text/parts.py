"""What every source of a tokenizer yields, and the two pieces of `tokenizers` machinery the sources share.

It knows neither files nor formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A configured `tokenizers` backend with what its file says beside it."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)  # role, as "bos_token" → the token's text
    chat_templates: dict[str, str] = field(default_factory=dict)  # name → Jinja source; "default" is the usual one


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    *,
    split: str | None = None,
    add_prefix_space: bool = False,
    ignore_merges: bool = False,
    single_digits: bool = False,
) -> tokenizers.Tokenizer:
    """GPT-2's kind of tokenizer: text cut by the regular expression `split` (GPT-2's own when None), BPE over bytes.

    With `single_digits` the text is first cut around every digit.
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=ignore_merges))
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    if split is not None:
        cuts.append(pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"))
    into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=split is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, into_bytes]) if cuts else into_bytes
    backend.decoder = decoders.ByteLevel()
    return backend


def frame_with(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make encoding with special tokens put `bos` before and `eos` after the text; None puts nothing there."""
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    for token, token_id in ids:
        if token_id is None:
            raise ValueError(f"the special token {token!r} is not in the vocabulary")
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
