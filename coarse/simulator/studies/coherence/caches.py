"""Set-associative caches whose blocks may have timestamps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    """A cached line.

    Args:
        value: Data; one number stands for 64 bytes.
        wts, rts: Logical times between which the value is valid; unused without timestamps.
        is_dirty: Whether memory does not have the value yet.
    """

    value: int
    wts: int = 0
    rts: int = 0
    is_dirty: bool = False


class Cache:
    """Blocks by line; the least recently used one of a set makes room.

    Args:
        num_sets, num_ways: Size.
        stride: Neighbouring lines of this cache are this far apart: the number of banks.
        pages: Lines of a page, and the number of memories that pages go round: sets are chosen by the line's place
            in its own memory.
    """

    def __init__(
        self, num_sets: int, num_ways: int, stride: int = 1, pages: tuple[int, int] = (1, 1)
    ) -> None:
        self._sets: list[dict[int, Block]] = [{} for _ in range(num_sets)]
        self._num_ways, self._stride = num_ways, stride
        self._page_lines, self._round = pages[0], pages[0] * pages[1]
        self.hits = self.misses = 0

    def _blocks(self, line: int) -> dict[int, Block]:
        """The set of a line, least recently used first."""
        if self._round > self._page_lines:
            line = line // self._round * self._page_lines + line % self._page_lines
        return self._sets[line // self._stride % len(self._sets)]

    def find(self, line: int) -> Block | None:
        """The block of a line, which becomes the most recently used one."""
        blocks = self._blocks(line)
        block = blocks.pop(line, None)
        if block is not None:
            blocks[line] = block
        return block

    def put(self, line: int, block: Block, clock: int | None = None) -> tuple[int, Block] | None:
        """Keeps a block; returns the one that made room.

        Args:
            clock: If given, the oldest block that is expired at this logical time makes room, if there is one.
        """
        blocks = self._blocks(line)
        removed = None
        if line not in blocks and len(blocks) >= self._num_ways:
            victim = next(iter(blocks))
            if clock is not None:
                victim = next((each for each, held in blocks.items() if held.rts < clock), victim)
            removed = victim, blocks.pop(victim)
        blocks.pop(line, None)
        blocks[line] = block
        return removed

    def drop(self, line: int) -> Block | None:
        return self._blocks(line).pop(line, None)

    def clear(self) -> list[tuple[int, Block]]:
        """Removes all blocks; returns the dirty ones."""
        dirty = [(line, block) for blocks in self._sets for line, block in blocks.items() if block.is_dirty]
        for blocks in self._sets:
            blocks.clear()
        return dirty
