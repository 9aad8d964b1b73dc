"""What ends a service for good, and what a service manager tries again."""

import errno
import re
import socket
from pathlib import Path

import pytest

from linkcpp.common.errors import (
    EXIT_ERROR,
    EXIT_NOT_NOW,
    LinkcppError,
    NotNowError,
    error_of_system,
)
from linkcpp.common.resources import resource_folder
from linkcpp.common.sockets import listen

UNITS = sorted((resource_folder("templates") / "systemd").glob("*.service.j2"))


def test_an_address_that_the_machine_may_get_later_is_worth_another_try() -> None:
    with pytest.raises(NotNowError, match=r"Cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_a_port_that_is_taken_is_worth_another_try() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(NotNowError):
            listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, EXIT_NOT_NOW), (errno.EACCES, EXIT_ERROR)]
)
def test_a_full_disk_may_pass_and_a_missing_right_does_not(number: int, code: int) -> None:
    assert error_of_system(OSError(number, "x"), "Refused.").exit_code == code


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_every_unit_gives_up_only_on_what_can_never_work(unit: Path) -> None:
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", unit.read_text(), re.MULTILINE)
    assert prevented.split() == [str(LinkcppError.exit_code)]
    assert NotNowError.exit_code != LinkcppError.exit_code
    assert "Restart=on-failure" in unit.read_text()
