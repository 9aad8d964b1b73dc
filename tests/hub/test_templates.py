"""Every template is tried as whoever reads it would."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from linkcpp.common.resources import resource_folder
from linkcpp.common.systemd import systemd_unit
from tests.internet.web import certificates, nginx_configuration

TEMPLATES = resource_folder("templates")
HUB = TEMPLATES / "hub"
TOP = TEMPLATES.parent
SCRIPTS = [
    HUB / "termux.sh",
    *(TOP / name for name in (".ci/run", "bin/setup", "bin/test", "bin/demo")),
]

# What a phone has, as programs that only note how they were called.
_PHONE = {
    "pkg": "",
    "termux-wake-lock": "",
    "python": 'mkdir -p "$3/bin"; touch "$3/bin/activate"; ln -s "${0%/*}/linkcpp" "$3/bin/"',
    "pip": "",
    "linkcpp": 'case $* in *"--token -"*) sed "s/^/stdin: /" >>"$NOTES" ;; esac',
}


class Phone:
    """A home folder, and the programs of Termux."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.notes = folder / "notes"
        programs = folder / "programs"
        for made in (self.home, programs):
            made.mkdir()
        for name, does in _PHONE.items():
            path = programs / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >>"$NOTES"\n{does}\n')
            path.chmod(0o755)
        self._path = f"{programs}:/usr/bin:/bin"

    def run(self, script: Path, *words: str, answer: str = "") -> list[str]:
        """Run a script to its end; return the calls it made."""
        self.notes.write_text("")
        environment = {"HOME": str(self.home), "NOTES": str(self.notes), "PATH": self._path}
        subprocess.run(
            ["/bin/sh", str(script), *words],
            input=answer,
            text=True,
            env=environment,
            cwd=self.home,
            check=True,
            timeout=60,
        )
        return self.notes.read_text().splitlines()


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    return Phone(tmp_path)


def test_a_phone_becomes_a_node_from_its_checkout_with_the_token_that_was_entered(
    phone: Phone,
) -> None:
    calls = phone.run(HUB / "termux.sh", "https://hub.example", answer="lcj_secret\n")
    assert f"pip install {TOP}" in calls
    assert calls[-2:] == [
        "linkcpp join https://hub.example --memory 2GB --no-listen --token -",
        "stdin: lcj_secret",
    ]


def test_a_phone_that_joined_is_asked_for_no_token_and_comes_back_at_boot(phone: Phone) -> None:
    joined = "linkcpp join https://hub.example --memory 2GB --no-listen"
    calls = phone.run(HUB / "termux.sh", "https://hub.example", answer="\n")
    assert calls[-1] == joined
    at_boot = phone.run(phone.home / ".termux" / "boot" / "linkcpp")
    assert at_boot == ["termux-wake-lock ", joined]
    # These words are ones that the program takes.
    words = joined.split()[1:]
    done = subprocess.run([sys.executable, "-m", "linkcpp", *words, "--systemd-unit"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_is_sound(script: Path) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([program, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_services_of_compose_have_all_that_they_name(tmp_path: Path) -> None:
    text = (HUB / "compose.yaml").read_text()
    described = yaml.safe_load(text)
    services = described["services"]
    for service in services.values():
        named = [volume.rpartition("}")[2].split(":") for volume in service.get("volumes", [])]
        assert {one[0] for one in named if one[0]} <= described["volumes"].keys()
        assert set(service.get("depends_on", {})) <= services.keys()
    build = services["hub"]["build"]
    assert (TOP / build["context"] / build["dockerfile"]).is_file()
    for file in {service["env_file"] for service in services.values()} | {".env"}:
        assert f"> {file}" in text, "the steps at the top make it"
    models = next(volume for volume in services["hub"]["volumes"] if "/models" in volume)
    assert models.endswith(":/models:ro")
    # What the container runs is a command line that the program takes.
    words = [*services["hub"]["command"], "--systemd-unit"]
    assert subprocess.run([sys.executable, "-m", "linkcpp", *words], check=False).returncode == 0


def test_the_image_copies_what_is_there_and_what_docker_is_sent() -> None:
    copied = [
        word
        for line in (HUB / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    ]
    sent = (TOP / ".dockerignore").read_text().splitlines()
    for name in copied:
        assert (TOP / name).exists()
        assert f"!{name}" in sent


def test_cloudflared_is_given_a_file_in_its_form() -> None:
    given = yaml.safe_load((HUB / "cloudflared.yml").read_text())
    assert given["ingress"][0]["service"] == "http://127.0.0.1:8720"
    # The last rule takes all that no other does, or cloudflared refuses the file.
    assert given["ingress"][-1].keys() == {"service"}
    steps = (TOP / "docs" / "operations.md").read_text()
    assert not re.search(r"^cloudflared tunnel .*\brun\b", steps, re.MULTILINE), "it would block"


def test_nginx_takes_its_file(tmp_path: Path) -> None:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    certificates(tmp_path, ["hub.example"])
    configuration = tmp_path / "nginx.conf"
    configuration.write_text(nginx_configuration(tmp_path, tmp_path, "hub.example", 8720))
    done = subprocess.run(
        [program, "-t", "-p", str(tmp_path), "-c", str(configuration)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    command = [sys.executable, "-m", "linkcpp", "hub", "--data", f"{tmp_path}/50% of $HOME"]
    environment = {"LINKCPP_HOME": "/srv/a b"}
    unit = tmp_path / "linkcpp-hub.service"
    unit.write_text(systemd_unit("hub", "linkcpp hub", command, environment))
    done = subprocess.run(
        [program, "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_service_has_the_settings_of_who_prints_its_unit_but_no_password() -> None:
    environment = {
        "LINKCPP_TEMPLATES": "/t",
        "SSL_CERT_FILE": "/ca.pem",
        "HTTPS_PROXY": "http://user:geheim@proxy:3128",
        "no_proxy": "10.0.0.0/8",
        "LINKCPP_DATABASE": "postgresql+psycopg://linkcpp@database/linkcpp",
        "LINKCPP_JOIN_TOKEN": "lcj_secret",
    }
    unit = systemd_unit("hub", "linkcpp hub", ["linkcpp"], environment)
    given = set(re.findall(r"^Environment=\"?(\w+)=", unit, re.MULTILINE))
    assert given == environment.keys() - {"HTTPS_PROXY", "LINKCPP_JOIN_TOKEN"}


def test_a_line_break_in_an_option_adds_no_line_to_a_unit() -> None:
    unit = systemd_unit("node", "node", ["linkcpp", "--name", "a\nExecStartPre=/bin/false"], {})
    assert '"a\\nExecStartPre=/bin/false"' in unit
    assert not re.search(r"^ExecStartPre", unit, re.MULTILINE)
