"""Single experts of a checkpoint, read when somebody wants them: the rest of the model stays where it is.

For a rank that takes over experts of another (`serving.expert_parallel.rehosting`), of which it knows nothing.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from serving.checkpoint.checkpoint import DTYPES
from serving.checkpoint.cuts import Cut
from serving.checkpoint.weights import sources
from serving.kernels.torch_linears import use_cpu_linears
from serving.loader.loading import int8_modules, open_checkpoint
from serving.loader.reading import fill_parameter
from serving.model.decoder import Decoder
from serving.model.moe import MoeMlp
from serving.model.quantized_linear import hold_int8, own_dtypes


class CheckpointExperts:
    """(MoE layer, counted from the first one; expert) → the expert on the CPU, with the bits that `load` gives it.

    Its calls read that expert's tensors alone. Raises ValueError when the files at `path` do not fit together.
    """

    def __init__(self, path: Path, dtype: str = "auto") -> None:
        spec, self._checkpoint, own = open_checkpoint(path)
        self._dtype = DTYPES[own if dtype == "auto" else dtype]
        with torch.device("meta"):
            model = Decoder(spec)
            if self._checkpoint.float8:
                raise ValueError("ranks share no FP8 weights: use a checkpoint in BF16 or INT8")
            hold_int8(model, int8_modules(model, self._checkpoint))
        names = [name for name, _ in model.named_parameters()]
        self._parts = sources(spec, names, self._checkpoint.names, self._checkpoint.container)
        self._dtypes = own_dtypes(model)
        self._layers = [(name, mlp) for name, mlp in model.named_modules() if isinstance(mlp, MoeMlp)]

    def __call__(self, layer: int, expert: int) -> nn.Module:
        name, mlp = self._layers[layer]
        name = f"{name}.experts.{expert}"
        module = copy.deepcopy(mlp.experts[expert])
        for leaf, parameter in list(module.named_parameters()):
            full = f"{name}.{leaf}"
            value = torch.empty(parameter.shape, dtype=self._dtypes.get(full, self._dtype))
            fill_parameter(full, value, self._parts[full], self._checkpoint, Cut())
            owner, last = leaf.rsplit(".", 1)
            setattr(module.get_submodule(owner), last, nn.Parameter(value, requires_grad=False))
        use_cpu_linears(module)
        return module.eval()
