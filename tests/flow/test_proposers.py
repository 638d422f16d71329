"""Models that draft change no token: greedy or sampled, alone or in a batch, embedded or split, with KV or without."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from deploy.worker.proposers import DraftParts, load_draft_parts
from serving.config import EngineConfig, ModelConfig
from serving.engine.sequence import SequenceState
from serving.errors import Preempted
from serving.grammar.forms import json_grammar, regex_grammar
from serving.loader.loading import LoadedModel, load
from serving.messages import Request, Role, SamplingParams
from tests.fakes.drafting import drafts_always
from tests.flow.client import Asked, Client
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer
from tests.mtp_folder import deepseek_with_mtp
from tests.serving.model.oracle import VOCAB
from tests.tiny import tiny_llama

pytestmark = pytest.mark.thorough

TOKENS = 24
TRIES = 4


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts pay is another matter: here they are made wherever they can be."""
    drafts_always(monkeypatch)


def requests(count: int, **sampling: object) -> list[Request]:
    params = {"max_tokens": TOKENS, **sampling}
    return [
        Request(request_id=f"r{i}", prompt=tuple(prompt), sampling=SamplingParams(**{**params, "seed": i}))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts(count, seed=90))
    ]


def drafted(cluster: Cluster) -> tuple[int, int]:
    """Tokens drafted and accepted, of all workers."""
    counters = [worker.status().counters for worker in cluster.cluster.workers]
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    return tuple(int(sum(found.get(name, 0.0) for found in counters)) for name in names)  # type: ignore[return-value]


def draft_model(path: Path, count: int = 4) -> str:
    return json.dumps({"method": "draft_model", "model": str(path), "num_speculative_tokens": count})


async def expected(make_cluster: ClusterMaker, wanted: list[Request], **engine: Any) -> list[list[int]]:
    async with make_cluster("embedded", num_speculative_tokens=0, **engine) as cluster:
        return [await cluster.tokens(request) for request in wanted]


SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 1}]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("placement", ["embedded", "split-grpc"])
async def test_the_model_itself_drafts_everything_right(
    make_cluster: ClusterMaker, placement: str, sampling: dict[str, Any], tiny_path: Path
) -> None:
    wanted = requests(4, **sampling)
    plain = await expected(make_cluster, wanted)
    async with make_cluster(placement, speculative_config=draft_model(tiny_path)) as cluster:
        alone = await cluster.tokens(wanted[0])
        together = await asyncio.gather(*(cluster.tokens(request) for request in wanted))
        made, right = drafted(cluster)
    assert (alone, together) == (plain[0], plain)
    assert made > 2 * TOKENS and right >= 0.95 * made


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary that has nothing to do with the first."""
    return tiny_llama(tmp_path_factory.mktemp("other") / "other", seed=5, layers=2, hidden=32)


@pytest.mark.parametrize("placement", ["embedded-two", "split-local"])
async def test_a_model_that_knows_nothing_drafts_nearly_nothing_right(
    make_cluster: ClusterMaker, placement: str, other_path: Path
) -> None:
    wanted = requests(3, temperature=0.0)
    plain = await expected(make_cluster, wanted)
    async with make_cluster(placement, speculative_config=draft_model(other_path)) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in wanted)) == plain
        made, right = drafted(cluster)
    assert made > 2 * TOKENS and right < 0.2 * made


MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 3})


def of_deepseek(count: int, **sampling: object) -> list[Request]:
    """Requests within the small vocabulary of the tests' DeepSeek."""
    return [
        replace(request, prompt=tuple(token % VOCAB for token in request.prompt))
        for request in requests(count, **sampling)
    ]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(deepseek_with_mtp(tmp_path_factory.mktemp("mtp")), "float32")


@pytest.fixture(scope="module")
def foreseen(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(deepseek_with_mtp(tmp_path_factory.mktemp("foreseen"), perfect=True), "float32")


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("placement", ["embedded", "split-grpc"])
async def test_the_models_own_layer_changes_no_token(
    make_cluster: ClusterMaker, placement: str, sampling: dict[str, Any], deepseek: LoadedModel
) -> None:
    wanted = of_deepseek(3, **sampling)
    plain = await expected(make_cluster, wanted, model=deepseek)
    async with make_cluster(placement, model=deepseek, speculative_config=MTP, max_num_batched_tokens=40) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in wanted)) == plain
        made, right = drafted(cluster)
    print(f"mtp of random weights: {right} of {made} drafts accepted")
    assert made > TOKENS


@pytest.mark.parametrize("placement", ["embedded", "split-local"])
async def test_a_layer_that_foresees_the_text_drafts_it(
    make_cluster: ClusterMaker, placement: str, foreseen: LoadedModel
) -> None:
    wanted = of_deepseek(2, temperature=0.0, max_tokens=48)  # after a handoff it begins with the next whole block
    plain = await expected(make_cluster, wanted, model=foreseen)
    async with make_cluster(placement, model=foreseen, speculative_config=MTP) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in wanted)) == plain
        made, right = drafted(cluster)
    print(f"mtp that foresees the text: {right} of {made} drafts accepted")
    assert made > TOKENS and right > 0.9 * made


async def test_beside_forms_penalties_and_log_probabilities(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    """A batch in which only some draft, some of them held to a form, draws what each would alone without drafts."""
    forms = [{"grammar": json_grammar(SCHEMA)}, {"grammar": regex_grammar("([a-z]{2,8} ){5}")}]
    others = [{"frequency_penalty": 0.5}, {"logprobs": 2}, {"temperature": 0.0}, {"min_tokens": 9}]
    wanted = [requests(6, **{"temperature": 0.9, **own})[i] for i, own in enumerate(forms + others)]
    plain = await expected(make_cluster, wanted)
    async with make_cluster("embedded", speculative_config=draft_model(tiny_path)) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in wanted)) == plain
        made, right = drafted(cluster)
    assert made > 2 * TOKENS and right > TOKENS, "a draft knows no form, and what forms refuse counts as wrong"


