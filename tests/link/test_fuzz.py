"""Bytes that anybody may send: nothing but the errors that are expected comes of them."""

import contextlib
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from linkcpp.link.core import RESUME_BYTES, LinkCore, Resume
from linkcpp.link.handshake import Machine
from linkcpp.link.records import CHUNK_BYTES, FrameType, LinkLimits, RecordType
from linkcpp.link.session import SessionError
from linkcpp.registry.relay import (
    CLUSTER_HELLO_BYTES,
    decode_cluster_hello,
    decode_hello,
    encode_cluster_hello,
)
from tests.support.lengths import repeated

LIMITS = LinkLimits(streams=3, window_bytes=1000, unacknowledged_bytes=1500, control_frames=16)
MANY = settings(max_examples=repeated(200), deadline=None)
FRAMES = st.builds(
    lambda kind, stream, body: struct.pack("<BI", kind, stream) + body,
    st.one_of(st.sampled_from(list(FrameType)), st.integers(0, 255)),
    st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)),
    st.one_of(
        st.binary(max_size=60), st.integers(0, 2**32 - 1).map(lambda n: n.to_bytes(4, "little"))
    ),
)


@MANY
@given(st.one_of(st.binary(max_size=80), st.binary(max_size=40).map(lambda rest: b"LCC1" + rest)))
def test_a_hello_is_one_or_is_refused(message: bytes) -> None:
    link_id = decode_cluster_hello(message)
    if link_id is not None:
        assert len(message) == CLUSTER_HELLO_BYTES
        assert encode_cluster_hello(link_id) == message
    with contextlib.suppress(ValueError):
        decode_hello(message)


@MANY
@given(st.binary(max_size=400))
def test_who_a_machine_says_it_is_is_bounded_or_refused(payload: bytes) -> None:
    with contextlib.suppress(SessionError):
        machine = Machine.decode(payload)
        assert 0 < len(machine.node_id) <= 64
        assert len(machine.name) <= 256
    with contextlib.suppress(SessionError):
        Resume.decode(payload)
        assert len(payload) == RESUME_BYTES


@given(st.from_regex(r"[0-9a-f-]{1,64}", fullmatch=True), st.text(max_size=400))
def test_who_a_machine_is_is_read_back(node_id: str, name: str) -> None:
    told = Machine.decode(Machine(node_id, name).encode())
    assert told.node_id == node_id
    assert told.name == name or name.startswith(told.name.rstrip("\N{REPLACEMENT CHARACTER}"))


@MANY
@given(
    records=st.lists(
        st.one_of(st.binary(max_size=64), st.tuples(st.booleans(), FRAMES)), max_size=30
    ),
    opens=st.booleans(),
)
def test_records_of_a_hostile_peer_cost_no_more_than_the_limits(
    records: list[bytes | tuple[bool, bytes]], opens: bool
) -> None:
    core = LinkCore(epoch=b"B" * 16, peer_epoch=b"N" * 16, opens=opens, limits=LIMITS)
    core.attach(0)
    if opens:
        core.streams.open("api")
    number = 0
    with contextlib.suppress(SessionError):
        for record in records:
            if isinstance(record, tuple):
                is_next, frame = record
                head = struct.pack("<BQQ", RecordType.DATA, number if is_next else 0, 0)
                number += is_next
                core.receive(head + frame)
            else:
                core.receive(record)
            core.streams.take_events()
            core.next_record()
            assert core.streams.stream_count <= LIMITS.streams
            assert core.kept_bytes < LIMITS.unacknowledged_bytes + CHUNK_BYTES
