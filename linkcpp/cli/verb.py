"""What every verb's Typer application has in common."""

import typer


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
