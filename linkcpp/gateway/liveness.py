"""Whether a peer is still there, judged from one ping to the next. Pure."""


class Liveness:
    """What moved since the last look.

    Anything that is heard counts, not only the answer to a ping: a client in the middle of a frame
    cannot answer before that frame's end. A peer that takes what is written to it is alive too,
    since a ping may stand behind megabytes; but what the system takes proves nothing, unless it
    refused more before: it would go on to take a little for a machine that is long gone.
    """

    def __init__(self) -> None:
        self.was_heard = True
        self._drained_bytes = 0

    def look(self, *, is_held: bool, sent_bytes: int, backlog_bytes: int) -> bool:
        """Tell whether the peer lives, and begin anew.

        ``is_held``: this side does not read from it, so that nothing can be heard. ``sent_bytes``
        were written so far, ``backlog_bytes`` of them are not with the system yet.
        """
        drained = sent_bytes - backlog_bytes
        is_draining = backlog_bytes > 0 and drained > self._drained_bytes
        lives = self.was_heard or is_held or is_draining
        self.was_heard, self._drained_bytes = False, drained
        return lives
