"""What llama-server tells of itself in its log (``-lv 4``). Pure.

The format is llama.cpp's own and changes between builds without notice, so a line that is not
understood is not an error: it just tells nothing. Seen with builds 10068 and 11434.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_LINE_CHARACTERS = 8192

_BUFFER = re.compile(
    r"(?P<device>[A-Za-z][\w.]*)(?:\[(?P<endpoint>[^\]]{1,300})\])?"
    r" +(?P<kind>model|KV|RS|compute|output) buffer size *= *(?P<mebibytes>\d{1,9}\.\d{1,6}) MiB"
)
_SPEED = re.compile(
    r"(?P<prompt>prompt )?eval time *=.{1,60}?/ *(?P<tokens>\d{1,9}) (?:tokens|runs)"
    r".{1,60}?, *(?P<speed>\d{1,9}\.\d{1,6}) tokens per second\)"
)
# Lines that say why llama-server gives up, the most telling ones first.
_REASONS = (
    re.compile(r"(couldn't bind HTTP server socket[^\n]*)"),
    re.compile(r"(Remote RPC server crashed or returned malformed response)"),
    re.compile(r"(RPC server version mismatch[^\n]*)"),
    re.compile(r"((?:RPC handshake failed for|Failed to connect to) \S+)"),
    re.compile(r"(unable to allocate [^\n]*)"),
    re.compile(r"(error while handling argument [^\n]*)"),
    re.compile(r"(error: [^\n]*)"),
    re.compile(r"error loading model: ([^\n]*)"),
    re.compile(r"(GGML_ASSERT\([^\n]*)"),
    re.compile(r"( failed to [^\n]*)"),
)
_MEBIBYTE = 2**20


class BufferKind(StrEnum):
    """What a buffer is for."""

    MODEL = "model"
    KV = "kv"
    RECURRENT = "recurrent"
    COMPUTE = "compute"
    OUTPUT = "output"


_KINDS = {
    "model": BufferKind.MODEL,
    "KV": BufferKind.KV,
    "RS": BufferKind.RECURRENT,
    "compute": BufferKind.COMPUTE,
    "output": BufferKind.OUTPUT,
}


@dataclass(frozen=True)
class Buffer:
    """A buffer that llama-server allocated; ``endpoint`` is that of an RPC device.

    The log rounds to hundredths of a MiB, so ``size_bytes`` is right within 5,243 bytes.
    """

    device: str
    endpoint: str | None
    kind: BufferKind
    size_bytes: int


@dataclass(frozen=True)
class Speed:
    """How fast the last request was, as llama-server measured it.

    An answer of one token has no speed (``None``): llama-server's clock starts with the first.
    """

    of_prompt: bool
    tokens_per_second: float | None


class Milestone(StrEnum):
    """Points that llama-server passes on its way up."""

    WARMING_UP = "warming_up"
    MODEL_LOADED = "model_loaded"


Fact = Buffer | Speed | Milestone


def read_line(line: str) -> Fact | None:
    """Return the fact that a log line tells, ``None`` where it tells none that matters."""
    line = line[:MAX_LINE_CHARACTERS]
    if match := _BUFFER.search(line):
        return Buffer(
            device=match["device"],
            endpoint=match["endpoint"],
            kind=_KINDS[match["kind"]],
            size_bytes=round(float(match["mebibytes"]) * _MEBIBYTE),
        )
    if match := _SPEED.search(line):
        of_prompt = match["prompt"] is not None
        has_speed = of_prompt or int(match["tokens"]) > 1
        return Speed(of_prompt, float(match["speed"]) if has_speed else None)
    if "warming up the model" in line:
        return Milestone.WARMING_UP
    if line.rstrip().endswith(": model loaded"):
        return Milestone.MODEL_LOADED
    return None


def failure_reason(log_tail: str) -> str | None:
    """Return the line of the end of a log that says best why llama-server gave up."""
    for pattern in _REASONS:
        if match := pattern.search(log_tail):
            return match[1].strip().rstrip(".")
    return None
