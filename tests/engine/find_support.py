"""Stand-ins for llama.cpp programs that misbehave in one way each, and copies of real engines."""

import sys
import time
from pathlib import Path

import psutil

from linkcpp.engine.records import EngineLocation


def write_program(path: Path, body: str) -> Path:
    """Write an executable Python program; ``body`` sees ``sys``, ``os``, ``signal``, ``time``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport os, signal, sys, time\n{body}\n")
    path.chmod(0o755)
    return path


def write_shell_program(path: Path, body: str) -> Path:
    """Write an executable shell script (unlike Python's, never taken for a package's shim)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def copy_engine(engine: EngineLocation, folder: Path, *, without: str | None = None) -> Path:
    """Lay an engine out anew by hard links or copies, all files in one folder.

    ``without`` leaves out the libraries whose name starts with it.
    """
    folder.mkdir(parents=True)
    programs = [path for path in (engine.llama_server, engine.rpc_server) if path]
    libraries = [path for place in engine.library_folders for path in place.glob("lib*.so*")]
    for path in programs + libraries:
        target = folder / path.name
        if not target.exists() and not (without and path.name.startswith(without)):
            # Symbolic links would let $ORIGIN lead back to the original's folder.
            target.write_bytes(path.read_bytes())
            target.chmod(0o755)
    return folder


def has_ended(pid: int) -> bool:
    """Wait a while for a process to end; one that nobody reaped yet has ended too."""
    for _ in range(3000):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def answering_server(path: Path, *, version: str, options: str, otherwise: str = "") -> Path:
    """Write a llama-server that answers --version, --help, --list-devices, and else ``otherwise``.

    ``otherwise`` is Python code for any other arguments.
    """
    return write_program(
        path,
        f"""
if sys.argv[1:] == ["--version"]:
    print("version: {version}", file=sys.stderr)
elif sys.argv[1:] == ["--help"]:
    print({options!r})
elif sys.argv[1:] == ["--list-devices"]:
    print("Available devices:")
else:
    {otherwise or "sys.exit(1)"}
""",
    )


ALL_OPTIONS = (
    "--rpc SERVERS\n-ot, --override-tensor X\n--repack, -nr, --no-repack\n-fit, --fit [on|off]"
)
