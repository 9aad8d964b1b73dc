"""What linkcpp knows of an engine: one folder of stock llama.cpp programs of one build."""

import hashlib
from pathlib import Path

from linkcpp.common.records import Record, WireRecord


class RpcVersion(WireRecord):
    """A ggml-RPC protocol version, as HELLO tells it."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class EngineFeatures(WireRecord):
    """Which options of ``llama-server`` that linkcpp needs this build knows."""

    rpc: bool
    override_tensor: bool
    no_repack: bool
    fit: bool


class EngineDevice(WireRecord):
    """A compute device as an engine names it (``CPU``, ``Vulkan0``, ``CUDA0``, ``MTL0``)."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int


class EngineFingerprint(WireRecord):
    """What build a node runs: equal fingerprints may share one deployment.

    ``build`` is llama.cpp's build number where anything tells it (many packages compile it as 1, so
    the package's version is the better witness); ``commit`` its short commit hash.
    """

    build: int | None
    commit: str | None
    ggml_version: str | None
    rpc_version: RpcVersion | None
    features: EngineFeatures
    is_stock: bool = True

    @property
    def digest(self) -> str:
        """Sixteen hex digits that are equal for equal fingerprints; short enough for mDNS."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """One short phrase for tables: ``b10068 571d0d5, RPC 4.0.3``."""
        build = f"b{self.build}" if self.build and self.build > 1 else "build unknown"
        commit = f" {self.commit}" if self.commit else ""
        rpc = f"RPC {self.rpc_version}" if self.rpc_version else "no RPC"
        return f"{build}{commit}, {rpc}"


class EngineLocation(Record):
    """Where the programs of one engine lie, before anything is known of them.

    ``library_folders`` go on the loader's path when a program is started.
    """

    llama_server: Path | None
    rpc_server: Path | None
    library_folders: tuple[Path, ...] = ()
    found_by: str
    package: str | None = None
    package_version: str | None = None


class EngineProblem(WireRecord):
    """Why an engine cannot be used, in one sentence, and the way out."""

    code: str
    message: str
    hint: str


class Engine(Record):
    """An engine that was looked at: its place, what it is, and what is wrong with it if anything.

    ``problem`` is ``None`` exactly when the engine ran the tiny model on this machine.
    """

    location: EngineLocation
    fingerprint: EngineFingerprint | None
    devices: tuple[EngineDevice, ...] = ()
    problem: EngineProblem | None = None
