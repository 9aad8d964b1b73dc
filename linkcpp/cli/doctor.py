"""``linkcpp doctor``: what is here, what is missing, what to do about it."""

from collections.abc import Callable
from typing import Annotated

import typer
from rich.text import Text

from linkcpp.cli.hub_access import data_folder_of
from linkcpp.cli.output import console, print_json, working
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.hub.weights.adding import problem_with
from linkcpp.hub.weights.catalogue import Catalogue, Entry, models_folder
from linkcpp.node.diagnosis import Diagnosis, Observation, Verdict
from linkcpp.node.selfcheck import examine, look_at_files, summed_up

app = verb(help="Look at this machine: what is here, what is missing, what to do.")
_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


@app.callback(invoke_without_command=True)
def doctor(
    *,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also read all that is kept of models here, and hold it to its hashes. It takes "
            "as long as the disk needs.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Look at Python, folders, engines, memory, token, network and node agent of this machine.

    Ends with exit code 2 if anything cannot work as it is.
    """
    with working("looking") as say:
        diagnosis = examine(on_step=lambda step: say(f"looking at {step}"))
        if deep:
            found = [
                *look_at_files(on_step=lambda step: say(f"reading {step}")),
                *_look_at_models(lambda step: say(f"reading {step}")),
            ]
            diagnosis = Diagnosis(observations=(*diagnosis.observations, *found))
    if as_json:
        print_json({**diagnosis.model_dump(mode="json"), "has_failure": diagnosis.has_failure})
    else:
        _print_diagnosis(diagnosis)
    if diagnosis.has_failure:
        raise typer.Exit(2)


def _look_at_models(on_step: Callable[[str], None]) -> list[Observation]:
    catalogue = Catalogue(models_folder(data_folder_of(None)))

    def look(entry: Entry) -> tuple[int, Observation | None]:
        on_step(f"the hub's model {entry.model.name}")
        problem = problem_with(catalogue, entry, lambda _: None)
        if problem is None:
            return entry.model.file_bytes, None
        return 0, Observation(
            subject="hub's model",
            verdict=Verdict.WARN,
            detail=f"{entry.model.name}: {problem}",
            hint=f"`linkcpp hub models remove {entry.model.name}`, and add it again from files "
            "that are sound.",
        )

    return summed_up("hub's models", map(look, catalogue.entries()))


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
