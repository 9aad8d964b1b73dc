"""What a hint tells to install is what this machine can install: no package index has linkcpp."""

import json
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from linkcpp.common import installation
from linkcpp.common.installation import install_command
from linkcpp.common.resources import resource_folder

TOP = resource_folder("templates").parent


def test_a_checkout_is_named_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(install_command("hub"))
    assert words == [sys.executable, "-m", "pip", "install", "-e", f"{TOP}[hub]"]
    assert (TOP / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("noted", "requirement"),
    [
        ({"url": "file:///srv/my%20code", "dir_info": {}}, "/srv/my code[hub]"),
        (
            {"url": "https://h/l.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "linkcpp[hub] @ git+https://h/l.git@c0ffee",
        ),
        ({"url": "https://h/l.whl", "archive_info": {}}, "linkcpp[hub] @ https://h/l.whl"),
        (None, ".[hub]"),
    ],
)
def test_an_installation_is_named_by_where_pip_took_it_from(
    noted: dict[str, object] | None,
    requirement: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Noted:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if noted is None else json.dumps(noted)

    monkeypatch.setattr(installation, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda _: Noted())
    assert shlex.split(install_command("hub"))[4:] == [requirement]


def test_nothing_tells_to_install_a_name_that_somebody_else_may_take() -> None:
    texts = [*TOP.glob("*.md"), *TOP.glob("docs/*"), *TOP.glob("bin/*")]
    texts += [path for name in ("linkcpp", "templates") for path in (TOP / name).rglob("*")]
    named = re.compile(r"pip3? install (?:-\S+ )*['\"]?(?:\$\{[^}]*-)?linkcpp\b(?!.* @ )")
    found = [path for path in texts if path.is_file() and named.search(_text(path))]
    assert found == []


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
