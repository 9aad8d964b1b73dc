import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes, format_percent, parse_bytes, parse_percent


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (5_308_416, "5.31 MB"),
        (77_600_000_000, "77.6 GB"),
        (999_999, "1.00 MB"),
        (9_996, "10.0 kB"),
        (-2_500_000, "-2.50 MB"),
        (10**16, "10000 TB"),
    ],
)
def test_sizes_are_written_with_three_digits_and_a_decimal_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1500B", 1500),
        ("0", 0),
        ("0.0", 0),
        ("6GB", 6 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "6 apples", "1e9", "nan"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(LinkcppError, match="not a size") as caught:
        parse_bytes(text)
    assert caught.value.hint is not None


@pytest.mark.parametrize("text", ["24", " 1500000 ", "1.5"])
def test_a_size_without_a_unit_is_refused_with_the_same_number_and_one(text: str) -> None:
    with pytest.raises(LinkcppError, match="has no unit") as caught:
        parse_bytes(text)
    assert caught.value.hint is not None
    assert f"{text.strip()}GB" in caught.value.hint


@given(st.integers(min_value=0, max_value=10**15))
def test_a_written_size_reads_back_within_its_three_digits(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size)) - size) <= max(0.5, 0.0051 * size)


def test_a_size_beyond_every_number_is_refused() -> None:
    with pytest.raises(LinkcppError, match="not a size"):
        parse_bytes("9" * 400 + "GB")


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), (" 0.5 % ", 0.005), ("0", 0), ("100%", 1)]
)
def test_a_percentage_is_a_share_of_one(text: str, share: float) -> None:
    assert parse_percent(text) == share
    assert parse_percent(format_percent(share)) == share


@pytest.mark.parametrize("text", ["0.01", "101%", "-1%", "one", "%", ""])
def test_what_is_not_a_percentage_is_refused(text: str) -> None:
    with pytest.raises(LinkcppError, match="not a percentage"):
        parse_percent(text)
