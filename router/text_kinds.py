"""What is known of a text before its first token that may say how many drafted tokens it will accept. Pure.

Drafts are runs of tokens that followed the same few tokens before (decode.speculation). So texts of a kind that repeat
themselves, or their prompts, get more tokens a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

LOOKED_AT = 512  # tokens, the last of the prompt
RUN = 3  # tokens
REPEATING = (0.1, 0.3, 0.6)  # shares of runs that came before: bounds of what counts as alike


def text_kinds(service_class: str, output: int, repeats: int, client: str, session: str) -> tuple[str, ...]:
    """Names of the kinds a text is of, from the coarse to the fine: empty where it is of none.

    Of its class, magnitude of the expected output and repetition of the prompt; of its client; of its conversation. The
    latter two as digests: a router keeps them in a file, and they may be secrets.
    """
    return f"{service_class} {max(1, output).bit_length()} {repeats}", _digest(client), _digest(session)


def _digest(name: str) -> str:
    return blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest() if name else ""


def repetition(prompt: Sequence[int]) -> int:
    """How much the end of a prompt repeats itself: 0 to len(REPEATING)."""
    end = prompt[-LOOKED_AT:]
    runs = len(end) - RUN + 1
    if runs < 1:
        return 0
    if 1.0 - len(set(end[:runs])) / runs < REPEATING[0]:
        return 0  # there are as many runs as tokens that begin one: quicker, as most prompts repeat little
    share = 1.0 - len(set(zip(end, end[1:], end[2:], strict=False))) / runs
    return sum(share >= bound for bound in REPEATING)
