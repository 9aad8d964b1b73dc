"""What every verb's Typer application has in common."""

from collections.abc import Mapping

import typer

from linkcpp.common.errors import LinkcppError


def verb(**settings: object) -> typer.Typer:
    """Make the application of one verb.

    Shell completion belongs to ``linkcpp`` alone, and ``cli.main`` tells errors, not Typer.
    """
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,  # type: ignore[arg-type]
    )


def refuse_together(options: Mapping[str, object]) -> None:
    """Refuse options of which one would silently win over the others.

    ``options`` maps each option's name to its value, which is falsy where it was not given.

    Raises:
        LinkcppError: more than one is given.
    """
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise LinkcppError(
            f"{' and '.join(given)} cannot be given together.",
            hint=f"Omit {' or '.join(given)}.",
        )
