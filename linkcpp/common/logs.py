"""Structured logs: one JSON object a line, for services whose logs machines read."""

import json
import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes a record with its time, level, logger, message and everything given as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line; in ASCII, so that nothing in it controls a terminal."""
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            extra["exception"] = self.formatException(record.exc_info)
        return json.dumps(told | extra, default=str)


def log_as_json(level: int = logging.INFO) -> None:
    """Write the program's logs to stderr as JSON lines: linkcpp's from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("linkcpp").setLevel(level)
    # Strangers' malformed requests would fill the log; defects of ours still show.
    for noisy in ("uvicorn.error", "websockets", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
