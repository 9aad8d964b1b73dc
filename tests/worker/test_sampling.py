"""What is compared now and then: as much as was asked for, and nothing that can be foreseen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.worker.sampling import SECRET_BYTES, Sampler, start_sampling

SECRETS = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)
COUNTS = st.lists(st.integers(0, 400), max_size=30)


def taken(sampler: Sampler, counts: list[int]) -> list[int]:
    """The numbers of all pieces that are taken where they come in parts of such sizes."""
    found, before = [], 0
    for count in counts:
        some, sampler = sampler.take(count)
        assert all(0 <= each < count for each in some)
        found += [before + each for each in some]
        before += count
    return found


@given(SECRETS, st.floats(0, 1), COUNTS)
def test_what_is_taken_does_not_depend_on_how_the_work_is_cut(
    secret: bytes, rate: float, counts: list[int]
) -> None:
    sampler = start_sampling(secret, rate)
    found = taken(sampler, counts)
    assert found == taken(sampler, [sum(counts)])
    assert found == taken(sampler, [1] * sum(counts))


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.2, 0.9])
def test_as_much_is_taken_as_was_asked_for(rate: float) -> None:
    count = 200_000
    found = taken(start_sampling(bytes(SECRET_BYTES), rate), [count])
    deviation = (count * rate * (1 - rate)) ** 0.5
    assert abs(len(found) - count * rate) < 5 * deviation


def test_everything_and_nothing_can_be_asked_for() -> None:
    assert taken(start_sampling(bytes(SECRET_BYTES), 1.0), [3, 2]) == [0, 1, 2, 3, 4]
    assert taken(start_sampling(bytes(SECRET_BYTES), 0.0), [10**9] * 3) == []


def test_what_was_taken_says_nothing_of_what_comes_next() -> None:
    # After a piece that was taken the next one is taken as often as any other.
    found = set(taken(start_sampling(b"s" * SECRET_BYTES, 0.1), [200_000]))
    followed = sum(piece + 1 in found for piece in found)
    assert abs(followed - 0.1 * len(found)) < 5 * (0.09 * len(found)) ** 0.5
    # Without the secret it is another draw.
    other = set(taken(start_sampling(b"t" * SECRET_BYTES, 0.1), [200_000]))
    assert abs(len(found & other) - 0.1 * len(found)) < 5 * (0.09 * len(found)) ** 0.5


def test_the_secret_is_in_no_log() -> None:
    assert "secret" not in repr(start_sampling(b"s" * SECRET_BYTES, 0.1))


def test_a_secret_that_is_too_short_and_a_rate_beyond_one_are_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        start_sampling(b"short", 0.1)
    with pytest.raises(ValueError, match="rate"):
        start_sampling(bytes(SECRET_BYTES), 1.5)
