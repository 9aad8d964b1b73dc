"""Tables of which nothing is cut off, however narrow the terminal is."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_ANY_WIDTH = 10_000
_READABLE_WIDTH = 8


class Need(NamedTuple):
    """How wide a column is with its longest word, and with its longest line, on one line."""

    word: int
    line: int
    is_rigid: bool


class WholeTable(Table):
    """A table that folds its cells where it does not fit; rich would cut columns at the right.

    Columns with ``no_wrap`` are the last to be folded.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the table out."""
        wide = options.update(width=_ANY_WIDTH)
        needs = [_need(column, console, wide) for column in self.columns]
        between = Measurement.get(console, wide, self).maximum - sum(need.line for need in needs)
        widths = fit_columns(needs, options.max_width - between)
        shown = copy(self)
        shown.columns = [
            replace(column, width=width, no_wrap=False, overflow="fold")
            for column, width in zip(self.columns, widths, strict=True)
        ]
        yield from Table.__rich_console__(shown, console, options)


def _need(column: Column, console: Console, options: ConsoleOptions) -> Need:
    measured = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    word = max(cell.minimum for cell in measured)
    line = max(cell.maximum for cell in measured)
    return Need(word, line, column.no_wrap)


def fit_columns(needs: Sequence[Need], room: int) -> list[int]:
    """Divide ``room`` characters between columns. Pure.

    Lines are broken between words first, and long words, but not in rigid columns; then rigid
    columns are broken between words too; and all words, the longest first, where nothing else
    helps.
    """
    widths = [need.line if need.is_rigid else need.word for need in needs]
    soft = [index for index, need in enumerate(needs) if not need.is_rigid]
    _shrink(widths, soft, room, least=_READABLE_WIDTH)
    if sum(widths) > room:
        widths = [need.word for need in needs]
        _shrink(widths, range(len(needs)), room, least=1)
    for _ in range(room - sum(widths)):
        missing = [need.line - width for need, width in zip(needs, widths, strict=True)]
        if max(missing) <= 0:
            break
        widths[missing.index(max(missing))] += 1
    return widths


def _shrink(widths: list[int], columns: Sequence[int], room: int, *, least: int) -> None:
    """Narrow the widest of some columns until all fit, or those are as narrow as they may be."""
    while sum(widths) > room and columns:
        widest = max(columns, key=widths.__getitem__)
        if widths[widest] <= least:
            return
        widths[widest] -= 1
