"""What drafts in a worker leaves the served model its threads, and a process its way out while it loads."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from deploy.runtime.settings import read_settings
from deploy.worker.process import WorkerProcess
from deploy.worker.proposers import DraftParts, kept, load_draft_parts, make_drafts
from kvcache.memory.device import DeviceKV
from serving.config import EngineConfig, ModelConfig
from serving.forward.forward import EagerForward
from serving.loader.loading import LoadedModel, load
from serving.messages import Role
from serving.proposers.draft_model import DraftModelProposer
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny", layers=1), "float32")


def test_a_model_that_torch_computes_keeps_its_threads(tiny: LoadedModel) -> None:
    """The compiled kernels would leave torch one."""
    blocks = DeviceKV(tiny.spec.kv_layers("float32"), 8, 16)
    parts = DraftParts(model=tiny, specs=kept(tiny.spec, "float32", ModelConfig()))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made = make_drafts(parts, tiny, EagerForward(tiny.model, blocks.planes), blocks, EngineConfig(), 64)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert isinstance(made.proposer, DraftModelProposer) and made.proposer.forward.form == "torch"


def test_what_is_not_checked_or_not_used_is_told(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = tiny_llama(tmp_path / "bare", layers=1)
    (bare / "tokenizer.json").unlink()
    text = json.dumps({"method": "draft_model", "model": str(bare), "prompt_lookup_max": 3})
    with caplog.at_level(logging.WARNING, "deploy.worker.proposers"):
        load_draft_parts(Role.DECODE, tiny, ModelConfig(), EngineConfig(speculative_config=text))
    assert caplog.messages == [
        "--speculative-config: prompt_lookup_max changes nothing with draft_model",
        "bare is taken to have the vocabulary of tiny: its size is the same",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"method": "mtp"},
            "tiny .llama. has no layer that predicts further tokens .MTP.: choose ngram or draft_model",
        ),
        ({"model": "/nowhere"}, "there is no file or folder '/nowhere'"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_its_flag(tiny: LoadedModel, given: dict[str, str], told: str) -> None:
    config = EngineConfig(speculative_config=json.dumps(given))
    with pytest.raises(ValueError, match=f"^--speculative-config: {told}"):
        load_draft_parts(Role.DECODE, tiny, ModelConfig(), config)


async def test_until_drafts_are_loaded_signals_end_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: after the load, for it was begun once signals were only noted."""
    called = []

    class Cache:
        def __init__(self, *given: object) -> None: ...

        async def load(self) -> None:
            called.append("model")

    def drafts(*given: object) -> None:
        called.append("drafts")
        raise ValueError("no such draft model")

    monkeypatch.setattr("deploy.worker.process.ModelCache", Cache)
    monkeypatch.setattr("deploy.worker.process.load_draft_parts", drafts)
    monkeypatch.setattr("deploy.worker.process.release", lambda model: called.append("release"))
    monkeypatch.setattr("deploy.worker.process.use_cores", lambda *given: None)
    monkeypatch.setattr("deploy.worker.process.on_signals", lambda leave: called.append("signals"))
    with pytest.raises(ValueError, match="no such draft model"):
        await WorkerProcess(Role.MIXED, read_settings({})).run()
    assert called == ["model", "drafts", "release"]
