"""Programs that linkcpp starts for itself: configured by a file, with a line once they serve."""

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from linkcpp.common.errors import LinkcppError
from linkcpp.common.logs import log_as_started
from linkcpp.common.records import Record

_Config = TypeVar("_Config", bound=Record)

Announce = Callable[[str], None]


def run_child(
    arguments: list[str],
    config_type: type[_Config],
    run: Callable[[_Config, Announce], Coroutine[Any, Any, None]],
) -> int:
    """Run with the configuration in the first argument's file; return the exit code."""
    # What hot paths make has no cycles; looking for them in the middle of a token costs it.
    gc.set_threshold(200_000, 20, 20)
    try:
        log_as_started()
        config = config_type.model_validate(json.loads(Path(arguments[0]).read_bytes()))
        asyncio.run(run(config, lambda line: print(line, flush=True)))
    except LinkcppError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0
