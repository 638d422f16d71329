"""What every path must equal: greedy decoding by `transformers`, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=2)
def _model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens after `prompt`, each the likeliest; end-of-text tokens are ordinary ones."""
    from transformers import DynamicCache

    tokens: list[int] = []
    step: Tensor = torch.tensor([list(prompt)])
    # Transformers 5.24 renamed the argument and warns of its old name.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    kept = {name: DynamicCache(config=model.config)}
    with torch.inference_mode():
        for _ in range(count):
            out = model(step, **kept, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
            step = torch.tensor([[tokens[-1]]])
    return tokens


def greedy_tiny(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    return greedy(_model(path), prompt, count)


def is_greedy(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether `greedy` gives just these tokens: each is the likeliest after the last, by one pass over all of them.

    Where that says otherwise `greedy` itself is asked: of a thousand tokens one may have a rival within a bit of
    float32, and whole texts are multiplied in another order than single tokens.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return bool((logits.argmax(-1) == torch.tensor(tokens)).all()) or greedy(model, prompt, len(tokens)) == [*tokens]


def is_greedy_tiny(path: Path, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    return is_greedy(_model(path), prompt, tokens)


def prompts(count: int, *, vocab: int = 384, shortest: int = 3, longest: int = 200, seed: int = 0) -> list[list[int]]:
    """Random prompts of mixed lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def hidden_states(path: Path, prompt: Sequence[int]) -> Tensor:
    """[T, H] float32: `transformers`' last hidden state of each token, after the final norm."""
    with torch.inference_mode():
        states: Tensor = _model(path).model(torch.tensor([list(prompt)])).last_hidden_state[0]
    return states
