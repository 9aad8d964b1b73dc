"""Sessions and streams without I/O: random cuts, lost ends, and peers that break the rules."""

import struct

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from linkcpp.link.core import NO_EPOCH, LinkCore, Resume
from linkcpp.link.records import (
    CHUNK_BYTES,
    MAX_REASON_BYTES,
    MAX_TARGET_BYTES,
    FrameType,
    LinkLimits,
    RecordType,
    ResetCode,
)
from linkcpp.link.session import SessionError
from linkcpp.link.streams import Aborted, Finished, Opened, Received, Writable
from tests.support.lengths import repeated

LIMITS = LinkLimits(streams=3, window_bytes=1000, unacknowledged_bytes=1500, control_frames=16)
BACKBONE, NODE = b"B" * 16, b"N" * 16
TARGET = "api"

FEW = st.integers(1, 6)


def target_of(stream: int) -> str:
    return f"target/{stream}"


def reason_of(stream: int) -> str:
    return f"stream {stream} is not wanted: ärger"


class End:
    """One end of a link, and what came out of its streams."""

    def __init__(self, *, epoch: bytes, peer_epoch: bytes, opens: bool) -> None:
        self.core = LinkCore(epoch=epoch, peer_epoch=peer_epoch, opens=opens, limits=LIMITS)
        self.got: dict[int, bytes] = {}
        self.untaken: dict[int, int] = {}
        self.finished: set[int] = set()
        self.aborted: set[int] = set()

    def receive(self, record: bytes) -> None:
        self.core.receive(record)
        for event in self.core.streams.take_events():
            match event:
                case Opened(stream, target):
                    assert target == target_of(stream)
                    self.got[stream] = b""
                case Received(stream, data):
                    assert stream not in self.finished
                    assert stream not in self.aborted
                    self.got[stream] = self.got.get(stream, b"") + bytes(data)
                    self.untaken[stream] = self.untaken.get(stream, 0) + len(data)
                case Finished(stream):
                    assert stream not in self.finished
                    self.finished.add(stream)
                case Aborted(stream, code, reason):
                    assert (code, reason) == (ResetCode.REFUSED, reason_of(stream))
                    self.aborted.add(stream)
                case Writable():
                    pass

    def take(self) -> None:
        for stream, size in self.untaken.items():
            self.core.streams.taken(stream, size)
        self.untaken.clear()


