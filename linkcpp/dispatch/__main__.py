"""``python -m linkcpp.dispatch CONFIG.json``: how launch starts the virtual device."""

import sys

from linkcpp.dispatch.process import main

sys.exit(main(sys.argv[1:]))
