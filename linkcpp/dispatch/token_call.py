"""A call for one token where all is well, which is what decides how fast tokens flow.

The same as ``call.Call`` without numpy's price for arrays of a few elements, and in two halves,
so that something else can be done while the workers compute. Whatever goes wrong is left to
``Call``.
"""

import time
from typing import NamedTuple

import numpy as np

from linkcpp.dispatch.call import Call, Request, all_finite
from linkcpp.dispatch.holder import Holder, LinkState, next_request_number
from linkcpp.dispatch.job import Token
from linkcpp.dispatch.spot_checks import SpotChecks
from linkcpp.dispatch.swarm_state import SwarmState
from linkcpp.worker.frames import FrameError, Rows, TokenPairs


class _Answer(NamedTuple):
    """What a holder's answer took, to be noted once its rows were looked at."""

    holder: Holder
    positions: list[int]
    took_seconds: float
    compute_us: int


class TokenCall:
    """``send``, then ``gather``; a call that is not wanted is to be forgotten."""

    def __init__(self, swarm: SwarmState, spot_checks: SpotChecks, token: Token) -> None:
        self._swarm = swarm
        self._spot_checks = spot_checks
        self._token = token
        self._shares: list[tuple[Holder, list[int]]] = []
        self._waiting: dict[int, tuple[Holder, list[int]]] = {}
        self._answers: list[_Answer] = []
        # Zeros where there are none yet.
        self._rows = np.zeros((len(token.expert_ids), token.chain.output_width), np.float32)
        self._sent_at = 0.0

    def send(self) -> bool:
        """Ask the owners; ``False`` where not all could be asked."""
        if not self._share():
            return False
        token, swarm = self._token, self._swarm
        self._sent_at = time.monotonic()
        for holder, positions in self._shares:
            number = next_request_number()
            experts = [token.expert_ids[position] for position in positions]
            try:
                holder.ask_token(number, token.chain, TokenPairs(token.layer, experts, token.row))
            except (OSError, FrameError) as error:
                swarm.holders.fail(holder, f"cannot be asked: {error}", token.layer)
                return False
            holder.request_count += 1
            self._waiting[number] = holder, positions
        return True

    def _share(self) -> bool:
        token = self._token
        owners = self._swarm.routes_of(token.layer).owners
        positions_of: dict[int, list[int]] = {}
        for position, expert in enumerate(token.expert_ids):
            positions_of.setdefault(owners[expert], []).append(position)
        for number, positions in positions_of.items():
            holder = self._swarm.holders.get(number)
            if (
                holder is None
                or holder.state != LinkState.UP
                or holder.is_removed
                or holder.is_sending
                or holder.welcome is None
                or len(positions) > holder.max_pairs(token.chain)
            ):
                return False
            self._shares.append((holder, positions))
        return True

    def forget(self) -> None:
        """Let the answers be passed over, whatever they are."""
        for number, (holder, _) in self._waiting.items():
            holder.forget(number)

    def gather(self) -> Rows:
        """Return one row for each pair."""
        floor_ms = self._swarm.options.deadline_floor_ms
        # Whoever was asked last answers last most times: the other answers are there then, and
        # this process has slept once.
        for number, (holder, _) in reversed(list(self._waiting.items())):
            try:
                while number in self._waiting:
                    if not holder.receive(floor_ms):
                        return self._take_over()
                    self._take_answers(holder)
            except (OSError, FrameError) as error:
                self._swarm.holders.fail(holder, f"failed: {error}", self._token.layer)
                return self._take_over()
        rows = self._rows
        if not all_finite(rows) and all_finite(np.frombuffer(self._token.row, np.float32)):
            return self._ask_for_nonsense_again()
        self._note_answers()
        return rows

    def _note_answers(self) -> None:
        for holder, positions, took_seconds, compute_us in self._answers:
            holder.note_answer(len(positions), took_seconds, compute_us)
            self._spot_checks.sample_token(holder, self._token, positions, self._rows)

    def _take_over(self) -> Rows:
        self._note_answers()
        requests = [
            (number, Request(holder, np.array(positions, np.int32), self._sent_at, 0.0))
            for number, (holder, positions) in self._waiting.items()
        ]
        job = self._token.job(self._token.expert_ids)
        return Call(self._swarm, self._spot_checks, job).take_over(self._rows, requests)

    def _ask_for_nonsense_again(self) -> Rows:
        """Do without whoever answered rows that are not finite."""
        rows, answers = self._rows, self._answers
        self._answers = [each for each in answers if all_finite(rows[each.positions])]
        for number, (holder, positions, *_) in enumerate(answers):
            if not all_finite(rows[positions]):
                self._swarm.counters.nonsense_count += 1
                why = "failed: it answered rows that are not finite"
                self._swarm.holders.fail(holder, why, self._token.layer)
                # The link is closed, so no answer can have this number.
                self._waiting[-1 - number] = holder, positions
        return self._take_over()

    def _take_answers(self, holder: Holder) -> None:
        width = self._token.chain.output_width
        while (answer := holder.next_answer()) is not None:
            known = self._waiting.get(answer.request_id)
            if known is None or known[0] is not holder:
                holder.pass_over(answer)
                continue
            positions = known[1]
            self._rows[positions] = np.frombuffer(answer.rows, np.float32).reshape(-1, width)
            del self._waiting[answer.request_id]
            took_seconds = time.monotonic() - self._sent_at
            self._answers.append(_Answer(holder, positions, took_seconds, answer.compute_us))
