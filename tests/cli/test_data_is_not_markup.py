"""Names, paths, addresses, models and errors are printed as they are, whatever they look like."""

import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from linkcpp.cli import doctor, engine, hub_models, join, launch, logs, main, node_run
from linkcpp.cli import inspect as inspect_verb
from linkcpp.cli.discover import render
from linkcpp.cli.hub import print_nodes
from linkcpp.cli.output import byte_bar, console, status_console, task_name, working
from linkcpp.cli.plan_report import explanation, report
from linkcpp.cli.status import status_view
from linkcpp.cli.verify import verification_view
from linkcpp.cluster.records import NodeStatus
from linkcpp.common.records import Record
from linkcpp.engine.records import Engine, EngineLocation, EngineProblem
from linkcpp.launch.events import first_state
from linkcpp.launch.experts.records import ExpertsState
from linkcpp.launch.logs import LogPart
from linkcpp.launch.preview import preview
from linkcpp.launch.records import LaunchRequest
from linkcpp.launch.status import Condition, DeploymentReport
from linkcpp.model.presets import expand_preset, find_preset
from linkcpp.model.summary import summarize
from linkcpp.node.diagnosis import Diagnosis, Observation, Verdict
from linkcpp.node.discovery import Discovery
from linkcpp.planning.records import PlanOptions
from linkcpp.planning.shortfall import make_plan
from linkcpp.registry.models import ServedModel, ServedPart
from linkcpp.registry.records import NodeList, NodeState, Presence, RegisteredNode, Role
from linkcpp.verify.records import VerifyReport, WorkerReport
from linkcpp.worker.agreement import Verdict as Agreed
from tests.launch.plans import layers_plan
from tests.launch.test_experts_events import worker
from tests.planning.clusters import GIGABYTE, cluster, device, machine, node
from tests.registry.test_credentials import NODE_ID, credentials

# Markup, an address with an emoji in it (a bee) that markup takes for a style, an escape of markup.
NAME = "[bold]n[/] [fe80::1:bee:2] :bee: \\"
FOLDER = "/[bold]n[fe80::1:bee:2]"
URL = "http://[fe80::1:bee:2]:8716"


