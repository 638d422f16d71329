"""Makes what drafts in a worker, as `--speculative-config` says: another model, or the served one's own layer for it.

Its KV lies in planes of its own over the worker's blocks, so each block takes the more of `--kv-cache-memory`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvcache.memory.device import DeviceKV
from serving.config import EngineConfig, ModelConfig
from serving.engine.drafting import Computed, surely
from serving.engine.plan import Work
from serving.engine.proposer import Proposer
from serving.forward.choose import make_forward, make_sampler
from serving.forward.cpu_forward import CpuForward
from serving.forward.forward import EagerForward, Forward
from serving.forward.watched import WatchedForward
from serving.kvspec import LayerKV
from serving.loader.loading import LoadedModel, load, resolve
from serving.loader.mtp import load_mtp
from serving.messages import Role
from serving.model.mtp import MtpHead
from serving.model.spec import ModelSpec
from serving.proposers.draft_model import DraftModelProposer
from serving.proposers.draws import DraftDraws
from serving.proposers.mtp import MtpProposer
from serving.rank_group.forward import GroupForward
from serving.speculative_config import SpeculativeConfig
from serving.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftParts:
    """What a worker's drafts are made with, loaded: one of the two, or neither where they come from the text."""

    model: LoadedModel | None = None
    head: MtpHead | None = None
    specs: tuple[LayerKV, ...] = ()  # of the KV it keeps


def load_draft_parts(role: Role, model: LoadedModel, model_config: ModelConfig, config: EngineConfig) -> DraftParts:
    """Load what the configuration names. Raises ValueError where that cannot draft for `model`.

    A prefill worker drafts nothing, and loads nothing.
    """
    asked = config.speculation()
    if asked.unused:
        log.warning("--speculative-config: %s changes nothing with %s", " and ".join(asked.unused), asked.method)
    if role is Role.PREFILL or not asked.num_speculative_tokens or asked.method == "ngram":
        return DraftParts()
    try:
        return _loaded(asked, model, model_config)
    except ValueError as error:
        raise ValueError(f"--speculative-config: {error}") from error


def _loaded(asked: SpeculativeConfig, model: LoadedModel, model_config: ModelConfig) -> DraftParts:
    if asked.method == "mtp":
        head = load_mtp(model, model_config.device)
        return DraftParts(head=head, specs=kept(head.spec, model.dtype, model_config)[:1])
    draft = load(resolve(asked.model), model_config.dtype, model_config.device, asked.quantization)
    if reason := unlike_vocabulary(draft, model):
        raise ValueError(f"{draft.path.name} cannot draft for {model.path.name}: {reason}")
    log.info("%s drafts for %s", draft.path.name, model.path.name)
    return DraftParts(model=draft, specs=kept(draft.spec, draft.dtype, model_config))


def kept(spec: ModelSpec, dtype: str, config: ModelConfig) -> tuple[LayerKV, ...]:
    return spec.kv_layers(dtype if config.kv_cache_dtype == "auto" else "int8")


def unlike_vocabulary(draft: LoadedModel, model: LoadedModel) -> str | None:
    """Why tokens of the one are not tokens of the other, or None if they are."""
    if draft.spec.vocab_size != model.spec.vocab_size:
        return f"its vocabulary has {draft.spec.vocab_size} tokens, not {model.spec.vocab_size}"
    own, theirs = vocabulary(draft.path), vocabulary(model.path)
    if own is None or theirs is None:
        log.warning("%s is taken to have the vocabulary of %s: its size is the same", draft.path.name, model.path.name)
        return None
    if own == theirs:
        return None
    if len(own) != len(theirs):
        return f"its tokenizer has {len(own)} tokens, not {len(theirs)}"
    token = next(i for i, pair in enumerate(zip(own, theirs, strict=True)) if pair[0] != pair[1])
    return f"its token {token} is {own[token]!r}, not {theirs[token]!r}"


def vocabulary(path: Path) -> Sequence[bytes] | None:
    """What each token stands for; None for a model without a tokenizer, which is given token ids alone."""
    try:
        tokenizer = load_tokenizer(path)
    except (FileNotFoundError, ValueError):
        return None
    return [tokenizer.bytes_of[token] for token in range(tokenizer.vocab_size)]


@dataclass(frozen=True, slots=True)
class WorkerDrafts:
    """The worker's forward pass, maybe one that is watched, and what drafts beside it."""

    forward: Forward
    proposer: Proposer | None = None
    computed: Computed | None = None

    @property
    def kind(self) -> str:
        """What a step's cost depends on."""
        return self.forward.form if self.proposer is None else f"{self.forward.form} {self.proposer.method}"


def draft_config(config: EngineConfig, forward: Forward, device: str) -> EngineConfig:
    """With which the draft model's forward pass is chosen, beside the model's own.

    On a CPU the compiled kernels take torch's threads away, which a model that torch computes needs itself. The library
    is not demanded of the draft, but forbidden with the model's.
    """
    compiled = isinstance(forward, CpuForward) or (isinstance(forward, GroupForward) and forward.compiled)
    kernels = config.kernels if device != "cpu" or compiled else "torch"
    attention = "triton" if config.attention_backend == "triton" else "auto"
    return replace(config, deterministic=False, kernels=kernels, attention_backend=attention)


def make_drafts(
    parts: DraftParts,
    model: LoadedModel,
    forward: Forward,
    blocks: DeviceKV,
    config: EngineConfig,
    max_len: int,
) -> WorkerDrafts:
    """`blocks` is the worker's KV; of `parts` no other worker is made, since a draft model's weights go as kernels take
    them over. Raises ValueError where the model's layer cannot be watched.
    """
    if not parts.specs:
        return WorkerDrafts(forward)
    device = blocks.planes[0][0].device
    own = DeviceKV(parts.specs, blocks.num_blocks, blocks.block_size, device)
    eos = tuple(sorted(set(model.spec.eos_token_ids)))
    if parts.model is not None:
        draft = parts.model
        limit = min(max_len, draft.spec.max_position)
        how = draft_config(config, forward, device.type)
        drafting = make_forward(draft, own.planes, how, limit, releases=True)
        return WorkerDrafts(
            forward,
            DraftModelProposer(
                drafting,
                draft.spec,
                DraftDraws(make_sampler(drafting), eos),
                block_size=blocks.block_size,
                chunk=config.max_num_batched_tokens,
                max_len=limit,
                device=device,
            ),
        )
    assert parts.head is not None
    if not isinstance(forward, EagerForward):
        raise ValueError(f"--speculative-config: mtp needs hidden states, which {forward.form} does not give")
    watched = WatchedForward(model.model, blocks.planes)
    draws = DraftDraws(make_sampler(watched), eos)
    proposer = MtpProposer(parts.head, model.model, own.planes[0], draws, blocks.block_size)

    def computed(work: Sequence[Work], starts: Sequence[int]) -> None:
        assert watched.last is not None
        proposer.computed(work, starts, watched.last)

    return WorkerDrafts(watched, proposer, surely(computed))
