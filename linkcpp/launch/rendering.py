"""Templates -> the command line of llama-server. The plan alone decides placement."""

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import expand_home
from linkcpp.common.templates import render

LLAMA_SERVER_TEMPLATE = "llama-server.args.j2"

# Options of llama-server that decide what lies where or how much memory it takes; a template that
# sets one of them would make the plan untrue.
_PLACEMENT_OPTION = re.compile(
    r"(-ngl|--(n-)?gpu-layers|-ts|--tensor-split|-ot|--override-tensor|-dev|--device|--rpc"
    r"|-sm|--split-mode|-mg|--main-gpu|-cmoe|--cpu-moe|-ncmoe|--n-cpu-moe|-fit\w?|--fit(-\w+)?"
    r"|-c|--ctx-size|-np|--parallel|-ctk|--cache-type-k|-ctv|--cache-type-v|-b|--batch-size"
    r"|-ub|--ubatch-size|-(n?)kvo|--(no-)?kv-offload|-nr|--(no-)?repack|-md|--model-draft"
    r"|-(no-)?kvu|--(no-)?kv-unified|-cram|--cache-ram|-ctxcp|--ctx-checkpoints|-fa|--flash-attn"
    r")(=.*)?"
)


def templates_folder(chosen: str | None) -> Path | None:
    """Return the user's own templates folder: ``chosen``, else ``LINKCPP_TEMPLATES``.

    Raises:
        LinkcppError: the folder does not exist.
    """
    named = chosen or os.environ.get("LINKCPP_TEMPLATES")
    if not named:
        return None
    folder = expand_home(Path(named)).absolute()
    if not folder.is_dir():
        raise LinkcppError(
            f"The templates folder {folder} does not exist.",
            hint="Name a folder that holds templates, or omit the option.",
        )
    return folder


def llama_server_command(
    *,
    program: str,
    model_path: str,
    model_name: str,
    placement: Sequence[str],
    host: str,
    port: int | str,
    api_key_file: str,
    own_templates: str | None = None,
) -> tuple[str, ...]:
    """Return the command line of llama-server, the program first.

    Raises:
        LinkcppError: the template cannot be filled in, or touches what the plan decides.
    """
    values = {
        "engine": {"program": program},
        "model": {"path": model_path, "name": model_name},
        "api": {"host": host, "port": port, "key_file": api_key_file},
        "placement": list(placement),
    }
    if "\n" in f"{program}{model_path}{model_name}{api_key_file}":
        raise LinkcppError("A path or name holds a line break.", hint="Rename it.")
    text = render(LLAMA_SERVER_TEMPLATE, values, own_templates=own_templates)
    command = arguments_of(text)
    _refuse_other_placement(command, placement)
    _refuse_without_key(command, api_key_file)
    return command


def with_slots(placement: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Add what mode ``experts`` needs: slots can be erased only where they could also be saved."""
    return (*placement, "--slot-save-path", f"{folder}/")


def arguments_of(text: str) -> tuple[str, ...]:
    """Return the arguments of a rendered template: one a line, without comments and empty lines."""
    lines = (line.lstrip() for line in text.split("\n"))
    return tuple(line for line in lines if line and line != "#" and not line.startswith("# "))


def _refuse_other_placement(command: tuple[str, ...], placement: Sequence[str]) -> None:
    expected = tuple(placement)
    starts = [
        start for start in range(len(command)) if command[start : start + len(expected)] == expected
    ]
    if not starts:
        raise LinkcppError(
            f"The template {LLAMA_SERVER_TEMPLATE} does not pass the plan's placement on whole.",
            hint="Insert every element of `placement` as a line of its own, in order.",
        )
    rest = command[: starts[0]] + command[starts[0] + len(expected) :]
    foreign = next((word for word in rest if _PLACEMENT_OPTION.fullmatch(word)), None)
    if foreign:
        raise LinkcppError(
            f"The template {LLAMA_SERVER_TEMPLATE} sets {foreign}, which the plan decides.",
            hint="Remove it from the template and make another plan: `linkcpp plan --help`.",
        )


def _refuse_without_key(command: tuple[str, ...], key_file: str) -> None:
    if ("--api-key-file", key_file) not in pairwise(command):
        raise LinkcppError(
            f"The template {LLAMA_SERVER_TEMPLATE} does not give llama-server its key.",
            hint="Add the lines --api-key-file and {{ api.key_file }}: without them every user of "
            "this machine may use llama-server past the API.",
        )
