"""Asks an API for greedy tokens: ``python -m tests.internet.ask URL COUNT``, inside a namespace."""

import json
import sys

from tests.launch.swarm import tokens

if __name__ == "__main__":
    print(json.dumps(tokens(sys.argv[1], count=int(sys.argv[2]))))
