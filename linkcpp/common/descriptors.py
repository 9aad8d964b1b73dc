"""How many files and sockets this process may have open."""

import contextlib

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]


def raise_descriptor_limit(wanted: int) -> int:
    """Let this process open ``wanted`` files, or as many as it may; return how many that are."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)


def is_near_descriptor_limit(descriptor: int, spare: int) -> bool:
    """Whether this process could open fewer than ``spare`` files more when it got ``descriptor``.

    A new one has the lowest number that is free, so that all below it were in use.
    """
    if resource is None:
        return False
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - spare
