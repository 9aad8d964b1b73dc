"""llama-server's HTTP API, as far as a supervisor needs it."""

import asyncio
import json
import re
import socket
from pathlib import Path

import httpx

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.errors import LinkcppError, error_of_system
from linkcpp.common.network_errors import in_words
from linkcpp.common.sockets import HeldPort, hold_port
from linkcpp.front.api_keys import read_api_key

SMOKE_TOKENS = 4
PROBE_SECONDS = 5.0
SMOKE_TIMEOUT_SECONDS = 600.0
_METRIC = re.compile(r"llamacpp:(\w{1,100}) (-?\d[\d.eE+-]{0,40})")
# Some builds say so, with status 500, of tokens that they computed but that are not valid UTF-8.
# There are models with such tokens; other texts of theirs are answered.
_UNTELLABLE = "output that does not match the expected"
_METRICS_LIMIT = 2**20


class ApiClient(AsyncClosing):
    """A client of one llama-server; the key is read from its file and stays in memory."""

    def __init__(self, url: str, api_key_file: str | None) -> None:
        headers = {}
        if api_key_file:
            headers["Authorization"] = f"Bearer {read_api_key(Path(api_key_file))}"
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0, trust_env=False)

    async def aclose(self) -> None:
        """Give back what it holds; may be called twice."""
        await self._http.aclose()

    async def is_healthy(self) -> bool:
        """Whether the model is loaded and requests are taken."""
        try:
            return (await self._http.get("/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def has_chat_page(self) -> bool:
        """Whether a browser finds a page at the root; not every build of llama-server has one."""
        try:
            answer = await self._http.get("/", headers={"Accept-Encoding": "gzip"})
        except httpx.HTTPError:
            return False
        kind = answer.headers.get("content-type", "")
        return answer.status_code == httpx.codes.OK and kind.startswith("text/html")

    async def complete(self) -> str:
        """Ask for a few tokens through the OpenAI API; returns the text, if it is text.

        Raises:
            LinkcppError: the answer is not a completion, or none came.
        """
        body = {
            "prompt": "Hello",
            "max_tokens": SMOKE_TOKENS,
            "temperature": 0,
            "cache_prompt": False,
        }
        try:
            answer = await self._http.post(
                "/v1/completions", json=body, timeout=SMOKE_TIMEOUT_SECONDS
            )
            if _UNTELLABLE in answer.text:
                return ""
            if answer.status_code != httpx.codes.OK:
                raise LinkcppError(
                    f"The first completion was refused with status {answer.status_code}: "
                    f"{told_error(answer.text)}"
                )
            return str(answer.json()["choices"][0]["text"])
        except httpx.HTTPError as error:
            raise LinkcppError(f"The first completion failed: {in_words(error)}.") from error
        except (ValueError, LookupError, TypeError) as error:
            raise LinkcppError("The first completion failed: it is not a completion.") from error

    async def metrics(self) -> dict[str, float]:
        """Return llama-server's counters by their names without ``llamacpp:``.

        Raises:
            LinkcppError: they cannot be had.
        """
        try:
            answer = await self._http.get("/metrics")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise LinkcppError(f"llama-server does not tell its metrics: {error}.") from error
        found = _METRIC.finditer(answer.text[:_METRICS_LIMIT])
        return {match[1]: float(match[2]) for match in found}


async def answers_http(host: str, port: int, path: str) -> bool:
    """Whether a server answers, whatever it says; one that does not listen is not silent.

    llama-server answers ``/health`` from a thread of its own while it loads or computes.
    """
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                head = f"GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                await reader.read(1)
            finally:
                writer.close()
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def told_error(text: str) -> str:
    """Return llama-server's sentence from the body of an answer that is an error, or the body."""
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return text[:300]


def hold_api_port(host: str, port: int) -> HeldPort:
    """Keep a port on which an API will listen; 0 takes one that is free.

    Raises:
        LinkcppError: the port is taken or may not be used, or the address is not this machine's.
    """
    try:
        return hold_port(host, port)
    except (socket.gaierror, UnicodeError) as error:
        raise LinkcppError(
            f"The API cannot listen on {host!r}: not an address or a name that is known here.",
            hint="Give an address of this machine with --host.",
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise error_of_system(
            error,
            f"The API cannot listen on {host} port {port}: {reason}.",
            hint="Choose another port with --port (0: any that is free), or another --host.",
        ) from error


def check_port(host: str, port: int) -> None:
    """See that an API will be able to listen on a port.

    Raises:
        LinkcppError: as ``hold_api_port``.
    """
    hold_api_port(host, port).close()
