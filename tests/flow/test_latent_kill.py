"""kill -9 of workers and of a pool node that hold the latent KV of MLA: a tiny DeepSeek-V3 in real processes, split.

The stages are those of test_kill.py. What one worker has computed another fetches
from the pool, and what the pool has lost is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from signal import SIGKILL

import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import DeepseekV3Config

from tests.flow.client import Asked, Client
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.server import MillraceServer, wait_until
from tests.flow.test_kill import (
    WORKERS,
    Form,
    Outcomes,
    ask,
    disturb,
    kill_after_the_tenth_token,
    kill_all_that_decodes,
    kill_before_the_first_token,
    kill_computing,
    kill_in_mid_handoff,
    kill_with_requests_queued,
)
from tests.serving.model.oracle import DEEPSEEK, GROUPS, YARN_MLA, build, save
from tests.tiny import SPECIAL_TOKENS, write_tokenizer

pytestmark = pytest.mark.slow

FORM = Form(("--kernels", "torch", "--dtype", "float32"), layers=3, hidden=32, tokens=60)
LATENT = {"kv_lora_rank": 192, "qk_rope_head_dim": 64}  # 3 KiB a token: too much for socket buffers
VOCAB = 384  # the tokenizer's
BLOCK = 16
TOKENS = 20
SHARED = prompts(4, shortest=150, longest=250, seed=14)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    depth = {"num_hidden_layers": FORM.layers, "hidden_size": FORM.hidden, "n_routed_experts": 8, "q_lora_rank": 24}
    texts = {"vocab_size": VOCAB, "max_position_embeddings": 2048}
    model = build(DeepseekV3Config(**DEEPSEEK | GROUPS | LATENT | depth | texts, rope_parameters=YARN_MLA))
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0.0  # far below the best: texts end by length
    folder = save(model, tmp_path_factory.mktemp("deepseek"))
    write_tokenizer(folder, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[MillraceServer]:
    arguments = (
        str(path),
        *("--prefill", "2", "--decode", "2", "--kvcache", "1", "--served-model-name", "tiny", *FORM.flags),
        *("--max-num-batched-tokens", "48", "--max-num-seqs", "24", "--num-kv-blocks", "512"),
        *("--heartbeat-interval", "0.1", "--heartbeat-timeout", "30", "--kvcache-fetch", "always"),
    )
    with MillraceServer(*arguments, workers=WORKERS) as started:
        wait_until(lambda: started.metric("pool_capacity_bytes"), 90, "the pool's node reports")
        yield started


def greedy_text(path: Path, prompt: Sequence[int], count: int) -> str:
    text: str = Tokenizer.from_file(str(path / "tokenizer.json")).decode(greedy_tiny(path, prompt, count))
    return text


@pytest.fixture(scope="module")
def undisturbed(server: MillraceServer, path: Path) -> Outcomes:
    """What is answered when nobody dies: the greedy text is that of `transformers`."""
    client = Client(server.url)
    try:
        asked = ask(client, FORM)
        outcomes = client.finish(asked)
    finally:
        client.close()
    assert outcomes[0][0] == greedy_text(path, asked[0].body["prompt"], FORM.tokens)
    return outcomes


@pytest.fixture
def client(server: MillraceServer) -> Iterator[Client]:
    server.wait_ready()
    made = Client(server.url)
    yield made
    made.close()


def test_prefill_worker_dies_with_the_request_queued(
    server: MillraceServer, client: Client, undisturbed: Outcomes
) -> None:
    kill_with_requests_queued(server, client, FORM, undisturbed)


@pytest.mark.parametrize(
    "harm",
    [
        kill_computing,
        kill_in_mid_handoff,
        kill_before_the_first_token,
        kill_after_the_tenth_token,
        kill_all_that_decodes,
    ],
)
def test_workers_die_at_every_later_stage(
    server: MillraceServer,
    client: Client,
    undisturbed: Outcomes,
    harm: Callable[[MillraceServer, list[Asked]], None],
) -> None:
    disturb(server, client, FORM, undisturbed, partial(harm, server))


def answers(client: Client, wanted: Sequence[Sequence[int]]) -> tuple[list[str], list[int]]:
    """Greedy texts, and how many tokens of each prompt were cached."""
    asked = [client.start(prompt, stream=False, max_tokens=TOKENS, temperature=0.0) for prompt in wanted]
    texts = [text for text, *_ in client.finish(asked)]
    return texts, [one.usage["prompt_tokens_details"]["cached_tokens"] for one in asked]


def is_served(client: Client) -> bool:
    """A prompt that nobody keeps is answered."""
    try:
        answers(client, [[1, 2, 3]])
    except openai.InternalServerError:
        return False
    return True


def test_latents_come_back_from_the_pool_and_without_it(server: MillraceServer, client: Client, path: Path) -> None:
    expected = [greedy_text(path, prompt, TOKENS) for prompt in SHARED]
    stored, blocks = server.metric("pool_blocks", tier="ram"), [(len(prompt) - 1) // BLOCK for prompt in SHARED]
    assert answers(client, SHARED) == (expected, [0] * len(SHARED))
    wait_until(lambda: server.metric("pool_blocks", tier="ram") >= stored + sum(blocks), 60, "the pool has the prompts")

    for worker in WORKERS:
        server.signal_worker(worker, SIGKILL)
    wait_until(lambda: is_served(client), 60, "others have come: two that die over a request end it")
    assert answers(client, SHARED) == (expected, [BLOCK * count for count in blocks])

    server.signal_worker("kvcache-0", SIGKILL)
    other = [prompt[::-1] for prompt in SHARED]
    assert answers(client, other) == ([greedy_text(path, prompt, TOKENS) for prompt in other], [0] * len(SHARED))
    server.wait_idle()
