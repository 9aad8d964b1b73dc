"""``linkcpp doctor``: what is here, what is missing, what to do about it."""

from typing import Annotated

import typer
from rich.text import Text

from linkcpp.cli.output import console, print_json, working
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.node.diagnosis import Diagnosis, Verdict
from linkcpp.node.selfcheck import examine

app = verb(help="Look at this machine: what is here, what is missing, what to do.")
_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


@app.callback(invoke_without_command=True)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Look at Python, folders, engines, memory, token, network and node agent of this machine.

    Ends with exit code 2 if anything cannot work as it is.
    """
    with working("looking") as say:
        diagnosis = examine(on_step=lambda step: say(f"looking at {step}"))
    if as_json:
        print_json({**diagnosis.model_dump(mode="json"), "has_failure": diagnosis.has_failure})
    else:
        _print_diagnosis(diagnosis)
    if diagnosis.has_failure:
        raise typer.Exit(2)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    table = WholeTable(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for item in diagnosis.observations:
        text = Text(item.detail)
        if item.hint:
            text.append(f"\n-> {item.hint}", "dim")
        table.add_row(Text(item.verdict.value, _STYLES[item.verdict]), item.subject, text)
    console().print(table)
