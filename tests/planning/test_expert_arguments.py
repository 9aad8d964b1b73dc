"""llama-server's command line with all experts on a virtual device."""

import pytest

from linkcpp.cluster.records import Cluster
from linkcpp.model.presets import load_model
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import PlanMode, PlanOptions
from linkcpp.planning.shortfall import make_plan
from tests.planning.clusters import GIGABYTE, device, machine, node

EXPERTS_AT = "127.0.0.1:4711"
OVERRIDE = r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)=RPC0[127.0.0.1:4711]"


@pytest.mark.parametrize(
    ("card_bytes", "devices", "layers"),
    [(0, "RPC0", ["-ngl", "0"]), (20 * GIGABYTE, "CUDA0,RPC0", ["-ngl", "50", "-ts", "50,0"])],
)
def test_experts_go_to_the_virtual_device_and_layers_do_not(
    card_bytes: int, devices: str, layers: list[str]
) -> None:
    cards = [device("CUDA0", card_bytes, 500e9)] if card_bytes else []
    here = machine("here", device("CPU", 20 * GIGABYTE, 20e9), *cards)
    nodes = tuple(node(f"n{i}", device("CPU", 40 * GIGABYTE, 30e9)) for i in range(2))
    plan = make_plan(
        load_model("122B"),
        Cluster(coordinator=here, nodes=nodes),
        PlanOptions(mode=PlanMode.EXPERTS),
    )
    arguments = list(server_arguments(plan, {}, experts_at=EXPERTS_AT))
    fixed = ["--fit", "off", "--rpc", EXPERTS_AT, "--device", devices]
    assert arguments[: len(fixed) + len(layers) + 2] == [*fixed, *layers, "-ot", OVERRIDE]
    assert "--no-repack" in arguments
    assert arguments.count("-ot") == 1


def test_without_a_virtual_device_they_are_those_of_the_backbone() -> None:
    here = machine("here", device("CPU", 90 * GIGABYTE, 20e9))
    plan = make_plan(
        load_model("122B"),
        Cluster(coordinator=here, nodes=()),
        PlanOptions(mode=PlanMode.EXPERTS),
    )
    arguments = server_arguments(plan, {})
    assert "--rpc" not in arguments
    assert arguments[:6] == ("--fit", "off", "--device", "none", "-ngl", "0")
