"""``linkcpp hub token``: join tokens."""

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from linkcpp.cli.hub_access import (
    DATA_OPTION,
    HUB_OPTION,
    JSON_OPTION,
    ask,
    is_start_of_id,
    print_taken_away,
)
from linkcpp.cli.output import console, print_json
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import did_you_mean, printable
from linkcpp.registry.client import HubClient
from linkcpp.registry.records import (
    JoinTokenList,
    JoinTokenRecord,
    JoinTokenRequest,
    NewJoinToken,
    Role,
)

app = verb(help="Make, list or revoke join tokens.", no_args_is_help=True)

_LIFETIME = re.compile(r"(\d{1,6})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command()
def create(
    context: typer.Context,
    *,
    role: Annotated[Role, typer.Option(help="What whoever joins with it may do.")] = Role.NODE,
    lifetime: Annotated[
        str, typer.Option("--expires", help="How long it may be used, like 30m, 12h or 7d.")
    ] = "1d",
    uses: Annotated[int, typer.Option(min=1, help="How many machines may use it.")] = 1,
    label: Annotated[str, typer.Option(help="A word to know it by in lists.")] = "",
    data: DATA_OPTION = None,
    hub_url: HUB_OPTION = None,
    as_json: JSON_OPTION = False,
) -> None:
    """Make a join token and print it: it is told this once."""
    if len(label) > 64 or not label.isprintable():
        raise LinkcppError("A label has at most 64 printable characters.", hint="Shorten it.")
    request = JoinTokenRequest(
        role=role, lifetime_seconds=parse_lifetime(lifetime), use_limit=uses, label=label
    )

    async def made(client: HubClient) -> NewJoinToken:
        return await client.create_join_token(request)

    answer = ask(made, data=data or context.obj, hub_url=hub_url)
    if as_json:
        print_json(answer)
    else:
        typer.echo(answer.token)


@app.command(name="list")
def list_all(
    context: typer.Context,
    *,
    data: DATA_OPTION = None,
    hub_url: HUB_OPTION = None,
    as_json: JSON_OPTION = False,
) -> None:
    """List the join tokens, without their secrets."""

    async def listed(client: HubClient) -> tuple[JoinTokenList, float]:
        return await client.join_tokens(), (await client.health()).time

    answer, now = ask(listed, data=data or context.obj, hub_url=hub_url)
    if as_json:
        print_json(answer)
        return
    table = WholeTable(box=None)
    for heading in ("id", "role", "state", "used", "label"):
        table.add_column(heading)
    for token in answer.tokens:
        used = f"{token.use_count} of {token.use_limit}"
        table.add_row(
            token.token_id, token.role, token_state(token, now), used, printable(token.label)
        )
    console(80).print(table)


@app.command()
def revoke(
    context: typer.Context,
    token: Annotated[str, typer.Argument(help="The token's id or label; `list` shows them.")],
    *,
    data: DATA_OPTION = None,
    hub_url: HUB_OPTION = None,
) -> None:
    """Make a join token useless; machines that joined with it stay."""

    async def revoked(client: HubClient) -> str | None:
        tokens = (await client.join_tokens()).tokens
        return await client.revoke_join_token(meant_token(token, tokens).token_id)

    remark = ask(revoked, data=data or context.obj, hub_url=hub_url)
    print_taken_away("The join token is revoked.", remark)


def meant_token(word: str, tokens: Sequence[JoinTokenRecord]) -> JoinTokenRecord:
    """Find the token that a person means: by its label, its id, or the start of it.

    Raises:
        LinkcppError: it is none of these, or several are.
    """
    whole = [one for one in tokens if one.token_id == word]
    valid = [one for one in tokens if not one.is_revoked]
    found = whole or [
        one for one in valid if (word and one.label == word) or is_start_of_id(word, one.token_id)
    ]
    if len(found) == 1:
        return found[0]
    many = "Several join tokens have" if found else "No join token that may still be used has"
    # Whoever pasted the secret itself need not find it on the screen once more.
    shown = "that id" if word.startswith("lcj_") else f"the id or label {word!r}"
    labels = {one.label for one in valid if one.label}
    meant = "" if found else did_you_mean(word, labels)
    raise LinkcppError(
        f"{many} {shown}.",
        hint=f"{meant}`linkcpp hub token list` lists them with their ids.",
    )


def parse_lifetime(text: str) -> float:
    """Read ``30m``, ``12h`` or ``7d`` as seconds.

    Raises:
        LinkcppError: it is none of these.
    """
    match = _LIFETIME.fullmatch(text)
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
    if not 0 < seconds <= 10 * 365 * 86400:
        raise LinkcppError(
            f"{text!r} is not a time that a token may last.", hint="Write it like 30m, 12h or 7d."
        )
    return float(seconds)


def token_state(token: JoinTokenRecord, now: float) -> str:
    """Say in a word or two whether a token can be used, and how long."""
    if token.is_revoked:
        return "revoked"
    if token.use_count >= token.use_limit:
        return "used up"
    left_seconds = token.expires_at - now
    if left_seconds <= 0:
        return "expired"
    unit = next(unit for unit in "dhms" if left_seconds >= _UNIT_SECONDS[unit] or unit == "s")
    return f"for {left_seconds / _UNIT_SECONDS[unit]:.0f} {unit}"
