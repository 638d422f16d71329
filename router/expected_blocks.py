"""The KV blocks of one prompt at the workers that will hold them, until it is known what became of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.prefix_index import PrefixIndex


class ExpectedBlocks:
    """Blocks that the index counts on before they are there. Those that do not come are taken back from it."""

    def __init__(self, index: PrefixIndex | None = None):
        self._index = index
        self._open: dict[str, list[bytes]] = {}  # by the worker's instance

    def expect(self, instance: str, keys: Sequence[bytes]) -> None:
        """The worker will hold these."""
        if self._index is not None:
            self._open[instance] = self._index.expect(instance, keys)

    def came(self, instance: str) -> None:
        """It holds them. Safe to repeat, and of others."""
        self._settle(instance, there=True)

    def give_up(self) -> None:
        """Nothing more comes. Safe to repeat."""
        for instance in list(self._open):
            self._settle(instance, there=False)

    def _settle(self, instance: str, *, there: bool) -> None:
        keys = self._open.pop(instance, None)
        if keys and self._index is not None:
            self._index.settle(instance, keys, there=there)
