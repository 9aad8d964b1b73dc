"""The header reader: what is sound is read, what is not is refused by name."""

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linkcpp.common.errors import LinkcppError
from linkcpp.model.header import Header, SkippedArray, read_header
from linkcpp.model.inventory import read_inventory
from linkcpp.model.source import FileSource, check_range
from tests.model import gguf_bytes as raw
from tests.support.lengths import repeated
from tests.support.models import TINY_MODELS


class BytesSource:
    """A byte source in memory that remembers how much it was asked for."""

    def __init__(self, data: bytes) -> None:
        self.name = "model.gguf"
        self.size_bytes = len(data)
        self.bytes_read = 0
        self._data = data

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        check_range(self, offset_bytes, length_bytes)
        self.bytes_read += length_bytes
        return self._data[offset_bytes : offset_bytes + length_bytes]

    def stream(self, offset_bytes: int, length_bytes: int) -> Iterator[memoryview]:
        yield memoryview(self.read(offset_bytes, length_bytes))

    @property
    def version(self) -> str:
        return "the only one"

    def close(self) -> None:
        """Nothing to give back."""


def parse(data: bytes) -> Header:
    return read_header(BytesSource(data))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(TINY_MODELS))
def test_the_reader_agrees_with_the_gguf_package(architecture: str) -> None:
    path = TINY_MODELS[architecture]()
    theirs = GGUFReader(path)
    with FileSource(path) as source:
        ours = read_header(source)
    assert [
        (tensor.name, tensor.kind.name, tensor.shape, tensor.offset_bytes, tensor.size_bytes)
        for tensor in ours.tensors
    ] == [
        (
            tensor.name,
            tensor.tensor_type.name,
            tuple(int(extent) for extent in tensor.shape),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in theirs.tensors
    ]
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert set(ours.metadata) == keys
    assert ours.metadata[f"{architecture}.block_count"] == int(
        theirs.fields[f"{architecture}.block_count"].contents()
    )


def test_version_2_is_read_like_version_3() -> None:
    pairs = [raw.u32("a", 7), raw.strings("tokens", ["x"] * 5000)]
    headers = [parse(raw.gguf(pairs, [], version=version)) for version in (2, 3)]
    assert headers[0].metadata == headers[1].metadata == {"a": 7, "tokens": SkippedArray(5000)}


def test_skipped_lists_still_count_for_the_digest() -> None:
    first = parse(raw.gguf([raw.strings("tokens", ["a", "b"])], []))
    second = parse(raw.gguf([raw.strings("tokens", ["a", "c"])], []))
    assert first.metadata == second.metadata
    assert first.digest != second.digest


def test_weights_do_not_count_for_the_digest() -> None:
    data = bytearray(raw.small_model())
    before = parse(bytes(data)).digest
    data[-1] ^= 255
    assert parse(bytes(data)).digest == before


def one_tensor(**changes: object) -> bytes:
    tensor = raw.Tensor("w", (8, 8))
    for name, value in changes.items():
        setattr(tensor, name, value)
    return raw.gguf([], [tensor], data_bytes=256)


def two_tensors(second_offset: int) -> bytes:
    tensors = [raw.Tensor("a", (8, 8)), raw.Tensor("b", (8, 8), offset=second_offset)]
    return raw.gguf([], tensors, data_bytes=1024)


def array_of_arrays() -> bytes:
    value = struct.pack("<IQIQ", raw.ARRAY, 1, raw.U32, 0)
    return raw.gguf([raw.pair("deep", raw.ARRAY, value)], [])


UNSOUND: dict[str, tuple[Callable[[], bytes], str]] = {
    "another format": (lambda: b"PK\x03\x04" + bytes(64), "zip archive"),
    "a web page": (lambda: b"<!DOCTYPE html>" + bytes(64), "web page"),
    "a Git LFS pointer": (lambda: b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
    "noise": (lambda: bytes(range(200)), "not a GGUF"),
    "three bytes": (lambda: b"GGU", "not a GGUF"),
    "magic alone": (lambda: b"GGUF", "truncated"),
    "version 1": (lambda: raw.gguf([], [], version=1), "version 1"),
    "version 4": (lambda: raw.gguf([], [], version=4), "version 4"),
    "big-endian": (lambda: raw.gguf([], [], version=3, order=">"), "big-endian"),
    "a promise of more tensors": (lambda: raw.gguf([], [], tensor_count=100), "truncated"),
    "a promise of more keys": (lambda: raw.gguf([], [], pair_count=100), "truncated"),
    "a huge tensor count": (lambda: raw.gguf([], [], tensor_count=2**63), "claims"),
    "a huge key count": (lambda: raw.gguf([], [], pair_count=2**64 - 1), "claims"),
    "a key twice": (lambda: raw.gguf([raw.u32("a", 1), raw.u32("a", 1)], []), "key a twice"),
    "a key of no text": (lambda: raw.gguf([raw.pair(b"\xff", 4, bytes(4))], []), "not printable"),
    "a key that moves the cursor": (
        lambda: raw.gguf([raw.pair("\x1b[2J", 4, bytes(4))], []),
        "not printable",
    ),
    "an endless string": (
        lambda: raw.gguf([raw.pair("a", 8, struct.pack("<Q", 2**62))], []),
        "truncated",
    ),
    "an unknown value type": (lambda: raw.gguf([raw.pair("a", 13, bytes(8))], []), "unknown type"),
    "an unknown element type": (
        lambda: raw.gguf([raw.pair("a", 9, struct.pack("<IQ", 77, 1))], []),
        "unknown element type 77",
    ),
    "an endless array": (
        lambda: raw.gguf([raw.pair("a", 9, struct.pack("<IQ", 0, 2**62))], []),
        "truncated",
    ),
    "an endless list of strings": (
        lambda: raw.gguf([raw.pair("a", 9, struct.pack("<IQ", 8, 2**60))], []),
        "more than any vocabulary",
    ),
    "an array of arrays": (array_of_arrays, "array of arrays"),
    "a key without end": (lambda: raw.gguf([raw.u32("k" * 2**16, 0)], []), "65536 bytes"),
    "alignment 0": (lambda: raw.gguf([raw.u32("general.alignment", 0)], []), "power of two"),
    "alignment 24": (lambda: raw.gguf([raw.u32("general.alignment", 24)], []), "power of two"),
    "a long tensor name": (lambda: one_tensor(name="x" * 64), "63"),
    "no dimensions": (lambda: one_tensor(shape=()), "0 dimensions"),
    "five dimensions": (lambda: one_tensor(shape=(1, 1, 1, 1, 1)), "5 dimensions"),
    "an empty dimension": (lambda: one_tensor(shape=(8, 0)), "impossible shape 8 x 0"),
    "an overflowing shape": (lambda: one_tensor(shape=(2**40, 2**40)), "impossible shape"),
    "an unknown tensor type": (lambda: one_tensor(kind=999), "type 999"),
    "a withdrawn tensor type": (lambda: one_tensor(kind=4), "type 4"),
    "a broken block": (lambda: one_tensor(shape=(40,), kind=2), "whole number of Q4_0 blocks"),
    "a tensor twice": (
        lambda: raw.gguf(
            [], [raw.Tensor("w", (8, 8)), raw.Tensor("w", (8, 8), offset=256)], data_bytes=512
        ),
        "tensor w twice",
    ),
    "a misaligned tensor": (lambda: two_tensors(257), "multiple of 32"),
    "overlapping tensors": (lambda: two_tensors(224), "overlaps"),
    "a gap between tensors": (lambda: two_tensors(512), "gap before tensor b"),
    "a tensor past the end": (lambda: one_tensor(shape=(8, 9)), "truncated: tensor w"),
    "a wrapping offset": (lambda: one_tensor(offset=2**64 - 32), "truncated: tensor w"),
}


@pytest.mark.parametrize("what", sorted(UNSOUND))
def test_an_unsound_file_is_refused_by_name(what: str) -> None:
    make, words = UNSOUND[what]
    with pytest.raises(LinkcppError, match=words) as caught:
        parse(make())
    assert "model.gguf" in caught.value.message
    assert caught.value.hint


def test_every_truncation_of_a_header_is_refused_by_name() -> None:
    data = raw.small_model()
    for length in range(len(data)):
        with pytest.raises(LinkcppError, match=r"truncated|not a GGUF"):
            parse(data[:length])


def assert_bounded(data: bytes) -> None:
    """Reading may only succeed or refuse, and may take no more memory than the input's order."""
    source = BytesSource(data)
    tracemalloc.start()
    try:
        read_header(source)
    except LinkcppError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert source.bytes_read <= len(data) + 32
    # Python's objects are larger than the bytes they are made of, but by a fixed factor.
    assert peak < 64 * len(data) + 2**18


FUZZ = settings(
    max_examples=repeated(300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)


@FUZZ
@given(st.binary(max_size=2000))
def test_noise_neither_crashes_nor_hangs_nor_fills_memory(data: bytes) -> None:
    assert_bounded(b"GGUF\x03\x00\x00\x00" + data)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8))
def test_changed_bytes_neither_crash_nor_hang_nor_fill_memory(
    changes: list[tuple[int, int]],
) -> None:
    data = bytearray(raw.small_model())
    for place, value in changes:
        data[place % len(data)] = value
    assert_bounded(bytes(data))


@FUZZ
@given(
    st.integers(0, 2**16),
    st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1]),
)
def test_absurd_counts_anywhere_neither_crash_nor_hang_nor_fill_memory(
    place: int, value: int
) -> None:
    data = bytearray(raw.small_model())
    struct.pack_into("<Q", data, place % (len(data) - 8), value)
    assert_bounded(bytes(data))


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4))
def test_a_damaged_model_is_taken_stock_of_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(raw.small_model())
    for place, value in changes:
        data[place] = value
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(data)
    try:
        inventory = read_inventory(path)
    except LinkcppError:
        return
    assert inventory.weight_bytes <= len(data)


def test_a_file_of_100_gb_costs_only_its_header(tmp_path: Path) -> None:
    size = 100 * 10**9
    tokens = raw.strings("tokenizer.ggml.tokens", [f"token-{number}" for number in range(250_000)])
    rows = size // 4 // 8
    header = raw.gguf([tokens], [raw.Tensor("w", (8, rows))])
    path = tmp_path / "huge.gguf"
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(len(header) + rows * 32)
    with FileSource(path) as source:
        read_header(source)
        assert source.size_bytes > 99 * 10**9
        assert source.bytes_read < len(header) + 5 * 2**20
