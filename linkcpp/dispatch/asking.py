"""One worker asked alone: for checks, not for tokens."""

import time

import numpy as np

from linkcpp.dispatch.holder import Holder, next_request_number, wait_for_links
from linkcpp.worker.chain import KeyedChain
from linkcpp.worker.frames import Pairs, Rows

_ANSWER_SECONDS = 10.0


def ask_alone(holder: Holder, chain: KeyedChain, pairs: Pairs) -> Rows:
    """Let one worker compute pairs; nobody else may use its link meanwhile.

    Raises:
        OSError: the link broke, or the worker does not answer in time.
        FrameError: it refuses, or answers what makes no sense. Nothing more can be read then.
    """
    number = next_request_number()
    shape = (len(pairs.expert_ids), chain.output_width)
    deadline = time.monotonic() + _ANSWER_SECONDS
    holder.ask(number, chain, pairs)
    while True:
        while (answer := holder.next_answer()) is not None:
            if answer.request_id == number:
                # Valid until the next read only.
                return np.frombuffer(bytes(answer.rows), np.float32).reshape(shape)
            holder.pass_over(answer)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it did not answer a check within {_ANSWER_SECONDS:.0f} s")
        wait_for_links([holder], left * 1000 + 1)
        holder.resume()
        holder.receive()
