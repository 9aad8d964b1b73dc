"""How logs are written is one choice, and in both ways a line tells of one thing."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from starlette.types import Message

from linkcpp.common.errors import LinkcppError
from linkcpp.common.logs import LOG_FORMAT_VARIABLE, REQUEST_LOGGER, log_to_handler
from linkcpp.common.request_ids import begin_request, current_request_id, request_id_headers
from linkcpp.common.request_log import TracedAnswer

REQUEST = {"method": "GET", "path": "/x", "status": 503, "ms": 1.5, "request_id": "r"}


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What is written to a log; afterwards nothing is logged there any more."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log_to_handler(handler, "%(levelname)s %(message)s")
    yield stream
    logging.getLogger("linkcpp").removeHandler(handler)


def test_for_people_a_request_is_told_in_words(written: io.StringIO) -> None:
    log = logging.getLogger(REQUEST_LOGGER)
    log.info("request", extra=REQUEST)
    log.warning("request", extra={**REQUEST, "problem": "100% gone"})
    assert written.getvalue().splitlines() == [
        "INFO GET /x: 503 in 1.5 ms, id r",
        "WARNING GET /x: 503 in 1.5 ms, id r: 100% gone",
    ]


def test_nothing_in_a_line_for_people_controls_their_terminal(written: io.StringIO) -> None:
    logging.getLogger("linkcpp.node").warning("the hub says %s", "\x1b[2J\x9b\u202e\r\tend")
    assert written.getvalue() == "WARNING the hub says ?[2J???\tend\n".replace("?", "\ufffd")


async def test_what_follows_from_a_request_has_its_id_in_log_and_calls() -> None:
    assert request_id_headers() == {}
    assert begin_request([(b"host", b"x"), (b"x-request-id", b"a.B-9:_/+=@")]) == "a.B-9:_/+=@"
    assert request_id_headers() == {"X-Request-ID": "a.B-9:_/+=@"}
    assert await asyncio.to_thread(current_request_id) == "a.B-9:_/+=@"
    twice = [(b"x-request-id", b"a"), (b"x-request-id", b"b")]
    made = {begin_request(headers) for headers in (twice, [(b"x-request-id", b"a\nb")], ())}
    assert len(made) == 3
    assert not made & {"a", "b", "a\nb"}


@pytest.mark.parametrize("kind", ["http.response.start", "websocket.accept"])
async def test_an_answer_has_the_id_of_its_request_and_no_other(kind: str) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"x-request-id", b"mine")]}
    theirs = [(b"X-Request-ID", b"of-llama-server"), (b"Via", b"x")]
    await TracedAnswer(scope, send)({"type": kind, "headers": theirs})
    assert sent[0]["headers"] == [(b"Via", b"x"), (b"x-request-id", b"mine")]


async def test_a_websocket_that_is_closed_before_it_is_accepted_was_refused() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    answer = TracedAnswer({"type": "websocket", "headers": []}, send)
    await answer({"type": "websocket.close"})
    assert (answer.status, sent) == (403, [{"type": "websocket.close"}])
    accepted = TracedAnswer({"type": "websocket", "headers": []}, send)
    await accepted({"type": "websocket.accept"})
    await accepted({"type": "websocket.close"})
    assert (accepted.status, sent[-1]) == (101, {"type": "websocket.close"})


async def test_json_is_an_object_a_line_whatever_is_logged(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    written = request.getfixturevalue("written")
    begin_request([(b"x-request-id", b"r")])
    logging.getLogger("linkcpp.node").info("two\nlines\x1b[2J", extra={"worker": "attic"})
    (line,) = written.getvalue().splitlines()
    assert "\x1b" not in line
    told = json.loads(line)
    del told["time"]
    assert told == {
        "level": "info", "logger": "linkcpp.node", "message": "two\nlines\x1b[2J",
        "request_id": "r", "worker": "attic",
    }  # fmt: skip


def test_a_format_that_is_none_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "xml")
    with pytest.raises(LinkcppError, match="'xml', which is not a format"):
        log_to_handler(logging.NullHandler())
