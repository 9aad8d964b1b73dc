"""Models wherever they are: a file, the web, a preset, or a hub, of which only headers are read."""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from linkcpp.common.cache import clean_cache, hold_folder
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder, expand_home
from linkcpp.model.inventory import inventory_of, read_inventory
from linkcpp.model.parts import is_url
from linkcpp.model.presets import load_model
from linkcpp.model.records import ModelInventory
from linkcpp.registry.client import HubClient, joined_client
from linkcpp.registry.connection import HubUnreachableError
from linkcpp.registry.credentials import list_credentials
from linkcpp.registry.hub_location import HubLocation, may_be_hub_name, parse_hub_location
from linkcpp.registry.hub_model import HubAccess, HubModel
from linkcpp.registry.models import ServedModel

_MAX_OFFERED = 5
_MAX_HEADER_BYTES = 256 * 2**20


def load_model_anywhere(text: str, hub_urls: Collection[str] = ()) -> ModelInventory:
    """Take stock of a model as a user names it: a path, a URL, a hub's location, a name.

    A name is looked for at the hubs that are given, in their order, and only then among presets.
    Of a hub's model ``source`` is its location. Blocks, and must not run in an event loop.

    Raises:
        LinkcppError: there is no such model, it cannot be read, or a hub cannot be asked.
    """
    at_hub = parse_hub_location(text)
    if at_hub is not None:
        return _read_at_hub(at_hub)
    if not may_be_hub_name(text) or expand_home(Path(text)).is_file():
        return load_model(text)
    if not hub_urls:
        return _load_without_hubs(text)
    known: list[str] = []
    for url in hub_urls:
        names = [model.name for model in asyncio.run(hub_models(url))]
        if found := _same_name(text, names):
            return _read_at_hub(HubLocation(url, found))
        known += names
    try:
        return load_model(text)
    except LinkcppError as error:
        offered = f"Those there have {', '.join(known[:_MAX_OFFERED])}. " if known else ""
        raise LinkcppError(
            f"{error.message} No hub that was named has it.", hint=offered + (error.hint or "")
        ) from error


def _load_without_hubs(text: str) -> ModelInventory:
    try:
        return load_model(text)
    except LinkcppError as error:
        locations = [HubLocation(url, text).text for url in _joined_urls()[:_MAX_OFFERED]]
        if not locations:
            raise
        at_hub = f"If a hub has it, name it as {' or '.join(locations)}"
        raise LinkcppError(error.message, hint=f"{error.hint or ''} {at_hub}".lstrip()) from error


def _joined_urls() -> list[str]:
    try:
        return [known.url for known in list_credentials()]
    except LinkcppError:
        return []


def require_here(text: str, verb: str) -> None:
    """Refuse a model that a hub has, where a verb reads the weights of all of it.

    Raises:
        LinkcppError: ``text`` is a hub's location, or a name that only a hub could know.
    """
    hint = "Name its GGUF file."
    if parse_hub_location(text) is not None:
        raise LinkcppError(
            f"`linkcpp {verb}` reads all weights of a model, and a hub gives parts only.",
            hint=hint,
        )
    could_be_file = text.lower().endswith(".gguf") or expand_home(Path(text)).exists()
    if may_be_hub_name(text) and not could_be_file:
        raise LinkcppError(
            f"There is no file {text}, and the name of a hub's model is not enough: "
            f"`linkcpp {verb}` reads all weights.",
            hint=hint,
        )


def read_inventory_anywhere(location: str) -> ModelInventory:
    """Take stock of a model at a path, a URL or a hub's location; raises as ``read_inventory``."""
    at_hub = parse_hub_location(location)
    return read_inventory(location) if at_hub is None else _read_at_hub(at_hub)


def is_elsewhere(location: str) -> bool:
    """Whether a model's location is not a file of this machine.

    Raises:
        LinkcppError: it is a hub's, and malformed.
    """
    return is_url(location) or parse_hub_location(location) is not None


@contextmanager
def opened_at_hub(at_hub: HubLocation) -> Iterator[HubModel]:
    """Open a hub's model with this machine's own tokens; what was read of headers is kept.

    Raises:
        LinkcppError: this machine did not join the hub; as ``HubModel``.
    """
    folder = hashlib.sha256(at_hub.text.encode()).hexdigest()[:32]
    cache = cache_folder() / "hub-models" / folder
    with (
        hold_folder(cache),
        hub_access(at_hub.hub_url) as access,
        HubModel(access, at_hub.name, cache=cache) as model,
    ):
        yield model
    clean_cache(cache.parent, _MAX_HEADER_BYTES)


async def hub_models(hub_url: str) -> tuple[ServedModel, ...]:
    """List the models of a hub.

    Raises:
        LinkcppError: this machine did not join it, or it does not answer.
    """
    async with joined_client(hub_url) as client:
        return (await client.models()).models


async def name_at_hub(hub_url: str, digest: str) -> str | None:
    """Find what a hub calls the model of this digest, if it serves it; raises as ``hub_models``."""
    models = await hub_models(hub_url)
    return next((m.name for m in models if m.digest == digest and m.problem is None), None)


def _same_name(text: str, names: list[str]) -> str | None:
    if text in names:
        return text
    return next((name for name in names if name.casefold() == text.casefold()), None)


def _read_at_hub(at_hub: HubLocation) -> ModelInventory:
    with opened_at_hub(at_hub) as model:
        return inventory_of(model.files, at_hub.text, unnamed=at_hub.name)


@contextmanager
def hub_access(url: str) -> Iterator[HubAccess]:
    """Give access to a hub's weights from any threads, with tokens that are renewed in time.

    Raises:
        LinkcppError: this machine did not join the hub.
    """
    client = joined_client(url)
    tokens = _BlockingTokens(client)
    try:
        yield HubAccess(client.url, tokens.token)
    finally:
        tokens.close()


class _BlockingTokens:
    """Runs the client in an event loop of its own, in whichever thread asks; one at a time."""

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._runner = asyncio.Runner()
        self._lock = threading.Lock()
        self._last: str | None = None

    def token(self) -> str:
        with self._lock:
            try:
                self._last = self._runner.run(self._client.token())
            except HubUnreachableError:
                # It is renewed early, so the last one may do until the hub is back.
                if self._last is None:
                    raise
            return self._last

    def close(self) -> None:
        with self._lock, contextlib.closing(self._runner):
            self._runner.run(self._client.aclose())
