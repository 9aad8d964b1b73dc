"""The option of verbs that start services: how they and all that they start write their logs."""

from typing import Annotated

import typer

from linkcpp.common.logs import LOG_FORMAT_VARIABLE, LogFormat

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        envvar=LOG_FORMAT_VARIABLE,
        help="How logs are written, also by the programs that this starts: lines for people, or "
        "JSON objects, one a line.",
    ),
]
