"""No proof of a machine is taken twice, wherever the hub's clock goes."""

from linkcpp.hub.nonces import NonceMemory
from linkcpp.registry.proofs import PROOF_WINDOW_SECONDS


def test_a_nonce_is_new_once() -> None:
    memory = NonceMemory(1000.0)
    assert memory.is_new("a", 1001.0, 1001.0)
    assert not memory.is_new("a", 1001.0, 1002.0)
    assert memory.is_new("b", 1001.0, 1002.0)


def test_a_proof_from_before_the_hubs_start_may_have_been_used() -> None:
    assert not NonceMemory(1000.0).is_new("a", 999.0, 1001.0)


def test_proofs_are_taken_again_after_the_clock_was_set_back() -> None:
    memory = NonceMemory(10_000.0)
    assert memory.is_new("a", 10_001.0, 10_001.0)
    # The first one may be from before, by the new clock.
    assert not memory.is_new("b", 4_999.0, 5_000.0)
    assert memory.is_new("c", 5_001.0, 5_001.0)
    assert not memory.is_new("c", 5_001.0, 5_002.0)


def test_what_was_used_before_the_clock_was_set_back_is_not_new_when_its_time_comes_again() -> None:
    memory = NonceMemory(10_000.0)
    assert memory.is_new("a", 10_030.0, 10_001.0)
    assert memory.is_new("b", 5_001.0, 5_000.0)
    assert memory.is_new("c", 9_001.0, 9_000.0)
    last_moment = 10_030.0 + PROOF_WINDOW_SECONDS
    assert not memory.is_new("a", 10_030.0, last_moment)
