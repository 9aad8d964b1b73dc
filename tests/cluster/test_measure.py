"""What a machine says of itself: memory, cores, devices, speed."""

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.cluster import measure
from linkcpp.cluster.limits import Memory, cores_within, memory_within, usable_cores
from linkcpp.cluster.measure import CPU, Promise, offer_devices, this_machine
from linkcpp.cluster.records import NodeDevice
from linkcpp.common.paths import cache_folder
from linkcpp.engine.records import Engine, EngineDevice, EngineLocation

GB = 10**9
HOST = Memory(64 * GB, 60 * GB)
GPU = EngineDevice(name="Vulkan0", description="card", total_bytes=8 * GB, free_bytes=7 * GB)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_a_container_offers_its_own_limit_and_not_the_hosts_memory(tmp_path: Path) -> None:
    group(
        tmp_path,
        memory__max=str(4 * GB),
        memory__current=str(3 * GB),
        memory__stat=f"anon 1\ninactive_file {GB}",
    )
    assert memory_within(HOST, tmp_path, "0::/") == Memory(4 * GB, 2 * GB)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    group(tmp_path / "a", memory__max=str(2 * GB), memory__current=str(GB))
    group(tmp_path / "a/b", memory__max="max", memory__current="5", cpu__max="max 100000")
    group(tmp_path / "a", cpu__max="150000 100000")
    assert memory_within(HOST, tmp_path, "0::/a/b") == Memory(2 * GB, GB)
    assert cores_within(8, tmp_path, "0::/a/b") == 2


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    group(
        tmp_path / "memory/job",
        memory__limit_in_bytes=str(GB),
        memory__usage_in_bytes=str(GB // 2),
        memory__stat="total_inactive_file 0",
    )
    group(tmp_path / "memory", memory__limit_in_bytes=str(2**63 - 4096))
    group(tmp_path / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    membership = "4:memory:/job\n3:cpu,cpuacct:/\n0::/"
    assert memory_within(HOST, tmp_path, membership) == Memory(GB, GB // 2)
    assert cores_within(8, tmp_path, membership) == 8


@given(st.text())
def test_odd_membership_text_never_raises(text: str) -> None:
    assert memory_within(HOST, Path("/nowhere"), text) == HOST
    assert cores_within(3, Path("/nowhere"), text) == 3


def offers(
    *gpus: EngineDevice,
    limit: int | None = None,
    promises: dict[str, Promise] | None = None,
    shared: bool = False,
) -> dict[str, int]:
    devices = offer_devices(
        gpus,
        HOST,
        memory_limit_bytes=limit,
        promises=promises or {},
        cpu_description="cpu",
        cpu_bytes_per_second=1.0,
        is_memory_shared=shared,
    )
    return {device.name: device.offered_bytes for device in devices}


def test_without_a_limit_free_memory_is_offered() -> None:
    assert offers(GPU) == {"Vulkan0": 7 * GB, CPU: 60 * GB}


def test_a_device_named_cpu_or_without_memory_is_not_listed_twice() -> None:
    cpu = EngineDevice(name="CPU", description="", total_bytes=1, free_bytes=1)
    blas = EngineDevice(name="BLAS", description="", total_bytes=0, free_bytes=0)
    assert offers(cpu, blas) == {CPU: 60 * GB}


def test_what_is_promised_counts_once_whether_allocated_or_not() -> None:
    assert offers(promises={CPU: Promise(5 * GB)})[CPU] == 55 * GB
    assert offers(promises={CPU: Promise(5 * GB, 5 * GB)})[CPU] == 60 * GB
    assert offers(promises={CPU: Promise(5 * GB, 2 * GB)}, limit=6 * GB)[CPU] == GB


def test_memory_that_cpu_and_gpu_share_is_offered_once() -> None:
    metal = EngineDevice(name="MTL0", description="", total_bytes=48 * GB, free_bytes=48 * GB)
    assert offers(metal, shared=True) == {"MTL0": 48 * GB, CPU: 12 * GB}
    limited = offers(metal, shared=True, limit=20 * GB, promises={"MTL0": Promise(8 * GB)})
    assert limited == {"MTL0": 12 * GB, CPU: 0}


sizes = st.integers(0, 100 * GB)


@given(sizes, sizes, sizes, sizes, st.booleans())
def test_promises_and_offers_together_never_exceed_the_limit(
    limit: int, promised: int, allocated: int, free: int, shared: bool
) -> None:
    gpu = EngineDevice(name="G", description="", total_bytes=free + 1, free_bytes=free)
    promises = {"G": Promise(promised, allocated), CPU: Promise(promised // 2)}
    found = offers(gpu, limit=limit, promises=promises, shared=shared)
    assert all(offered >= 0 for offered in found.values())
    if shared:
        pools = [promised + promised // 2 + found["G"] + found[CPU]]
        kept = [promised + promised // 2]
    else:
        pools = [promised + found["G"], promised // 2 + found[CPU]]
        kept = [promised, promised // 2]
    for pool, before in zip(pools, kept, strict=True):
        assert pool <= max(limit, before)


def test_this_machine_describes_itself_without_an_engine_or_an_agent() -> None:
    record = this_machine(None, memory_limit_bytes=GB)
    cpu = record.devices[-1]
    assert isinstance(cpu, NodeDevice)
    assert cpu.is_cpu
    assert cpu.offered_bytes <= GB
    assert 0 < cpu.total_bytes <= psutil.virtual_memory().total
    assert record.core_count == usable_cores() >= 1
    assert record.engine is None
    assert cpu.read_bytes_per_second is not None
    assert cpu.read_bytes_per_second > 10**7


def test_the_engines_devices_and_problem_are_passed_on() -> None:
    engine = Engine(
        location=EngineLocation(llama_server=None, rpc_server=None, found_by="test"),
        fingerprint=None,
        devices=(GPU,),
    )
    assert [device.name for device in this_machine(engine).devices] == ["Vulkan0", CPU]


def test_the_speed_of_memory_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure.cpu_read_rate()

    def fail(*_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "measure_read_rate", fail)
    assert measure.cpu_read_rate() == first


def test_a_damaged_cache_is_measured_again() -> None:
    path = cache_folder() / "memory-speed.json"
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"x": "y"}', "\x00"):
        path.write_text(text)
        assert measure.cpu_read_rate() > 0
