"""Who holds experts, as the virtual device sees it: how it is asked, and what was seen of it."""

import itertools
import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from linkcpp.dispatch.checks import THE_MODEL, RowCheck, Trial
from linkcpp.dispatch.routing import Latency
from linkcpp.worker.agreement import Verdict
from linkcpp.worker.chain import Chain, KeyedChain
from linkcpp.worker.frames import Buffer, ErrorCode, FrameError, Limits, Pairs, TokenPairs, Welcome

FIRST_RETRY_SECONDS = 0.2

_request_numbers = itertools.cycle(range(1, 1 << 31))


def next_request_number() -> int:
    """Return a number that no request under way has; from any thread.

    Calls and checks take theirs from the same row, or a worker could tell them apart.
    """
    return next(_request_numbers)


class LinkState(StrEnum):
    """Whether a holder can be asked."""

    CONNECTING = "connecting"
    CHECKING = "checking"
    UP = "up"
    REFUSED = "refused"


class Pollable(Protocol):
    """A link that is up: a socket, or a stream of a link to another machine."""

    def fileno(self) -> int:
        """What ``poll`` waits for."""
        ...


class Answer(NamedTuple):
    """What a request brought: f32 bytes of a row for each pair, and the microseconds it took."""

    request_id: int
    rows: Buffer
    compute_us: int


class Holder(ABC):
    """One holder: its link, what it holds, and what was seen of it.

    Requests leave at once as far as the socket takes them, and are answered in any order. Counters
    are for people; only the dispatching thread writes them.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.state = LinkState.CONNECTING
        self.detail = "not connected yet"
        self.welcome: Welcome | None = None
        self.latency = Latency()
        self.pair_count = 0
        self.request_count = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.failure_count = 0
        self.loaded_bytes = 0
        self.worker_seconds = 0.0
        self.waited_seconds = 0.0
        self.retry_at = 0.0
        self.retry_seconds = FIRST_RETRY_SECONDS
        self.has_answered = False
        self.is_removed = False
        self.is_rechecked = False
        self.taught_count = 0
        self.refusal_count = 0
        self.checks: dict[tuple[int, Hashable], RowCheck] = {}
        # Of whom it had the bits in spot checks since it was linked: name, layer, number of rows.
        self.equal_rows: set[tuple[str, int, int]] = set()
        # A spot check that waits for an answer, whoever reads it.
        self.on_other_answer: Callable[[Answer], None] | None = None
        self.link: Pollable | None = None
        self._max_pairs: dict[Hashable, tuple[Limits, int]] = {}

    @property
    def is_expected(self) -> bool:
        """Whether it is up, or was and is only being checked once more."""
        return self.state == LinkState.UP or (
            self.state == LinkState.CHECKING and self.is_rechecked
        )

    def has_passed(self, trial: Trial) -> bool:
        """Whether it was checked for this, or holds nothing of the layer."""
        segments = self.welcome.segments if self.welcome else ()
        return (trial.layer, trial.chain.key) in self.checks or not any(
            segment.layer == trial.layer for segment in segments
        )

    def has_bits_of_model(self, layer: int, chain: KeyedChain) -> bool:
        """Whether its rows were the model's to the bit when it was linked."""
        check = self.checks.get((layer, chain.key))
        return (
            check is not None
            and check.against == THE_MODEL
            and check.agreement is not None
            and check.agreement.verdict == Verdict.EXACT
        )

    def max_pairs(self, chain: KeyedChain) -> int:
        """Return how many pairs it takes, and may answer, in one request; it has greeted."""
        assert self.welcome is not None  # noqa: S101 - set before a holder is up
        limits = self.welcome.limits
        known = self._max_pairs.get(chain.key)
        if known is None or known[0] is not limits:
            pair_bytes = 4 * max(sum(chain.input_widths) + 2, chain.output_width + 8)
            most = max(1, min(limits.pairs, limits.rows, limits.frame_bytes // pair_bytes))
            known = self._max_pairs[chain.key] = limits, most
        return known[1]

    def pass_over(self, answer: Answer) -> None:
        """Hand on an answer to somebody else's request, or to one that nobody waits for."""
        if self.on_other_answer is not None:
            self.on_other_answer(answer)

    def note_answer(self, pairs: int, took_seconds: float, compute_us: int) -> None:
        """Take note of an answer for people and for routing."""
        self.has_answered = True
        self.latency.observe(pairs, took_seconds * 1000)
        self.pair_count += pairs
        self.worker_seconds += compute_us / 1e6
        self.waited_seconds += took_seconds

    @property
    @abstractmethod
    def is_sending(self) -> bool:
        """Whether bytes wait until the link takes them, and ``poll`` tells when it does."""

    def way(self) -> str | None:
        """Say which way the link to it takes now, and why; ``None`` on this machine."""
        return None

    @abstractmethod
    def open(self, chains: Sequence[tuple[int, Chain]], model_digest: str | None) -> None:
        """Link to it and set ``welcome`` and ``link``; blocking, for a thread of its own.

        Raises:
            OSError: it does not work out now.
            FrameError: it refuses, or is not for this model.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget what was asked; may be called twice. ``open`` brings it back."""

    def end(self) -> None:
        """Close it for good."""
        self.close()

    @abstractmethod
    def teach(self, chain_id: int, chain: Chain) -> None:
        """Let it know a chain that calls will use.

        Raises:
            OSError: the link broke.
        """

    @abstractmethod
    def ask(self, number: int, chain: KeyedChain, pairs: Pairs) -> None:
        """Ask for the rows of pairs.

        Raises:
            OSError: the link broke.
            FrameError: it cannot do this.
        """

    @abstractmethod
    def ask_token(self, number: int, chain: KeyedChain, token: TokenPairs) -> None:
        """As ``ask`` for one token, whose chain has one input of one row a token."""

    @abstractmethod
    def forget(self, number: int) -> None:
        """Pass the answer to a request over, whatever it is."""

    @abstractmethod
    def resume(self) -> None:
        """Send what waits; raises as ``ask``."""

    @abstractmethod
    def receive(self, within_ms: float = 0.0) -> bool:
        """Read what is there, or what comes in time; tell whether there was anything.

        Raises:
            OSError: the link broke or was closed.
            FrameError: it cannot do what it was asked before.
        """

    @abstractmethod
    def next_answer(self) -> Answer | None:
        """Return the next whole answer; it is valid until the next ``receive``.

        Raises:
            FrameError: it refuses a request, or answers what makes no sense.
        """


def check_model(welcome: Welcome, model_digest: str | None) -> None:
    """See that a holder has experts of this model.

    Raises:
        FrameError: it has those of another one.
    """
    if model_digest is not None and welcome.model_digest != model_digest:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "It holds slabs of another model.")


def wait_for_links(holders: Sequence[Holder], timeout_ms: float) -> list[Holder]:
    """Return the holders that can be read, or written where bytes wait."""
    poll = select.poll()
    by_descriptor = {}
    for holder in holders:
        if holder.link is None:
            continue
        descriptor = holder.link.fileno()
        by_descriptor[descriptor] = holder
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if holder.is_sending else 0))
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(timeout_ms)]
