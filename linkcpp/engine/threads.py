"""How the compute threads of engine programs wait for their next work. Pure."""

from collections.abc import Mapping

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def short_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which idle threads soon sleep; nothing where the user chose himself.

    By default they go on spinning for milliseconds (libgomp) or 200 ms (LLVM's runtime). Where
    several programs take turns on the same cores, as all do that serve experts on one machine, each
    then computes against the others' idle threads: 35 ms a layer instead of 2.4 were measured. No
    spinning at all (``OMP_WAIT_POLICY=passive``) would make each barrier of a single program
    slow: 30 ms a token instead of 9. 1,000 turns (libgomp) or 1 ms (LLVM's) are in between.
    """
    if any(name in environment for name in _CHOICES):
        return {}
    return {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
