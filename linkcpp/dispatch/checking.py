"""Who may use a worker's link when its rows are checked, and what follows from a check."""

import threading
from collections.abc import Sequence

from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.admission import Admission, Asking
from linkcpp.dispatch.asking import ask_alone
from linkcpp.dispatch.checks import RowCheck, Trial
from linkcpp.dispatch.holder import Holder, LinkState
from linkcpp.dispatch.holders import Holders
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.frames import FrameError, Pairs, Rows


class Checker:
    """Checks workers while tokens flow: links that are up are used between two calls only.

    ``calling`` is held by whoever uses such links.
    """

    def __init__(self, admission: Admission, calling: threading.Lock) -> None:
        self._admission = admission
        self._calling = calling
        # The maintenance thread and whoever asks for a check use one source of samples.
        self._one_at_a_time = threading.Lock()

    def check_new(
        self, holders: Holders, holder: Holder, trial: Trial, others: Sequence[Holder]
    ) -> RowCheck:
        """Check a worker that is not up yet; for the maintenance thread. Raises as ``ask_alone``.

        Links that are being checked are that thread's own.
        """

        def ask(one: Holder, chain: KeyedChain, pairs: Pairs) -> Rows:
            if one.state == LinkState.CHECKING:
                return ask_alone(one, chain, pairs)
            return self._ask_between_calls(holders, one, chain, pairs)

        with self._one_at_a_time:
            return self._admission.check(holder, trial, others, Asking(ask, holders.give_up))

    def check_now(
        self, holders: Holders, holder: Holder, trial: Trial, expert_count: int
    ) -> RowCheck:
        """Check a worker that is up with new rows; one whose rows are wrong is refused.

        Raises:
            LinkcppError: it is not up, or could not be asked.
        """

        def ask(one: Holder, chain: KeyedChain, pairs: Pairs) -> Rows:
            return self._ask_between_calls(holders, one, chain, pairs)

        others = [other for other in holders.all() if other is not holder]
        try:
            with self._one_at_a_time:
                check = self._admission.check(
                    holder,
                    trial,
                    [other for other in others if other.state == LinkState.UP],
                    Asking(ask, lambda *_: None),
                    expert_count=expert_count,
                    is_fresh=True,
                )
        except (OSError, FrameError) as error:
            raise LinkcppError(
                f"Worker {holder.name} cannot be checked: {_told(error)}.",
                hint="`linkcpp status` tells more of it.",
            ) from error
        holder.checks[trial.layer, trial.chain.key] = check
        if check.complaint is not None:
            with self._calling:
                holders.refuse(holder, f"{check.complaint[0].upper()}{check.complaint[1:]}.")
        return check

    def _ask_between_calls(
        self, holders: Holders, holder: Holder, chain: KeyedChain, pairs: Pairs
    ) -> Rows:
        with self._calling:
            if holder.state != LinkState.UP:
                raise ConnectionError(holder.detail or "it is not linked now")
            try:
                return ask_alone(holder, chain, pairs)
            except (OSError, FrameError) as error:
                holders.fail(holder, _told(error))
                raise


def find_trial(trials: Sequence[Trial], layer: int) -> Trial:
    """Return the last thing learned of a layer.

    Raises:
        LinkcppError: llama-server has not shown yet what it computes there.
    """
    for trial in reversed(trials):
        if trial.layer == layer:
            return trial
    raise LinkcppError(
        f"What the experts of layer {layer} compute is not known yet.",
        hint="Let llama-server answer something first: it shows its graph then.",
    )


def find_holder(holders: Sequence[Holder], name: str) -> Holder:
    """Return a worker by its name.

    Raises:
        LinkcppError: there is none of that name.
    """
    for holder in holders:
        if holder.name == name:
            return holder
    raise LinkcppError(f"There is no worker {name}.")


def _told(error: Exception) -> str:
    return (error.message if isinstance(error, LinkcppError) else str(error)).rstrip(".")
