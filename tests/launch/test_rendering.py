from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.rendering import llama_server_command, templates_folder

PLACEMENT = ("-ngl", "20", "--rpc", "127.0.0.1:4001", "--device", "RPC0", "-c", "4096")


def _command(templates: Path | None = None, **changes: str) -> tuple[str, ...]:
    values = {"host": "127.0.0.1", "api_key_file": "/state/engine-key", **changes}
    return llama_server_command(
        program="/engines/llama server",
        model_path=values.get("model_path") or "/models/a model.gguf",
        model_name="smol",
        placement=PLACEMENT,
        host=values["host"],
        port=8080,
        api_key_file=values["api_key_file"],
        own_templates=str(templates) if templates else None,
    )


def _own(folder: Path, text: str) -> Path:
    (folder / "llama-server.args.j2").write_text(text)
    return folder


def test_a_path_with_spaces_stays_one_argument() -> None:
    command = _command()
    assert command[:3] == ("/engines/llama server", "--model", "/models/a model.gguf")


def test_the_plans_arguments_are_passed_on_whole_and_comments_are_not() -> None:
    command = _command()
    start = command.index("-ngl")
    assert command[start : start + len(PLACEMENT)] == PLACEMENT
    assert not any(word.startswith("#") for word in command)


def test_a_key_is_passed_by_file_only() -> None:
    command = _command(api_key_file="/state/engine-key")
    assert command[command.index("--api-key-file") + 1] == "/state/engine-key"
    assert "--api-key" not in command


def test_an_own_template_may_add_what_is_not_placement(tmp_path: Path) -> None:
    own = _own(
        tmp_path,
        "{{ engine.program }}\n--no-ui\n--api-key-file\n{{ api.key_file }}\n"
        "{% for word in placement %}\n{{ word }}\n{% endfor %}\n",
    )
    key = ("--api-key-file", "/state/engine-key")
    assert _command(own) == ("/engines/llama server", "--no-ui", *key, *PLACEMENT)


def test_an_own_template_may_not_leave_llama_server_without_a_key(tmp_path: Path) -> None:
    text = "{{ engine.program }}\n{% for word in placement %}\n{{ word }}\n{% endfor %}\n"
    with pytest.raises(LinkcppError, match="does not give llama-server its key"):
        _command(_own(tmp_path, text))


@pytest.mark.parametrize("option", ["--n-gpu-layers\n99", "-ot\nx=CPU", "--fit=on", "--cpu-moe"])
def test_an_own_template_may_not_move_what_the_plan_placed(tmp_path: Path, option: str) -> None:
    text = "{{ engine.program }}\n{% for word in placement %}\n{{ word }}\n{% endfor %}\n" + option
    with pytest.raises(LinkcppError, match="which the plan decides"):
        _command(_own(tmp_path, text))


def test_an_own_template_may_not_leave_placement_out(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match="does not pass the plan's placement on whole"):
        _command(_own(tmp_path, "{{ engine.program }}\n"))


def test_a_value_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match="'thread_count' is undefined"):
        _command(_own(tmp_path, "{{ thread_count }}\n"))


def test_a_template_that_is_not_jinja_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(LinkcppError, match=r"llama-server\.args\.j2, line 2"):
        _command(_own(tmp_path, "x\n{% for %}\n"))


def test_a_line_break_in_a_path_is_refused() -> None:
    with pytest.raises(LinkcppError, match="line break"):
        _command(model_path="/models/a\n--rpc\nevil:1.gguf")


def test_the_templates_folder_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert templates_folder(None) is None
    monkeypatch.setenv("LINKCPP_TEMPLATES", str(tmp_path))
    assert templates_folder(None) == tmp_path
    with pytest.raises(LinkcppError, match="does not exist"):
        templates_folder(str(tmp_path / "nowhere"))


def test_the_home_of_a_user_that_there_is_not_is_one_sentence() -> None:
    with pytest.raises(LinkcppError, match="no home folder for nobody-has-this-name"):
        templates_folder("~nobody-has-this-name/templates")
