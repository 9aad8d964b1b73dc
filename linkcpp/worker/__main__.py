"""``python -m linkcpp.worker CONFIG.json``: how launch and node agents start a worker."""

import sys

from linkcpp.worker.process import main

sys.exit(main(sys.argv[1:]))
