"""How verbs print: tables and progress for people, JSON for programs."""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.text import Text

from linkcpp.common.text import printable_lines

_LINE_SECONDS = 10.0
_ID_IN_BRACKETS = re.compile(r" \([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\)")


class PrintableConsole(Console):
    """A console on which a text is itself, wherever it comes from: it controls no terminal.

    A ``str`` is never markup or the name of an emoji: ``[fe80::1:bee:1]`` is an address. What is to
    have a style is a ``Text``.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, markup=False, emoji=False, highlight=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Lay something out; what is not printable in its text is replaced."""
        for segment in super().render(renderable, options):
            is_own = segment.control is not None
            yield segment if is_own else segment._replace(text=printable_lines(segment.text))


class _DataConsole(PrintableConsole):
    """A console whose reader may go away: what that means is for ``cli.main`` to say."""

    def on_broken_pipe(self) -> NoReturn:
        """Let the ``BrokenPipeError`` go on that called this."""
        raise  # noqa: PLE0704


def console(min_columns: int = 40) -> Console:
    """Give the console for results, on stdout.

    A terminal of fewer than ``min_columns`` wraps the lines itself: a table squeezed into it
    would lose whole columns.
    """
    made = _DataConsole()
    made.width = max(made.width, min_columns)
    return made


def status_console() -> Console:
    """Give the console for progress and remarks, on stderr, so that stdout stays data."""
    return PrintableConsole(stderr=True)


@contextmanager
def working(doing: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is being done meanwhile; call what it yields to say something else."""
    with status_console().status(Text(doing)) as status:
        yield lambda other: status.update(Text(other))


def print_json(value: Any) -> None:
    """Print records, or plain data with records in it, as JSON and nothing else.

    In ASCII, so that it passes through any locale, and no name in it controls a terminal.
    """
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def without_ids(text: str) -> str:
    """Leave out the machine ids in brackets that stand behind names: they are for programs."""
    return _ID_IN_BRACKETS.sub("", text)


def chat_sentence(url: str, *, needs_key: bool) -> str:
    """Say where llama-server's chat page is."""
    key = "; enter the API key in its settings" if needs_key else ""
    return f"chat: open {url} in a browser{key}"


def window_text(first_layer: int, layer_count: int, *, holds_output: bool) -> str:
    """Name a window of layers: ``0-4``, ``7``, ``22-29 + output``, ``output``."""
    last = first_layer + layer_count - 1
    span = f"{first_layer}-{last}" if last > first_layer else str(first_layer)
    parts = [span] if layer_count else []
    return " + ".join([*parts, "output"] if holds_output else parts)


class ProgressLines:
    """Progress for a log file or a pipe, where a terminal would have bars: plain lines on stderr.

    The beginning and the end of each step get a line, and what is between them at most one in ten
    seconds. ``clock`` tells seconds.
    """

    def __init__(self, screen: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = screen
        self._clock = clock
        self._said_at: dict[str, float] = {}
        self._ended: set[str] = set()

    def tell(self, step: str, done: int, total: int) -> None:
        """Say how many of how many of a step are done, if it is time to."""
        now = self._clock()
        is_over = done >= total
        is_due = now - self._said_at.get(step, -math.inf) >= _LINE_SECONDS
        if step in self._ended or not (is_due or is_over):
            return
        self._said_at[step] = now
        if is_over:
            self._ended.add(step)
        if total > 1:
            self.say(f"{step}: {done} of {total}")
        else:
            self.say(f"{step}: done" if is_over else step)

    def say(self, line: str) -> None:
        """Write one line, however long it is."""
        self._screen.print(line, soft_wrap=True)


def task_name() -> TextColumn:
    """Make the column of a bar's name, which is data and not markup."""
    return TextColumn("{task.description}", markup=False)


@contextmanager
def byte_bar(name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr meanwhile; call what it yields with bytes just done."""
    columns = (
        task_name(),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=status_console(), transient=True) as progress:
        task = progress.add_task(name, total=total_bytes)
        yield lambda done_bytes: progress.advance(task, done_bytes)