def hostile(value: Any) -> Any:
    """The same value with that name in every place of a text, and that address in one of a URL."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return URL if "://" in value else NAME
    if isinstance(value, Path):
        return Path(FOLDER) / "file"
    if isinstance(value, Record):
        fields = {field: hostile(getattr(value, field)) for field in type(value).model_fields}
        return value.model_copy(update=fields)
    if isinstance(value, tuple | list):
        return type(value)(map(hostile, value))
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()}
    return value


def _print(*parts: Any) -> None:
    for part in parts:
        console().print(part)


def _request() -> LaunchRequest:
    return LaunchRequest(
        name="smol",
        plan=layers_plan("a"),
        model_path="/m.gguf",
        host="127.0.0.1",
        port=8080,
        api_key_file="/keys",
        templates_folder=None,
    )


def _status() -> None:
    experts = ExpertsState(
        workers=(worker(0, "attic", (0, 9), way="a relay"), worker(1, "cellar", detail="cut")),
        fallback_absence="none",
    )
    state = first_state(_request(), now=1000.0).model_copy(update={"experts": experts})
    running = DeploymentReport(
        name="smol",
        condition=Condition.RUNNING,
        explanation="it runs",
        advice="wait",
        uptime_seconds=5.0,
        state=state,
    )
    _print(status_view([hostile(running)]))


def _discover() -> None:
    ash = node("ash", device("CPU", GIGABYTE), status=NodeStatus.UNREACHABLE)
    found = Discovery(coordinator=machine("here"), nodes=(ash,), notes=("a note",))
    _print(*render(hostile(found), [NAME]))


def _plan() -> None:
    preset = find_preset("smollm2")
    assert preset is not None
    inventory = expand_preset(preset)
    nodes = node("ash", device("CPU", 60 * GIGABYTE))
    made = make_plan(inventory, cluster(26 * GIGABYTE, nodes), PlanOptions())
    _print(*report(hostile(made)), *explanation(hostile(made), inventory))


def _inspect() -> None:
    preset = find_preset("smollm2")
    assert preset is not None
    inventory = expand_preset(preset)
    shown = hostile(inventory.model_copy(update={"notes": ("a note",)}))
    _print(*inspect_verb._report(shown, summarize(inventory), 4096))


def _verify() -> None:
    report_of_worker = WorkerReport(
        name="w",
        state="ready",
        verdict=None,
        problem="p",
        against=(),
        agreement=None,
        layer_count=0,
    )
    _print(
        verification_view(
            hostile(
                VerifyReport(
                    name="mix",
                    mode="experts",
                    verdict=Agreed.EXACT,
                    summary="exact",
                    text=None,
                    prompts=(),
                    notes=("a note",),
                    workers=(report_of_worker,),
                )
            )
        )
    )


def _engine() -> None:
    location = EngineLocation(llama_server=Path("/e/x"), rpc_server=None, found_by="PATH")
    broken = EngineProblem(code="crashed", message="It crashed.", hint="Get another.")
    engine._print_table([hostile(Engine(location=location, fingerprint=None, problem=broken))])


def _hub_nodes() -> None:
    registered = RegisteredNode(
        node_id=NODE_ID,
        name="attic",
        role=Role.NODE,
        edge_key="k" * 43,
        key_fingerprint="f" * 9,
        joined_at=1.0,
        is_revoked=False,
        presence=Presence.ONLINE,
        last_seen=1.0,
        state=NodeState(record=machine("attic", device("CPU", GIGABYTE))),
    )
    # What is cut short on purpose stays itself.
    cut = {"node_id": NODE_ID, "key_fingerprint": "f" * 9}
    shown = hostile(registered).model_copy(update=cut)
    print_nodes(NodeList.model_construct(nodes=(shown,), hub_time=2.0))


def _hub_models() -> None:
    part = ServedPart(file_bytes=2, header_bytes=1, backbone_bytes=1)
    served = ServedModel(
        name="m",
        model_name="m",
        architecture="llama",
        digest="0" * 64,
        manifest_digest="0" * 64,
        file_bytes=2,
        parts=(part,),
        has_weights=True,
        added_at=1.0,
        problem="gone",
    )
    hub_models._print_models([hostile(served)])


def _bars(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only a terminal has bars.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with working(NAME) as say:
        say(f"second {NAME}")
    with byte_bar(NAME, 10) as advance:
        advance(5)
    with Progress(task_name(), console=status_console()) as progress:
        progress.add_task(NAME, total=1)


def _error() -> None:
    main._tell(status_console(), "error", NAME)


VERBS: dict[str, Callable[[], None]] = {
    "discover": _discover,
    "doctor": lambda: doctor._print_diagnosis(
        hostile(
            Diagnosis(
                observations=(Observation(subject="s", verdict=Verdict.WARN, detail="d", hint="h"),)
            )
        )
    ),
    "engine": _engine,
    "error": _error,
    "hub models": _hub_models,
    "hub nodes": _hub_nodes,
    "inspect": _inspect,
    "join": lambda: join._tell_what_next(
        hostile(
            credentials().model_copy(
                update={
                    "node_token": credentials().node_token.model_copy(
                        update={"role": Role.BACKBONE}
                    )
                }
            )
        )
    ),
    "launch": lambda: launch._show_result(hostile(first_state(_request(), now=1.0)), "127.0.0.1"),
    "launch --dry-run": lambda: launch._show_preview(
        hostile(preview(_request(), program="/llama-server")), as_json=False
    ),
    "logs": lambda: logs._show(LogPart(source=NAME, lines=(NAME,)), raw=False),
    "node": lambda: node_run._announce(
        hostile(machine("attic", device("CPU", GIGABYTE))), [URL], 10**6
    ),
    "plan": _plan,
    "status": _status,
    "verify": _verify,
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_prints_text_of_others_as_it_is(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    VERBS[verb]()
    _check("".join(capsys.readouterr()))


def test_bars_show_text_of_others_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _bars(monkeypatch)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert shown.count(NAME) >= 3
    _check(shown)


def _check(shown: str) -> None:
    assert NAME in shown or URL in shown
    rest = shown
    for text in (NAME, FOLDER, URL.removeprefix("http://")):
        rest = rest.replace(text, "")
    assert not re.search(r"bee|fe80|\bn\[|🐝", rest), rest
