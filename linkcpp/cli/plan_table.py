"""What the tables of a plan have in common: they fit a terminal of 80 columns."""

from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table

from linkcpp.cli.tables import WholeTable

_MIN_COLUMNS_FOR_BARS = 100
_MAX_NAME_CHARACTERS_IN_ONE_LINE = 18


class BarsWhereRoom:
    """A table that has its column of bars only on a wide terminal; ``make(has_bars)`` makes it."""

    def __init__(self, make: Callable[[bool], Table]) -> None:
        self._make = make

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Give the table that fits."""
        yield self._make(options.max_width >= _MIN_COLUMNS_FOR_BARS)


def plan_table(names: Iterable[str], layers_title: str) -> Table:
    """Begin a table with columns for node, device and layers; layers are what wraps."""
    table = WholeTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    is_short = all(len(name) <= _MAX_NAME_CHARACTERS_IN_ONE_LINE for name in names)
    table.add_column("NODE", no_wrap=is_short)
    table.add_column("DEVICE", no_wrap=True)
    table.add_column(layers_title)
    return table
