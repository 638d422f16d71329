"""Which part of a group's KV each rank of a layout reads and writes: a view, by layers and heads, of shared planes.

The planes are those of the whole model, so that whoever hands KV over, keeps it or frees it sees no layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.model.decoder import Planes
from serving.model.spec import ModelSpec
from serving.parallel.layout import ParallelLayout


def kv_share(planes: Sequence[Planes], rank: int, spec: ModelSpec, layout: ParallelLayout) -> list[Planes]:
    """Views of the layers and heads that `rank` keeps, of a whole model's planes, [num_blocks, block_size, heads, ...].

    A head that several ranks keep is one view of them all: they write the same bits. So is MLA's latent.
    """
    held, heads = layout.layers(spec, rank), layout.kv_heads(spec, rank)
    layers = planes[held.start : held.stop]
    if spec.mla is not None:
        return list(layers)
    return [tuple(plane[:, :, heads.start : heads.stop] for plane in layer) for layer in layers]
