"""Tables on terminals of every width: nothing of them is cut off."""

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from linkcpp.cli.discover import render
from linkcpp.cli.tables import Need, WholeTable, fit_columns
from linkcpp.cluster.records import DiscoveredNode, LinkSpeed, NodeDevice, NodeStatus
from linkcpp.node.discovery import Discovery
from tests.cluster.peers import COORDINATOR, node_record


def shown(*parts: object, width: int) -> list[str]:
    screen = Console(width=width, file=StringIO())
    with screen.capture() as captured:
        for part in parts:
            screen.print(part)
    return captured.get().splitlines()


def device(name: str, offered_bytes: int) -> NodeDevice:
    return NodeDevice(
        name=name,
        description=name,
        is_cpu=False,
        total_bytes=offered_bytes,
        free_bytes=offered_bytes,
        offered_bytes=offered_bytes,
        read_bytes_per_second=None,
    )


@pytest.mark.parametrize("address", ["192.168.100.123", "[fe80::a00:27ff:fe4e:66a1%enp0s31f6]"])
def test_discover_shows_addresses_and_states_whole_at_80_columns(address: str) -> None:
    memory = (device("Vulkan0", 23_900_000_000), device("CPU", 128_000_000_000))
    node = DiscoveredNode(
        name="workstation-in-the-attic",
        urls=(f"http://{address}:8716",),
        found_by="mdns",
        status=NodeStatus.OTHER_ENGINE,
        reason=None,
        record=node_record(devices=memory, core_count=128),
        link=LinkSpeed(rtt_ms=123.4, bytes_per_second=123.4e6),
    )
    found = Discovery(coordinator=COORDINATOR, nodes=(node,), notes=())
    lines = shown(*render(found), width=80)
    assert all(cell_len(line) <= 80 for line in lines)
    for column in ("NODE", "ADDRESS", "RATE", "MEMORY", "CORES", "ENGINE", "STATUS"):
        assert column in f"{lines[0]} {lines[1]}"
    text = "\n".join(lines)
    for word in ("other", "engine", "Vulkan0", "23.9", "GB", "128", "123.4", "works"):
        assert word in text
    if address[0] != "[":
        assert f"{address}:8716 " in text


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(24, 120),
)
def test_whatever_is_in_a_table_and_however_narrow_it_is_all_of_it_is_shown(
    columns: list[tuple[list[int], bool]], width: int
) -> None:
    table = WholeTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    cells = []
    for letter, (words, no_wrap) in zip("abcdefgh", columns, strict=False):
        table.add_column("", no_wrap=no_wrap)
        cells.append(" ".join(letter * length for length in words))
    table.add_row(*cells)
    lines = shown(table, width=width)
    assert all(cell_len(line) <= width for line in lines)
    for cell in cells:
        assert "".join(lines).count(cell[0]) == cell.count(cell[0])


def test_lines_break_between_words_before_rigid_columns_and_words_break() -> None:
    text, rigid = Need(word=6, line=20, is_rigid=False), Need(word=5, line=14, is_rigid=True)
    assert fit_columns([text, rigid], 40) == [20, 14]
    assert fit_columns([text, rigid], 22) == [8, 14]
    assert sum(fit_columns([text, rigid], 16)) == 16
    assert fit_columns([text, rigid], 8) == [4, 4]
