"""``linkcpp config``: what it shows is what there is, and what the documentation says."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linkcpp.cli.config import VARIABLES, app
from linkcpp.cluster.config import Config
from linkcpp.common.config_file import config_path
from linkcpp.common.errors import LinkcppError

_TOP = Path(__file__).parents[2]
_SETUP = (_TOP / "docs/setup.md").read_text()
# Of the tests and of a template for phones.
_OTHERS = {"LINKCPP_SOURCE_ENGINE", "LINKCPP_MEMORY"}


def write_config(text: str) -> None:
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(text)


def documented(heading: str) -> list[str]:
    """Return the names in the first column of the table with this heading."""
    table = _SETUP.split(f"| {heading} | for |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [name for row in table for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    keys = [field.alias or name for name, field in Config.model_fields.items()]
    assert documented("key") == keys


def test_every_environment_variable_is_documented_and_shown() -> None:
    read = {
        name
        for path in (_TOP / "linkcpp").rglob("*.py")
        for name in re.findall(r"LINKCPP_[A-Z_]+", path.read_text())
    }
    shown = [variable.name for variable in VARIABLES]
    assert read - _OTHERS <= set(shown)
    assert documented("environment variable") == shown


def test_settings_are_shown_with_where_they_come_from() -> None:
    write_config('memory_limit = "6GB"\n')
    settings = json.loads(CliRunner().invoke(app, ["--json"]).stdout)["settings"]
    values = {each["key"]: each["value"] for each in settings}
    assert values == {
        "name": None,
        "nodes": None,
        "engine": None,
        "memory_limit": "6GB",
        "mdns": None,
    }
    lines = CliRunner().invoke(app, []).stdout.splitlines()
    assert re.search(r"memory_limit +6GB +config\.toml", "\n".join(lines))
    assert re.search(r"mdns +true +default", "\n".join(lines))


def test_a_wrong_key_is_told_with_the_right_one_and_the_rest_is_shown() -> None:
    write_config('nmae = "attic"\nmdns = false\nmemory_limit = 24\n')
    result = CliRunner().invoke(app, [])
    assert isinstance(result.exception, LinkcppError)
    assert "'nmae' is not known" in result.exception.message
    assert "The size '24' has no unit" in result.exception.message
    assert (result.exception.hint or "").startswith("Did you mean name?")
    assert re.search(r"mdns +false +config\.toml", result.stdout)


def test_secrets_of_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("https_proxy", "http://me:hunter2@proxy:3128")
    for arguments in ([], ["--json"]):
        shown = CliRunner().invoke(app, arguments).stdout
        assert "HF_TOKEN" in shown
        assert "HTTPS_PROXY" in shown
        assert "hunter2" not in shown
