"""Loads the layer that predicts further tokens from a DeepSeek-V3 checkpoint, where it lies behind the others.

Its embedding is the model's; so is its head, unless the checkpoint has one of its own that differs.
"""

from __future__ import annotations

import torch
from torch import nn

from serving.checkpoint.checkpoint import DTYPES
from serving.checkpoint.cuts import Cut
from serving.checkpoint.weights import mtp_sources
from serving.kernels.torch_linears import use_cpu_linears
from serving.loader.loading import LoadedModel, open_checkpoint, resolve
from serving.loader.reading import fill_parameter
from serving.model.moe import float32_parameters
from serving.model.mtp import MtpHead


def load_mtp(loaded: LoadedModel, device: str = "cpu") -> MtpHead:
    """The first such layer of a loaded model's checkpoint, in the model's type.

    Raises ValueError where the model has none, or it is not wholly there.
    """
    spec = loaded.spec
    if not spec.mtp_layers:
        lacking = f"{loaded.path.name} ({spec.architecture}) has no layer that predicts further tokens (MTP)"
        raise ValueError(f"{lacking}: choose ngram or draft_model")
    _, checkpoint, _ = open_checkpoint(resolve(str(loaded.path)))
    with torch.device("meta"):
        head = MtpHead(spec)
    parameters = dict(head.named_parameters())
    found = mtp_sources(head.spec, parameters, checkpoint.names)
    if "head.weight" not in found:
        head.head = None
    kept = float32_parameters(head)
    for name, parts in found.items():
        dtype = kept.get(name, DTYPES[loaded.dtype])
        value = torch.empty(parameters[name].shape, dtype=dtype, device=device)
        fill_parameter(name, value, parts, checkpoint, Cut())
        owner, leaf = name.rsplit(".", 1)
        setattr(head.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    if head.head is not None:
        _share_head(head, loaded)
    if device == "cpu":
        use_cpu_linears(head)
    return head.eval()


def _share_head(head: MtpHead, loaded: LoadedModel) -> None:
    """Published checkpoints repeat the model's head: then it is not kept twice."""
    assert head.head is not None
    own, model = head.head.weight, loaded.model.head.weight
    if isinstance(loaded.model.head, nn.Linear) and torch.equal(own.to(model.dtype), model):
        head.head = None
