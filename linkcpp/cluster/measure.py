"""What this machine has, measured: memory, cores, devices, and the speed of its memory."""

import contextlib
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from linkcpp import __version__
from linkcpp.cluster.identity import Identity, load_identity
from linkcpp.cluster.limits import Memory, system_memory, usable_cores
from linkcpp.cluster.records import NodeDevice, NodeRecord
from linkcpp.common.cache import read_kept, write_kept
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import cache_folder
from linkcpp.engine.records import Engine, EngineDevice

CPU = "CPU"

# Larger than the last-level caches of common CPUs, so that the passes read memory.
_BUFFER_BYTES = 256 * 2**20
_SMALLEST_BUFFER_BYTES = 2**20
_MEASURE_SECONDS = 0.3


class Promise(NamedTuple):
    """Bytes of a device that deployments may take, and how many of them they hold already."""

    memory_bytes: int
    allocated_bytes: int = 0


def this_machine(
    engine: Engine | None,
    *,
    identity: Identity | None = None,
    memory_limit_bytes: int | None = None,
    promises: Mapping[str, Promise] | None = None,
) -> NodeRecord:
    """Describe this machine as its node agent would, whether or not an agent runs.

    ``promises`` names by device what running engine processes were promised. The first call on a
    machine takes about a third of a second, in which the speed of its memory is measured.
    """
    who = identity or load_identity()
    return NodeRecord(
        node_id=who.node_id,
        name=who.name,
        agent_version=__version__,
        platform=f"{platform.system()} {platform.machine()}",
        core_count=usable_cores(),
        memory_limit_bytes=memory_limit_bytes,
        devices=offer_devices(
            engine.devices if engine else (),
            system_memory(),
            memory_limit_bytes=memory_limit_bytes,
            promises=promises or {},
            cpu_description=cpu_model(),
            cpu_bytes_per_second=cpu_read_rate(),
            is_memory_shared=_is_memory_shared(),
        ),
        engine=engine.fingerprint if engine else None,
        engine_problem=engine.problem if engine else None,
    )


def offer_devices(
    engine_devices: tuple[EngineDevice, ...],
    memory: Memory,
    *,
    memory_limit_bytes: int | None,
    promises: Mapping[str, Promise],
    cpu_description: str,
    cpu_bytes_per_second: float | None,
    is_memory_shared: bool,
) -> tuple[NodeDevice, ...]:
    """Decide what each device offers: the engine's GPUs as it lists them, then the CPU.

    A device offers its free memory less what is promised and not yet allocated, and never so much
    that it would hold more than the owner's limit. The limit holds for system memory and for the
    memory of each graphics card. Where GPU and CPU share one memory (``is_memory_shared``), each
    byte is offered once: to the GPUs first, the rest to the CPU.
    """
    gpus = [device for device in engine_devices if not _is_cpu(device) and device.total_bytes > 0]
    in_system_memory = {CPU, *(gpu.name for gpu in gpus if is_memory_shared)}
    left_bytes = _budget(
        memory.available_bytes,
        memory_limit_bytes,
        [promise for name, promise in promises.items() if name in in_system_memory],
    )
    offers: list[NodeDevice] = []
    for gpu in gpus:
        if is_memory_shared:
            offered_bytes = min(gpu.free_bytes, left_bytes)
            left_bytes -= offered_bytes
        else:
            own = [promise for name, promise in promises.items() if name == gpu.name]
            offered_bytes = _budget(gpu.free_bytes, memory_limit_bytes, own)
        offers.append(
            NodeDevice(
                name=gpu.name,
                description=gpu.description,
                is_cpu=False,
                total_bytes=gpu.total_bytes,
                free_bytes=gpu.free_bytes,
                offered_bytes=offered_bytes,
                read_bytes_per_second=None,
            )
        )
    cpu = NodeDevice(
        name=CPU,
        description=cpu_description,
        is_cpu=True,
        total_bytes=memory.total_bytes,
        free_bytes=memory.available_bytes,
        offered_bytes=left_bytes,
        read_bytes_per_second=cpu_bytes_per_second,
    )
    return (*offers, cpu)


def _budget(free_bytes: int, limit_bytes: int | None, promises: Collection[Promise]) -> int:
    promised = sum(promise.memory_bytes for promise in promises)
    to_come = sum(max(0, promise.memory_bytes - promise.allocated_bytes) for promise in promises)
    budget = free_bytes - to_come
    if limit_bytes is not None:
        budget = min(budget, limit_bytes - promised)
    return max(0, budget)


def _is_cpu(device: EngineDevice) -> bool:
    return device.name.upper() == CPU


def _is_memory_shared() -> bool:
    """Tell whether the GPU that an engine lists uses the system's memory (Apple silicon)."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def cpu_model() -> str:
    """Name the CPU as its maker does, as far as the system tells."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model", "Hardware", "cpu model"):
                    return value.strip()
    except OSError:
        pass  # not Linux
    if sys.platform == "darwin":
        told = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        if told.stdout.strip():
            return told.stdout.strip()
    return platform.processor() or platform.machine()


def cpu_read_rate() -> float:
    """Return how many bytes a second all usable cores together stream from memory.

    Measured once for a CPU and number of cores, then kept in the cache folder.
    """
    cores = usable_cores()
    key = f"{cpu_model()} x{cores}"
    path = cache_folder() / "memory-speed.json"
    known = _load_rates(path)
    if key not in known:
        buffer_bytes = min(_BUFFER_BYTES, system_memory().available_bytes // 8)
        known[key] = measure_read_rate(cores, max(buffer_bytes, _SMALLEST_BUFFER_BYTES))
        with contextlib.suppress(LinkcppError):  # a cache that cannot be written is not a failure
            write_kept(path, json.dumps(known))
    return known[key]


def _load_rates(path: Path) -> dict[str, float]:
    try:
        rates = json.loads(read_kept(path) or b"{}")
        return {str(key): float(rate) for key, rate in rates.items() if 0 < float(rate) < math.inf}
    except (ValueError, TypeError, AttributeError):
        return {}


def measure_read_rate(threads: int, buffer_bytes: int) -> float:
    """Stream a buffer with ``threads`` threads for a while; return the best pass in bytes/s.

    The best pass and not the mean: other programs only ever make a pass slower.
    """
    buffer = np.ones(buffer_bytes // 8, dtype=np.uint64)
    parts = np.array_split(buffer, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + _MEASURE_SECONDS
        while best == 0.0 or time.perf_counter() < end:
            start = time.perf_counter()
            # Numpy lets go of the interpreter lock while it reduces.
            list(pool.map(np.bitwise_or.reduce, parts))
            best = max(best, buffer.nbytes / (time.perf_counter() - start))
    return best
