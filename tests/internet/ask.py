"""Asks an API for greedy tokens: ``python -m tests.internet.ask URL COUNT``, inside a namespace.

Each token is a line of JSON as soon as it comes. The last line counts the calls for experts that
have failed since the deployment started, as its metrics tell.
"""

import json
import sys

import httpx

from tests.launch.swarm import START_SECONDS, greedy_request, tokens_of

_DATA = "data: "
_FAILED_CALLS = "linkcpp_dispatch_failed_calls_total "


def ask(url: str, count: int) -> None:
    """Print the tokens and the failed calls."""
    body = greedy_request(count) | {"stream": True}
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=START_SECONDS) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith(_DATA):
                for token in tokens_of(json.loads(line.removeprefix(_DATA))):
                    print(json.dumps(token), flush=True)
    metrics = httpx.get(f"{url}/linkcpp/metrics", timeout=START_SECONDS).text.splitlines()
    # A deployment of layers has no such count.
    failed = [line for line in metrics if line.startswith(_FAILED_CALLS)]
    print(sum(int(float(line.removeprefix(_FAILED_CALLS))) for line in failed))


if __name__ == "__main__":
    ask(sys.argv[1], int(sys.argv[2]))
