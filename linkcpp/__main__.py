"""The ``linkcpp`` program from its first moment: Ctrl-C while modules load is no error."""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from linkcpp.cli.main import main as run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
