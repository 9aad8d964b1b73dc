"""A file that comes in any pieces: whole at the end, or refused at the very slab that is wrong."""

import hashlib
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.node.limits import RefusedError
from linkcpp.node.slice_files import Piece
from linkcpp.node.slice_receiver import Receiver

CONTENTS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8)


def described(slabs: list[bytes]) -> tuple[Piece, ...]:
    return tuple(
        Piece(f"slab {number}", len(slab), hashlib.sha256(slab).hexdigest())
        for number, slab in enumerate(slabs)
    )


@given(CONTENTS, st.lists(st.integers(1, 50)), st.lists(st.booleans()))
def test_a_file_arrives_whole_however_it_is_cut_and_however_often_it_is_interrupted(
    slabs: list[bytes], cuts: list[int], restarts: list[bool]
) -> None:
    content = b"".join(slabs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        receiver = Receiver(path, described(slabs))
        for number in range(10_000):
            if receiver.is_whole:
                break
            at = receiver.received_bytes
            size = cuts[number] if number < len(cuts) else len(content)
            receiver.take(content[at : at + size])
            if number < len(restarts) and restarts[number]:
                receiver = Receiver(path, described(slabs))
                assert receiver.received_bytes <= at + size
        receiver.sync()
        assert path.read_bytes() == content


@given(CONTENTS, st.data())
def test_one_changed_byte_is_refused_at_its_slab_and_what_was_before_stays(
    slabs: list[bytes], data: st.DataObject
) -> None:
    content = b"".join(slabs)
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    start = number = 0
    while start + len(slabs[number]) <= at:
        start += len(slabs[number])
        number += 1
    with tempfile.TemporaryDirectory() as folder:
        receiver = Receiver(Path(folder, "file"), described(slabs))
        with pytest.raises(RefusedError, match=f"slab {number} ") as error:
            receiver.take(bytes(changed))
        assert error.value.code == "wrong_hash"
        assert receiver.received_bytes == start
        receiver.take(content[start:])
        assert receiver.is_whole


def test_bytes_beyond_the_end_are_refused(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "file", described([b"abc"]))
    with pytest.raises(RefusedError) as error:
        receiver.take(b"abcd")
    assert error.value.code == "too_large"
    assert receiver.received_bytes == 0


def test_a_file_with_something_else_in_it_is_taken_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"something else altogether")
    receiver = Receiver(path, described([b"abc", b"def"]))
    assert receiver.received_bytes == 0
    receiver.take(b"abcdef")
    assert receiver.is_whole
    receiver.sync()
    assert path.read_bytes() == b"abcdef"


def test_what_was_removed_in_the_middle_is_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    receiver = Receiver(path, described([b"abc", b"def"]))
    receiver.take(b"abcd")
    shutil.rmtree(path.parent)
    with pytest.raises(RefusedError, match="removed from the node's disk") as error:
        receiver.take(b"ef")
    assert error.value.code == "wrong_offset"
    receiver.take(b"abcdef")
    receiver.sync()
    assert path.read_bytes() == b"abcdef"
