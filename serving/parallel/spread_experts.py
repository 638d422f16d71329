"""Mixtures of which each rank holds some experts, whole, and some of a step's rows (sequence_parallel.StepRows).

A rank routes its own rows. They travel to all ranks at once, INT8 where the experts are, with the experts and weights
of each; what a rank's experts make of a row is added up there, and comes back as one row from every rank. Both ways are
one exchange of parts of one size, which follows from the number of rows alone: nobody has to be told how many come, and
buffers stay where they are once the largest step has been.

Shapes: T rows of the step, n ranks, t rows of this rank, C = ⌈T / n⌉ the most of any, N = n · C, H hidden width, K
experts of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serving.expert_parallel.exchange import SCALE_BYTES, Rows
from serving.expert_parallel.layer import of_rows, takes_int8
from serving.expert_parallel.local import on_the_wire
from serving.model.decoder import Decoder
from serving.model.moe import MoeMlp, route
from serving.parallel.collective import added
from serving.parallel.rank_module import RankModule
from serving.parallel.sequence_parallel import AllRows, HeadsToRows, OwnRows, RowsToHeads, StepRows

NOBODY = -1  # the expert of a row that is none
ALIGNED = 16  # bytes of which a row on the wire has a multiple
NUMBER_BYTES = 4  # of an expert's number, and of its weight


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows of all ranks: `experts` int32 [N, K], NOBODY's where there is no row, `weights` float32 [N, K]."""

    rows: Rows
    experts: Tensor
    weights: Tensor


