"""``python -m linkcpp.front CONFIG.json``: how launch starts the front."""

import sys

from linkcpp.front.process import main

sys.exit(main(sys.argv[1:]))
