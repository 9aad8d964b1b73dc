"""Logs: one JSON object a line for machines, or one plain line for people.

A hub and a gateway always write JSON. All other programs write what ``LINKCPP_LOG_FORMAT`` says;
programs that they start inherit it.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from linkcpp.common.errors import LinkcppError
from linkcpp.common.request_ids import current_request_id
from linkcpp.common.text import printable_lines

LOG_FORMAT_VARIABLE: Final = "LINKCPP_LOG_FORMAT"
REQUEST_LOGGER: Final = "linkcpp.requests"
FILE_LINE: Final = "%(asctime)s %(levelname)s %(message)s"

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Strangers' malformed requests would fill the log; defects of ours still show.
_NOISY = ("uvicorn.error", "websockets", "zeroconf", "asyncio")


class LogFormat(StrEnum):
    """How log lines are written."""

    PLAIN = "plain"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """Writes a record with its time, level, logger, message and everything given as ``extra``.

    Within a request its id is there too.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Write one line; in ASCII, so that nothing in it controls a terminal."""
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id():
            told["request_id"] = request_id
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            extra["exception"] = self.formatException(record.exc_info)
        return json.dumps(told | extra, default=str)


def said_in_line(line: str) -> str:
    """Return what a log says in a line; of JSON, the message and the end of the exception."""
    if not line.startswith('{"time": '):
        return line
    try:
        told = json.loads(line)
    except ValueError:
        return line
    exception = str(told.get("exception", "")).strip().rpartition("\n")[2]
    return ": ".join(part for part in (str(told.get("message", "")), exception) if part)


class _LineFormatter(logging.Formatter):
    """Writes lines for people; those of requests, which are all fields, in words.

    Nothing in them controls a terminal: other machines' words may be there.
    """

    def format(self, record: logging.LogRecord) -> str:
        if record.name == REQUEST_LOGGER:
            told = vars(record)
            text = "{method} {path}: {status} in {ms} ms, id {request_id}".format(**told)
            if "problem" in told:
                text += f": {told['problem']}"
            record = logging.makeLogRecord(told | {"msg": text, "args": ()})
        return printable_lines(super().format(record))


def log_as_json() -> None:
    """Write the program's logs to stderr as JSON lines."""
    _log_to_stderr(JsonFormatter())


def log_for_people() -> None:
    """Write what happens to stderr, one line each, or JSON where that was chosen.

    In plain lines requests have none of their own: what they do is told in words.
    """
    _log_to_stderr(_formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    if chosen_format() is LogFormat.PLAIN and not _is_debugging():
        logging.getLogger(REQUEST_LOGGER).setLevel(logging.WARNING)


def log_as_started() -> None:
    """Write the logs of a program that another one started and whose output it keeps."""
    _log_to_stderr(_formatter(FILE_LINE))


def log_to_handler(handler: logging.Handler, line: str = FILE_LINE) -> None:
    """Write linkcpp's logs to a handler of the caller's; plain lines are as ``line`` says."""
    handler.setFormatter(_formatter(line))
    logger = logging.getLogger("linkcpp")
    logger.addHandler(handler)
    logger.setLevel(_level())


def chosen_format() -> LogFormat:
    """Return the format that the environment says, plain lines where it says nothing.

    Raises:
        LinkcppError: it says something else.
    """
    value = os.environ.get(LOG_FORMAT_VARIABLE) or LogFormat.PLAIN
    try:
        return LogFormat(value)
    except ValueError:
        raise LinkcppError(
            f"{LOG_FORMAT_VARIABLE} is {value!r}, which is not a format of logs.",
            hint=f"One of: {', '.join(LogFormat)}.",
        ) from None


def choose_format(chosen: LogFormat) -> None:
    """Have this program and all that it starts write their logs so."""
    os.environ[LOG_FORMAT_VARIABLE] = chosen.value


def _formatter(line: str, time: str | None = None) -> logging.Formatter:
    return JsonFormatter() if chosen_format() is LogFormat.JSON else _LineFormatter(line, time)


def _log_to_stderr(formatter: logging.Formatter) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("linkcpp").setLevel(_level())
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _is_debugging() -> bool:
    return bool(os.environ.get("LINKCPP_DEBUG"))


def _level() -> int:
    return logging.DEBUG if _is_debugging() else logging.INFO
