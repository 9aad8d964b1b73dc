"""How much of the tests that could go on for ever is run: a little, or with ``--long`` far more."""

LONG_FACTOR = 25

# Set before any test module is imported, so that decorators may ask.
is_long = False


def repeated(count: int) -> int:
    """Return how many examples, events or rounds to run; ``count`` in a run that is not long."""
    return count * LONG_FACTOR if is_long else count
