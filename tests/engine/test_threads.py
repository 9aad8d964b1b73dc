"""Idle compute threads soon sleep, unless the user chose otherwise."""

from pathlib import Path

import psutil
import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import rpc_server_spec
from linkcpp.engine.threads import short_waits
from tests.support.rpc_servers import process_on, rpc_server


def test_the_users_own_choice_is_left_alone() -> None:
    assert short_waits({"PATH": "/bin"}) == {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert short_waits({name: "active"}) == {}


def test_an_rpc_server_runs_with_it(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    with rpc_server(stock_engine) as port:
        running: psutil.Process = process_on(port)
        assert running.environ()["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    spec = rpc_server_spec(stock_engine, device="CPU", port=1, log_path=Path("log"))
    assert "GOMP_SPINCOUNT" not in spec.environment
