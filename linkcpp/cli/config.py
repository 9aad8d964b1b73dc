"""``linkcpp config``: the settings of this machine, where they come from, and what they are for."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from linkcpp.cli.output import console, print_json
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.cluster.config import Setting, check_settings, explain_settings
from linkcpp.common.config_file import config_path, read_config_file

app = verb()


class Variable(NamedTuple):
    """An environment variable that linkcpp reads; the value of a secret one is not shown."""

    name: str
    meaning: str
    is_secret: bool = False


VARIABLES: Final = (
    Variable("LINKCPP_HOME", "One folder for settings, state, cache and engines."),
    Variable("LINKCPP_ENGINE", "Folder of the llama.cpp programs; overrides `engine`."),
    Variable("LINKCPP_TOKEN_FILE", "File of the cluster token."),
    Variable("LINKCPP_JOIN_TOKEN", "Join token for `join` and `gateway`.", is_secret=True),
    Variable("LINKCPP_MODEL_TOKEN", "Bearer token for models on the web.", is_secret=True),
    Variable("HF_TOKEN", "The same, for Hugging Face alone.", is_secret=True),
    Variable("LINKCPP_DATABASE", "The hub's database.", is_secret=True),
    Variable("LINKCPP_TEMPLATES", "Folder of your own launch templates."),
    Variable("LINKCPP_LOG_FORMAT", "How logs are written: plain or json."),
    Variable("LINKCPP_DEBUG", "1: tracebacks in place of one-sentence errors."),
    Variable("SSL_CERT_FILE", "Certificates to trust, such as a private CA's."),
    Variable("HTTPS_PROXY", "Proxy to hubs, gateways and models on the web.", is_secret=True),
    Variable("HTTP_PROXY", "The same, for plain HTTP.", is_secret=True),
    Variable("ALL_PROXY", "The same, where neither of those is set.", is_secret=True),
    Variable("NO_PROXY", "Hosts to reach without a proxy."),
)


@app.command()
def config(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show, explain and check this machine's settings.

    They are in config.toml, which you write yourself; each key may be omitted. Ends with exit code
    2 where the file cannot be used as it is.
    """
    settings = explain_settings(read_config_file())
    variables = [each for each in VARIABLES if spelled(each.name, os.environ) is not None]
    if as_json:
        print_json(
            {
                "file": str(config_path()),
                "exists": config_path().exists(),
                "settings": settings,
                "environment": {each.name: shown_value(each, os.environ) for each in variables},
            }
        )
    else:
        _print(settings, variables)
    check_settings(settings)


def spelled(name: str, environment: Mapping[str, str]) -> str | None:
    """Return a variable's value; those of proxies are also read in small letters. Pure."""
    return environment.get(name) or (
        environment.get(name.lower()) if name.endswith("_PROXY") else None
    )


def shown_value(variable: Variable, environment: Mapping[str, str]) -> str:
    """Return what may be shown of a variable that is set. Pure."""
    return "(set)" if variable.is_secret else spelled(variable.name, environment) or ""


def _print(settings: tuple[Setting, ...], variables: list[Variable]) -> None:
    out = console()
    missing = "" if config_path().exists() else " (not there: the defaults hold)"
    out.print(f"Settings: {config_path()}{missing}", soft_wrap=True)
    table = _table("KEY", "VALUE", "FROM", "FOR")
    for each in settings:
        source = "default" if each.value is None else "config.toml"
        value = each.default if each.value is None else each.value
        explained = Text(each.meaning)
        if each.problem:
            explained = Text(f"{each.problem}. {each.meaning}".rstrip(), "red")
        table.add_row(each.key, _written(value), source, explained)
    out.print(table)
    if variables:
        out.print("\nEnvironment:")
        table = _table("VARIABLE", "VALUE", "FOR")
        for variable in variables:
            table.add_row(variable.name, shown_value(variable, os.environ), variable.meaning)
        out.print(table)


def _table(*columns: str) -> Table:
    table = WholeTable(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("KEY", "VARIABLE"))
    return table


def _written(value: Any) -> str:
    """Write a value as the file would have it."""
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