class RowExchange:
    """One rank's part; all layers with rows of one width and as many experts take turns with it."""

    def __init__(self, rows: StepRows, hidden: int, top_k: int, wire: torch.dtype, back: torch.dtype) -> None:
        """`wire` is the type that rows travel in, int8 or the model's own, `back` that of what comes back."""
        self.rows, self.hidden, self.top_k, self.wire, self.back = rows, hidden, top_k, wire, back
        scale = hidden * wire.itemsize + -(hidden * wire.itemsize) % NUMBER_BYTES
        self._scale_at = scale
        self._experts_at = scale + (SCALE_BYTES if wire is torch.int8 else 0)
        self._weights_at = self._experts_at + top_k * NUMBER_BYTES
        end = self._weights_at + top_k * NUMBER_BYTES
        self.row_bytes = end + -end % ALIGNED
        self._memory: dict[str, Tensor] = {}

    @property
    def quantized(self) -> bool:
        """Whether rows travel as int8."""
        return self.wire is torch.int8

    def reserve(self, total: int, device: torch.device) -> None:
        """Make room for steps of up to so many rows, now: graphs name the memory that they were captured with."""
        most, beside = self.most(total), torch.empty(0, device=device)
        for name in ("sent", "came"):
            self._room(name, most * self.row_bytes, beside)
        for name in ("made", "back"):
            self._room(name, most * self.hidden * self.back.itemsize, beside)

    def most(self, rows: int) -> int:
        """Rows that a step of so many is dispatched as."""
        return self.rows.group.size * -(-rows // self.rows.group.size)

    def dispatch(self, own_rows: Rows, experts_tK: Tensor, weights_tK: Tensor) -> RoutedRows:
        """The rows of all ranks, rank after rank; valid until the next dispatch."""
        ranks, most, x_tH = self.rows.group.size, self._most, own_rows.values
        own = self._room("sent", ranks * most * self.row_bytes, x_tH).view(ranks, most, self.row_bytes)
        came = self._room("came", ranks * most * self.row_bytes, x_tH).view(ranks * most, self.row_bytes)
        count, sent = len(x_tH), self._parts(own[0])
        rows = on_the_wire(own_rows, self.wire)
        sent.rows.values[:count] = rows.values
        if sent.rows.scale is not None and rows.scale is not None:
            sent.rows.scale[:count] = rows.scale
        sent.experts[:count] = experts_tK
        sent.experts[count:].fill_(NOBODY)
        sent.weights[:count] = weights_tK
        own[1:] = own[0]
        self.rows.group.exchange(came, own)
        return self._parts(came)

    def dispatched(
        self, values_tH: Tensor, scales_t: Tensor | None, chosen_tK: Tensor, weights_tK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """`dispatch`, as kernels have routed and, where rows travel so, quantized them: each in memory of its own."""
        routed = self.dispatch(Rows(values_tH, scales_t), chosen_tK, weights_tK)
        scales_N = routed.rows.scale
        return (
            routed.rows.values.contiguous(),
            None if scales_N is None else scales_N.contiguous(),
            routed.experts.contiguous(),
            routed.weights.contiguous(),
        )

    def combine(self, made_NH: Tensor) -> Tensor:
        """What all ranks have made of this rank's rows, float32 [t, H], added up rank 0 first."""
        ranks, most = self.rows.group.size, self._most
        size = ranks * most * self.hidden * self.back.itemsize
        sent, came = (self._room(name, size, made_NH).view(self.back) for name in ("made", "back"))
        sent.view_as(made_NH).copy_(made_NH)
        self.rows.group.exchange(came, sent)
        return added(came.view(ranks, most, self.hidden)[:, : len(self.rows.own)])

    @property
    def _most(self) -> int:
        return max(self.rows.counts)

    def _parts(self, rows: Tensor) -> RoutedRows:
        """Views of rows [·, row_bytes] as they travel."""
        values = rows[:, : self.hidden * self.wire.itemsize].view(self.wire)
        scale = None
        if self.wire is torch.int8:
            scale = rows[:, self._scale_at : self._experts_at].view(torch.float32)[:, 0]
        experts = rows[:, self._experts_at : self._weights_at].view(torch.int32)
        weights = rows[:, self._weights_at : self._weights_at + self.top_k * NUMBER_BYTES].view(torch.float32)
        return RoutedRows(Rows(values, scale), experts, weights)

    def _room(self, name: str, count: int, beside: Tensor) -> Tensor:
        """So many bytes where `beside` is, as large as the largest step needed so far."""
        held = self._memory.get(name)
        if held is None or len(held) < count:
            held = self._memory[name] = torch.empty(count, dtype=torch.uint8, device=beside.device)
        return held[:count]


class SpreadMoe(MoeMlp, RankModule):
    """A mixture's part of this rank: `experts` are those it holds, under their numbers. [t, H] → [t, H]."""

    def __init__(self, mlp: MoeMlp, exchange: RowExchange) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(mlp.__dict__)  # its parameters and modules, whatever the family has
        self.exchange = exchange

    def forward(self, x_TH: Tensor) -> Tensor:
        experts_TK, weights_TK = route(self.router(x_TH), self.spec, self.correction)
        routed = self.exchange.dispatch(Rows(x_TH), experts_TK, weights_TK)
        out_TH = self.exchange.combine(made(dict(self.experts.named_children()), routed, x_TH.dtype))
        if self.shared is not None:
            out_TH += self.shared(x_TH).float()
        return out_TH.to(x_TH.dtype)

    @property
    def held(self) -> range:
        """The experts of this rank."""
        numbers = [int(name) for name, _ in self.experts.named_children()]
        return range(numbers[0], numbers[-1] + 1)


class RowShare:
    """What a fused step asks of the other ranks, where each has some of its rows: see StepRanks.

    It reads the weights of these modules, calls none of them, and exchanges as they do.
    """

    shares_rows = True

    def __init__(self, embed: OwnRows, qkv: RowsToHeads, o: HeadsToRows, norm: AllRows, mixtures: Sequence[SpreadMoe]):
        """`qkv` and `o` are those of one layer, and exchange as all do."""
        self.embedded, self.by_heads, self.by_rows = embed.forward, qkv.by_heads, o.by_rows
        self.all_rows, self.check = norm.gathered, norm.rows.group.check
        self._mixtures = mixtures

    def summed(self, branch_TH: Tensor) -> Tensor:
        return branch_TH  # each rank has all weights of its rows

    def gathered(self, own_RV: Tensor) -> Tensor:
        return own_RV

    def reserve(self, rows: int) -> None:
        """Make room for exchanges of steps of up to so many rows."""
        for exchange, mlp in {mlp.exchange: mlp for mlp in self._mixtures}.items():
            exchange.reserve(rows, mlp.router.weight.device)

    @staticmethod
    def of(model: Decoder) -> RowShare | None:
        """Of a model of which ranks share the rows of a step, and experts if any; None for any other."""
        exchanging = [module for module in model.modules() if isinstance(module, RankModule)]
        if not all(isinstance(one, OwnRows | RowsToHeads | HeadsToRows | AllRows | SpreadMoe) for one in exchanging):
            return None
        attention = model.layers[0].get_submodule("attention")
        embed, norm = model.embed, model.norm
        qkv, o = (getattr(attention, name, None) for name in ("qkv", "o"))  # other kinds of attention have others
        if not (isinstance(embed, OwnRows) and isinstance(norm, AllRows)):
            return None
        if not (isinstance(qkv, RowsToHeads) and isinstance(o, HeadsToRows)):
            return None
        return RowShare(embed, qkv, o, norm, [one for one in exchanging if isinstance(one, SpreadMoe)])


def made(experts: Mapping[str, nn.Module], routed: RoutedRows, dtype: torch.dtype) -> Tensor:
    """What these experts make of the rows that take them, times their weights, float32 [N, H].

    A row's are added in the order of the experts here, whatever other rows there are.
    """
    top_k, of_pairs, weights = routed.experts.shape[1], routed.experts.flatten(), routed.weights.flatten()
    order = of_pairs.argsort(stable=True)
    numbers = torch.arange(max(map(int, experts)) + 2, dtype=torch.int32, device=of_pairs.device)
    ends = torch.searchsorted(of_pairs[order], numbers).tolist()  # the first pair of each expert, and of what follows
    total_NH = torch.zeros(routed.rows.values.shape, dtype=torch.float32, device=of_pairs.device)
    for name, expert in experts.items():
        pairs = order[ends[int(name)] : ends[int(name) + 1]]
        if len(pairs):
            at, scale = pairs // top_k, routed.rows.scale
            taken = Rows(routed.rows.values[at], None if scale is None else scale[at])
            out = of_rows(expert, taken, slice(None), dtype).float()
            total_NH[at] += out * weights[pairs, None]
    return total_NH


def wire_type(mixtures: Iterable[MoeMlp], dtype: torch.dtype) -> torch.dtype:
    """int8 where all experts would make the same integers of a row themselves, else the model's own type.

    The same on all ranks, since the experts of a layer are alike (layer.check_alike).
    """
    return torch.int8 if all(takes_int8(one) for mlp in mixtures for one in mlp.experts.children()) else dtype