async def test_drafts_that_a_form_refuses_count_as_wrong(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    """Or they would be made to the end of every such text, whatever they cost."""
    wanted = requests(1, temperature=0.0, grammar=regex_grammar("[0-9]{60}"))
    plain = await expected(make_cluster, wanted)
    async with make_cluster("embedded", speculative_config=draft_model(tiny_path)) as cluster:
        assert [await cluster.tokens(request) for request in wanted] == plain
        made, right = drafted(cluster)
    assert made > TOKENS and right < 0.2 * made


async def test_the_audit_never_takes_blocks_given_back_for_leaked(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    """A text's blocks go back with its last step, and its lease only once that is delivered."""
    async with make_cluster("embedded", speculative_config=draft_model(tiny_path)) as cluster:
        (worker,) = cluster.cluster.workers
        audits = []
        release = worker.kv.release

        def released(seq: SequenceState) -> None:
            release(seq)
            audits.append(worker.audit_now())

        worker.kv.release = released
        await asyncio.gather(*(cluster.tokens(request) for request in requests(2)))
        assert audits and not any(audit.leaked["draft_blocks"] for audit in audits)
        assert any(audit.counts["draft_blocks"] for audit in audits)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}


async def test_prefixes_that_are_cached_and_blocks_that_run_out(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    """Small chunks, a second ask of each prompt, and room for about three of five: some lose their blocks."""
    wanted = requests(5, temperature=0.0, max_tokens=40)
    wanted = [replace(request, prompt=request.prompt[:50]) for request in wanted]
    plain = await expected(make_cluster, wanted)
    small = {"num_kv_blocks": 28, "block_size": 8, "max_num_batched_tokens": 60}
    async with make_cluster("embedded", speculative_config=draft_model(tiny_path), **small) as cluster:
        for _ in range(2):
            assert await asyncio.gather(*(cluster.tokens(request) for request in wanted)) == plain
        preempted = [error for error in cluster.seen.replacements if isinstance(error, Preempted)]
        cached = sum(worker.kv.hits for worker in cluster.cluster.workers)
        made, right = drafted(cluster)
    assert preempted and cached
    assert made > TOKENS and right > 0.9 * made


async def test_a_model_of_another_vocabulary_is_refused_by_name(
    make_cluster: ClusterMaker, tiny_path: Path, tmp_path: Path
) -> None:
    larger = tiny_llama(tmp_path / "larger", vocab_size=400)
    with pytest.raises(ValueError, match="larger cannot draft for tiny: its vocabulary has 400 tokens, not 384"):
        async with make_cluster("embedded", speculative_config=draft_model(larger)):
            pass
    respelled = tiny_llama(tmp_path / "respelled")
    file = respelled / "tokenizer.json"
    written = json.loads(file.read_text())
    known = written["model"]["vocab"]
    known["a"], known["b"] = known["b"], known["a"]
    file.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"respelled cannot draft for tiny: its token \d+ is b'b', not b'a'"):
        async with make_cluster("embedded", speculative_config=draft_model(respelled)):
            pass


def test_a_prefill_worker_loads_nothing(tiny_model: LoadedModel) -> None:
    config = EngineConfig(speculative_config=draft_model(Path("/nowhere")))
    assert load_draft_parts(Role.PREFILL, tiny_model, ModelConfig(), config) == DraftParts()


async def test_draft_kv_takes_its_share_of_the_memory(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    memory = {"num_kv_blocks": None, "kv_cache_memory": 1 << 20}
    blocks = []
    for config in (None, draft_model(tiny_path)):
        async with make_cluster("embedded", speculative_config=config, **memory) as cluster:
            (worker,) = cluster.cluster.workers
            blocks.append(worker.kv.allocator.num_blocks)
            audit = worker.audit_now()
            assert audit.counts.get("draft_blocks") == (0 if config else None)
    assert blocks[1] == blocks[0] // 2, "the draft is as large as the model"


@pytest.mark.slow
def test_a_text_survives_the_death_of_the_worker_that_drafts_it(tmp_path: Path) -> None:
    """kill -9 of the decode worker with the texts: another goes on with its own draft KV, from nothing."""
    path = tiny_llama(tmp_path / "tiny", layers=4, hidden=128, kv_heads=4)
    workers = ("prefill-0", "decode-0", "decode-1")
    flags = ("--prefill", "1", "--decode", "2", "--served-model-name", "tiny", "--heartbeat-interval", "0.1")
    with MillraceServer(
        str(path), *flags, "--num-kv-blocks", "256", "--speculative-config", draft_model(path), workers=workers
    ) as server:
        client = Client(server.url)
        try:
            server.wait_ready()
            plain = client.finish(ask_all(client))
            for _ in range(TRIES):
                server.wait_ready()
                asked = ask_all(client)
                assert asked[0].progressed.wait(60)
                server.signal_worker("decode-0", SIGKILL)
                assert client.finish(asked) == plain
                if server.metric("replacements_total") > 0:
                    break
            assert server.metric("replacements_total") > 0, "the texts were over before the worker was"
            assert server.metric("spec_decode_num_draft_tokens_total") > 0
            server.wait_idle()
        finally:
            client.close()


def ask_all(client: Client) -> list[Asked]:
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 11, "top_p": 0.9})
    wanted = prompts(4, shortest=60, longest=90, seed=3)
    return [client.start(prompt, stream=True, max_tokens=600, **kinds[i % 2]) for i, prompt in enumerate(wanted)]
