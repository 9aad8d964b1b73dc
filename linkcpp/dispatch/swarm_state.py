"""What calls and spot checks share: who computes which experts now, and what was counted."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from linkcpp.dispatch.failures import FailureLog
from linkcpp.dispatch.fallback import Fallback
from linkcpp.dispatch.holders import Holders
from linkcpp.dispatch.routing import LayerRoutes, Routes, plan_routes
from linkcpp.worker.sampling import DEFAULT_RATE


@dataclass(frozen=True)
class SwarmOptions:
    """How patient to be.

    ``deadline_floor_ms``: nobody is given up earlier than that. ``patience_seconds``: how long a
    request waits where there is no other holder and no fallback; its rows are
    ``missing_value`` then. ``check_rows``: whether workers are checked before they are used.
    ``spot_check_rate``: which part of the experts' work is compared while it is used.
    """

    deadline_floor_ms: float = 250.0
    patience_seconds: float = 20.0
    missing_value: float = float("nan")
    check_rows: bool = True
    spot_check_rate: float = DEFAULT_RATE


@dataclass(slots=True)
class SwarmCounters:
    """What happened since the start."""

    call_count: int = 0
    pair_count: int = 0
    rerouted_pair_count: int = 0
    late_count: int = 0
    nonsense_count: int = 0
    seconds: float = 0.0


class SwarmState:
    """All workers, the fallback, and the routes to them.

    ``calling`` is held by whoever uses links that are up. ``hopeless_routes`` are those with which
    a request has waited in vain.
    """

    def __init__(
        self,
        *,
        expert_counts: Mapping[int, int],
        holders: Holders,
        fallback: Fallback | None,
        options: SwarmOptions,
        failures: FailureLog,
        calling: threading.Lock,
    ) -> None:
        self.holders = holders
        self.fallback = fallback
        self.options = options
        self.failures = failures
        self.calling = calling
        self.counters = SwarmCounters()
        self.routes: Routes = plan_routes(expert_counts, [])
        self.hopeless_routes: Routes | None = None

    def routes_of(self, layer: int) -> LayerRoutes:
        """Who holds the experts of a layer now."""
        return self.routes[layer]

    def pause(self, seconds: float) -> None:
        """Let a call that waits for nothing but a worker wait; links may be used meanwhile.

        Checks need them, and without its check no worker comes back.
        """
        self.calling.release()
        try:
            time.sleep(seconds)
        finally:
            self.calling.acquire()