class Edges(RuleBasedStateMachine):
    """Two ends, one channel after the other between them, and all that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.lives = 0
        self.pipes: tuple[list[bytes], list[bytes]] = ([], [])
        self.is_up = False

    @initialize()
    def begin(self) -> None:
        self._new_session()

    def _new_session(self) -> None:
        self.lives += 1
        epochs = (b"B%015d" % self.lives, b"N%015d" % self.lives)
        self.ends = (
            End(epoch=epochs[0], peer_epoch=epochs[1], opens=True),
            End(epoch=epochs[1], peer_epoch=epochs[0], opens=False),
        )
        self.written: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self.ended: tuple[set[int], set[int]] = (set(), set())
        self.broken: set[int] = set()
        self.is_up = False
        self._connect()

    def _connect(self) -> None:
        # What each side says of its session may be older than what an old channel still brought.
        said = [Resume.decode(end.core.resume.encode()) for end in self.ends]
        self.pipes = ([], [])
        self.ends[0].core.attach(said[1].wanted)
        self.ends[1].core.attach(said[0].wanted)
        self.is_up = True

    @precondition(lambda self: self.ends[0].core.streams.has_room)
    @rule()
    def open(self) -> None:
        streams = self.ends[0].core.streams
        stream = streams.open(target_of(streams._last_id + 1))
        assert stream is not None
        for written in self.written:
            written[stream] = b""
        self.ends[0].got[stream] = b""

    @rule(data=st.data(), side=st.integers(0, 1), size=st.integers(1, 700), count=FEW)
    def write(self, data: st.DataObject, side: int, size: int, count: int) -> None:
        streams = self.ends[side].core.streams
        known = [
            stream
            for stream in self.written[side]
            if stream in self.ends[side].got
            and stream not in self.ended[side]
            and streams.can_write(stream)
        ]
        if not known:
            return
        stream = data.draw(st.sampled_from(known))
        for _ in range(count):
            # No two places of a stream that could be mistaken look the same.
            piece = bytes([len(self.written[side][stream]) % 251]) * size
            self.written[side][stream] += piece
            streams.write(stream, piece)

    @rule(data=st.data(), side=st.integers(0, 1), aborts=st.booleans())
    def end(self, data: st.DataObject, side: int, aborts: bool) -> None:
        end = self.ends[side]
        known = [stream for stream in end.got if stream not in self.ended[side]]
        if not known:
            return
        stream = data.draw(st.sampled_from(known))
        self.ended[side].add(stream)
        if aborts:
            end.core.streams.abort(stream, ResetCode.REFUSED, reason_of(stream))
            end.aborted.add(stream)
            self.broken.add(stream)
        else:
            end.core.streams.finish(stream)

    @rule(count=FEW, delivered=st.integers(0, 12), takes=st.booleans())
    def pump(self, count: int, delivered: int, takes: bool) -> None:
        """Both send some records, of which some arrive; what is left is on the way."""
        for side in (0, 1):
            self._send(side, 3 * count)
            self._deliver(side, delivered)
            if takes:
                self.ends[side].take()

    def _send(self, side: int, count: int) -> None:
        for _ in range(count if self.is_up else 0):
            record = self.ends[side].core.next_record()
            if record is None:
                return
            self.pipes[side].append(record)

    def _deliver(self, side: int, count: int) -> None:
        for record in self.pipes[side][:count]:
            self.ends[1 - side].receive(record)
        del self.pipes[side][:count]

    @rule()
    def cut_and_connect(self) -> None:
        """All that is on the way is lost; the session goes on over another channel."""
        for end in self.ends:
            end.core.detach()
        self._connect()

    @rule(count=st.integers(0, 20))
    def change_over(self, count: int) -> None:
        """A second channel shakes hands while the first still brings records."""
        if not self.is_up:
            return
        said = [end.core.resume for end in self.ends]
        for side in (0, 1):
            self._deliver(side, count)
        self.pipes = ([], [])
        self.ends[0].core.attach(said[1].wanted)
        self.ends[1].core.attach(said[0].wanted)

    @rule()
    def cut(self) -> None:
        for end in self.ends:
            end.core.detach()
        self.pipes = ([], [])
        self.is_up = False

    @precondition(lambda self: not self.is_up)
    @rule()
    def connect(self) -> None:
        self._connect()

    @invariant()
    def what_arrived_is_what_was_sent(self) -> None:
        for side in (0, 1):
            for stream, got in self.ends[1 - side].got.items():
                assert self.written[side][stream].startswith(got)

    @invariant()
    def nothing_grows_without_bound(self) -> None:
        for end in self.ends:
            assert end.core.kept_bytes < LIMITS.unacknowledged_bytes + CHUNK_BYTES
            assert sum(end.untaken.values()) <= 3 * LIMITS.streams * LIMITS.window_bytes
            assert end.core.streams.stream_count <= LIMITS.streams

    def teardown(self) -> None:
        """In the end everything that was written and not reset arrives."""
        if not self.lives:
            return
        self.cut_and_connect()
        is_moving, rounds = True, 0
        while is_moving:
            is_moving, rounds = False, rounds + 1
            assert rounds < 500
            for side in (0, 1):
                self._send(side, 1000)
                is_moving = is_moving or bool(self.pipes[side])
                self._deliver(side, 1000)
                self.ends[1 - side].take()
        for side in (0, 1):
            sender, receiver = self.ends[side], self.ends[1 - side]
            for stream, written in self.written[side].items():
                if stream in self.broken or stream in receiver.aborted | sender.aborted:
                    continue
                assert receiver.got[stream] == written
                assert (stream in receiver.finished) == (stream in self.ended[side])


Edges.TestCase.settings = settings(
    max_examples=repeated(150),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_two_ends_whatever_happens_to_the_channel = Edges.TestCase


def pair(limits: LinkLimits = LIMITS) -> tuple[LinkCore, LinkCore]:
    backbone = LinkCore(epoch=BACKBONE, peer_epoch=NODE, opens=True, limits=limits)
    node = LinkCore(epoch=NODE, peer_epoch=BACKBONE, opens=False, limits=limits)
    backbone.attach(0)
    node.attach(0)
    return backbone, node


def pass_on(sender: LinkCore, receiver: LinkCore) -> list[object]:
    events: list[object] = []
    while (record := sender.next_record()) is not None:
        receiver.receive(record)
        events += receiver.streams.take_events()
    return events


def open_stream(core: LinkCore) -> int:
    stream = core.streams.open(TARGET)
    assert stream is not None
    return stream


def data_record(number: int, frame: bytes, wanted: int = 0) -> bytes:
    return struct.pack("<BQQ", RecordType.DATA, number, wanted) + frame


def frame(kind: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack("<BI", kind, stream) + body


def test_opening_a_stream_and_sending_takes_no_answer() -> None:
    backbone, node = pair()
    stream = open_stream(backbone)
    backbone.streams.write(stream, b"GET /")
    events = pass_on(backbone, node)
    assert events == [Opened(1, TARGET), Received(1, memoryview(b"GET /"))]


def test_a_small_message_waits_for_at_max_one_chunk_of_bulk() -> None:
    backbone, _ = pair(LinkLimits())
    bulk = [open_stream(backbone) for _ in range(3)]
    for stream in bulk:
        backbone.streams.write(stream, bytes(CHUNK_BYTES))
        backbone.streams.write(stream, bytes(CHUNK_BYTES))
    small = open_stream(backbone)
    for _ in range(4 + 3):  # what opens the streams, and the first turn of each
        backbone.next_record()
    backbone.streams.write(small, b"one row")
    record = backbone.next_record()
    assert record is not None
    assert record.endswith(b"one row")
    # And bulk is not starved by those who always have something small.
    kinds = []
    for _ in range(40):
        backbone.streams.write(small, b"row")
        record = backbone.next_record()
        assert record is not None
        kinds.append(len(record) > 1000)
    assert sum(kinds) == 3


def test_an_idle_direction_is_acknowledged_all_the_same() -> None:
    backbone, node = pair()
    stream = open_stream(backbone)
    for _ in range(100):
        while backbone.streams.can_write(stream):
            backbone.streams.write(stream, bytes(500))
        for event in pass_on(backbone, node):
            if isinstance(event, Received):
                node.streams.taken(stream, len(event.data))
        pass_on(node, backbone)
    assert backbone.kept_bytes < LIMITS.unacknowledged_bytes
    assert node.kept_bytes < LIMITS.unacknowledged_bytes


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"", "none that a session has"),
        (b"\x09" + bytes(40), "none that a session has"),
        (data_record(0, b""), "none that a session has"),
        (data_record(1, frame(FrameType.OPEN, 1)), "frame 1 came where 0 was due"),
        (data_record(0, b"\x01"), "shorter than its head"),
        (data_record(0, frame(FrameType.DATA, 7, b"x")), "never opened"),
        (data_record(0, frame(FrameType.OPEN, 0)), "may not be opened"),
        (data_record(0, frame(99, 1)), "never opened"),
        (data_record(0, frame(FrameType.OPEN, 1, bytes(MAX_TARGET_BYTES + 1))), "never opened"),
        (data_record(0, frame(FrameType.OPEN, 1, b"\xc3\xa4")), "may not be opened"),
        (data_record(0, frame(FrameType.OPEN, 1), wanted=1), "which is not the next one"),
        (struct.pack("<BQ", RecordType.ACK, 2**64 - 1), "which is not the next one"),
    ],
)
def test_a_record_that_breaks_the_rules_ends_the_session(record: bytes, reason: str) -> None:
    _, node = pair()
    with pytest.raises(SessionError, match=reason):
        node.receive(record)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([frame(FrameType.DATA, 1, bytes(1001))], "more bytes of stream 1"),
        ([frame(FrameType.DATA, 1, bytes(600))] * 2, "more bytes of stream 1"),
        ([frame(FrameType.FIN, 1)] * 2, "ends twice"),
        ([frame(FrameType.FIN, 1), frame(FrameType.DATA, 1, b"x")], "more bytes of stream 1"),
        ([frame(FrameType.DATA, 1)], "a frame of type 2 with 0 bytes"),
        ([frame(FrameType.WINDOW, 1, struct.pack("<I", 1))], "a window of 1001 bytes"),
        ([frame(FrameType.WINDOW, 1, struct.pack("<I", 0))], "a window of 1000 bytes"),
        ([frame(FrameType.RESET, 1, b"")], "a frame of type 5 with 0 bytes"),
        (
            [frame(FrameType.RESET, 1, bytes(4 + MAX_REASON_BYTES + 1))],
            "a frame of type 5 with 405",
        ),
        ([frame(FrameType.OPEN, 1)], "may not be opened"),
    ],
)
def test_a_frame_that_breaks_the_rules_ends_the_session(frames: list[bytes], reason: str) -> None:
    _, node = pair()
    node.receive(data_record(0, frame(FrameType.OPEN, 1)))
    with pytest.raises(SessionError, match=reason):
        for number, hostile in enumerate(frames, 1):
            node.receive(data_record(number, hostile))


def test_a_peer_cannot_open_thousands_of_streams() -> None:
    _, node = pair()
    with pytest.raises(SessionError, match="more and more answers"):
        for number in range(5000):
            node.receive(data_record(number, frame(FrameType.OPEN, number + 1)))
            assert node.streams.stream_count <= LIMITS.streams


def test_a_stream_beyond_the_bound_is_reset_and_the_others_go_on() -> None:
    _, node = pair()
    for number in range(4):
        node.receive(data_record(number, frame(FrameType.OPEN, number + 1)))
    node.receive(data_record(4, frame(FrameType.DATA, 4, b"late")))
    record = node.next_record()
    assert record is not None
    body = struct.pack("<I", ResetCode.TOO_MANY) + b"too many streams are open"
    assert record.endswith(frame(FrameType.RESET, 4, body))
    assert [type(event) for event in node.streams.take_events()] == [Opened] * 3


def test_why_a_stream_was_reset_reaches_the_other_end_in_words() -> None:
    backbone, node = pair()
    stream = open_stream(backbone)
    assert pass_on(backbone, node) == [Opened(stream, TARGET)]
    node.streams.abort(stream, ResetCode.REFUSED, "no such server")
    assert pass_on(node, backbone) == [Aborted(stream, ResetCode.REFUSED, "no such server")]
    assert backbone.streams.stream_count == node.streams.stream_count == 0


def test_a_long_reason_is_cut_to_what_the_peer_takes() -> None:
    backbone, node = pair()
    stream = open_stream(backbone)
    pass_on(backbone, node)
    node.streams.abort(stream, ResetCode.REFUSED, "ä" * MAX_REASON_BYTES)
    (event,) = pass_on(node, backbone)
    assert isinstance(event, Aborted)
    assert event.reason == "ä" * (MAX_REASON_BYTES // 2)


def test_a_target_may_be_as_long_as_the_wire_has_room_for() -> None:
    backbone, node = pair()
    target = "t" * MAX_TARGET_BYTES
    backbone.streams.open(target)
    assert pass_on(backbone, node) == [Opened(1, target)]


def test_local_connections_that_come_and_go_without_a_channel_are_bounded() -> None:
    backbone, _ = pair()
    backbone.detach()
    opened = 0
    while backbone.streams.has_room:
        backbone.streams.abort(open_stream(backbone))
        opened += 1
    assert opened <= LIMITS.control_frames
    assert backbone.next_record() is None


def test_a_peer_that_claims_to_have_what_was_never_sent_is_refused() -> None:
    backbone, _ = pair()
    with pytest.raises(SessionError, match="which is not the next one"):
        backbone.attach(1)


def test_what_a_handshake_says_of_a_session_is_read_back() -> None:
    said = Resume(BACKBONE, NO_EPOCH, 2**40)
    assert Resume.decode(said.encode()) == said
    with pytest.raises(SessionError):
        Resume.decode(said.encode() + b"x")
