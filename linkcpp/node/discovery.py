"""Find nodes: sources name candidates, every candidate is asked, all at the same time."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence

from linkcpp.cluster.candidates import Candidate, Probe
from linkcpp.cluster.config import Config, load_config, node_url, parse_node_url
from linkcpp.cluster.findings import describe_nodes, nearest_first
from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.mdns import browse
from linkcpp.cluster.measure import this_machine
from linkcpp.cluster.records import Cluster, DiscoveredNode, NodeRecord
from linkcpp.cluster.token import load_token
from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import Record
from linkcpp.engine.records import Engine
from linkcpp.node.probe import (
    PROBE_SECONDS,
    measure,
    no_answer,
    probe_node,
)

DISCOVER_SECONDS = 3.0

# A flood of advertisements must neither exhaust sockets nor keep the user waiting.
_MAX_URLS = 512
_MAX_CONCURRENT = 32
_MAX_CLAIMS_OF_URL = 16
_GRACE_SECONDS = PROBE_SECONDS + 0.5
_LINKS_SECONDS = 10.0
# Describing takes at most one part in ten of the time.
_TELLING_SHARE = 9.0

# A source yields candidates until it has no more, or for ever. mDNS, URLs that a person names, and
# any later registry have this one form.
Source = Callable[[], AsyncGenerator[Candidate]]
OnChange = Callable[[tuple[DiscoveredNode, ...]], None]


class Discovery(Record):
    """What a search found, and what went wrong with the search itself (``notes``).

    ``nodes`` has the coordinator's own agent too, marked ``is_this_machine``. What hubs of
    ``unanswered_hub_urls`` have is not among them.
    """

    coordinator: NodeRecord
    nodes: tuple[DiscoveredNode, ...]
    notes: tuple[str, ...]
    unanswered_hub_urls: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """What a plan may use."""
        others = tuple(node for node in self.nodes if not node.is_this_machine)
        return Cluster(coordinator=self.coordinator, nodes=others)


async def find_nodes(
    engine: Engine | None,
    *,
    urls: Collection[str] = (),
    use_mdns: bool = True,
    timeout_seconds: float = DISCOVER_SECONDS,
    known: Collection[DiscoveredNode] = (),
    on_change: OnChange | None = None,
) -> Discovery:
    """Find nodes by mDNS, by ``urls`` (as people write them) and by this machine's settings.

    ``engine`` is this machine's, with which those of the nodes are compared. ``known`` are nodes
    of an earlier search: they are asked again even if they are not advertised any more.

    Raises:
        LinkcppError: there is no token, or the settings or a URL cannot be read.
    """
    token = load_token()
    config = load_config()
    sources = [*sources_of(config, urls, use_mdns=use_mdns), known_source(known)]
    coordinator = await asyncio.to_thread(
        this_machine,
        engine,
        identity=load_identity(config.name),
        memory_limit_bytes=config.memory_limit_bytes,
    )
    return await discover(
        token, coordinator, sources, timeout_seconds=timeout_seconds, on_change=on_change
    )


def sources_of(config: Config, urls: Collection[str], *, use_mdns: bool) -> list[Source]:
    """Choose the sources: what a person names, the settings, and mDNS unless switched off.

    Raises:
        LinkcppError: a URL is not the address of a node.
    """
    sources = [
        url_source([parse_node_url(url) for url in urls], "--node"),
        url_source(config.nodes, "config"),
    ]
    if use_mdns and config.mdns:
        sources.append(mdns_source())
    return sources


def url_source(urls: Collection[str], found_by: str) -> Source:
    """Name the nodes at URLs that a person gave (as ``parse_node_url`` writes them)."""

    async def candidates() -> AsyncGenerator[Candidate]:
        for url in urls:
            yield Candidate(url=url, found_by=found_by)

    return candidates


def known_source(nodes: Collection[DiscoveredNode]) -> Source:
    """Name nodes that an earlier search found: one that is gone is then shown as gone."""

    async def candidates() -> AsyncGenerator[Candidate]:
        for node in nodes:
            if node.record is None:
                continue
            node_id = node.record.node_id
            for url in node.urls:
                yield Candidate(
                    url=url,
                    found_by="earlier search",
                    instance=node_id,
                    node_id=node_id,
                    name=node.record.name,
                )

    return candidates


def mdns_source() -> Source:
    """Name what is advertised on the local network; ends only when it is closed."""

    async def candidates() -> AsyncGenerator[Candidate]:
        async with contextlib.aclosing(browse()) as advertised:
            async for service in advertised:
                for host in service.hosts:
                    yield Candidate(
                        url=node_url(host, service.port),
                        found_by="mdns",
                        instance=service.instance,
                        node_id=service.node_id,
                        name=service.name,
                    )

    return candidates


async def discover(
    token: str,
    coordinator: NodeRecord,
    sources: Sequence[Source],
    *,
    timeout_seconds: float = DISCOVER_SECONDS,
    on_change: OnChange | None = None,
) -> Discovery:
    """Ask every candidate of every source, and describe the nodes that there are.

    Listens until all sources have ended or ``timeout_seconds`` are over, gives those that were
    heard of last one probe's time to answer, then measures the links one after the other.
    ``on_change`` gets what is known after answers (rarely where there are very many) and
    at the end.
    """
    search = _Search(token, coordinator, on_change)
    try:
        await search.listen(sources, timeout_seconds)
        await search.finish_probes()
        await search.measure_links()
    finally:
        await search.aclose()
    nodes = search.describe()
    if on_change is not None:
        on_change(nodes)
    return Discovery(coordinator=coordinator, nodes=nodes, notes=tuple(search.notes))


class _Search:
    """One search: the addresses heard of, the probes that run, and their outcomes."""

    def __init__(self, token: str, coordinator: NodeRecord, on_change: OnChange | None) -> None:
        self.notes: list[str] = []
        self._token = token
        self._coordinator = coordinator
        self._on_change = on_change
        self._at_once = asyncio.Semaphore(_MAX_CONCURRENT)
        # Several sources may name one URL: it is asked once.
        self._candidates: dict[str, list[Candidate]] = {}
        self._probes: dict[str, Probe] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None
        self._told_at = 0.0
        self._telling_pause = 0.0

    async def listen(self, sources: Sequence[Source], seconds: float) -> None:
        """Take candidates from all sources at once and start to ask them."""
        readers = [self._start(self._read(source)) for source in sources]
        if readers:
            _, late = await asyncio.wait(readers, timeout=seconds)
            await _cancel(late)
        self._raise_defect()

    async def finish_probes(self) -> None:
        """Wait for the answers that are still to come, no longer than a probe may take."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_GRACE_SECONDS)
        for url, candidates in self._candidates.items():
            if url not in self._probes:
                self._probes[url] = no_answer(candidates[0], "too many addresses to ask in time")
        self._raise_defect()

    async def measure_links(self) -> None:
        """Add the throughput to each node, at its nearest address."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINKS_SECONDS):
                for url in self._nearest_urls():
                    probe = self._probes[url]
                    link = await measure(probe, self._token)
                    if link is not None:
                        self._probes[url] = probe.model_copy(update={"link": link})
                        self._tell()

    async def aclose(self) -> None:
        """End whatever still runs."""
        await _cancel(self._tasks)

    def describe(self) -> tuple[DiscoveredNode, ...]:
        """Describe the nodes known now."""
        probes = [
            self._probes[url].model_copy(update={"candidate": candidate})
            for url, candidates in self._candidates.items()
            if url in self._probes
            for candidate in candidates
        ]
        return describe_nodes(probes, self._coordinator)

    async def _read(self, source: Source) -> None:
        try:
            async with contextlib.aclosing(source()) as candidates:
                async for candidate in candidates:
                    self._add(candidate)
        except LinkcppError as error:
            self.notes.append(str(error))

    def _add(self, candidate: Candidate) -> None:
        known = self._candidates.get(candidate.url)
        if known is None:
            # What a person names is always asked.
            if candidate.instance is None or len(self._candidates) < _MAX_URLS:
                self._candidates[candidate.url] = [candidate]
                self._start(self._probe(candidate))
        elif candidate not in known and len(known) < _MAX_CLAIMS_OF_URL:
            known.append(candidate)

    async def _probe(self, candidate: Candidate) -> None:
        turn = self._at_once if candidate.instance else contextlib.nullcontext()
        async with turn:
            self._probes[candidate.url] = await probe_node(candidate, self._token)
        self._tell()

    def _nearest_urls(self) -> list[str]:
        by_id: dict[str, list[Probe]] = {}
        for probe in self._probes.values():
            if probe.record is not None:
                by_id.setdefault(probe.record.node_id, []).append(probe)
        return [nearest_first(group)[0].candidate.url for group in by_id.values()]

    def _tell(self) -> None:
        # Describing all after each of a thousand answers would take longer than the answers.
        now = time.monotonic()
        if self._on_change is not None and now - self._told_at >= self._telling_pause:
            nodes = self.describe()
            self._told_at = time.monotonic()
            self._telling_pause = _TELLING_SHARE * (self._told_at - now)
            self._on_change(nodes)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._defect = self._defect or task.exception()

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise self._defect


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
