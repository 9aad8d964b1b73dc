"""A stock llama-server for tests, and what it answers."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from linkcpp.engine.records import EngineLocation
from tests.support.ports import free_port

PROMPT = "The three primary colors are"


@contextlib.asynccontextmanager
async def llama_server(
    location: EngineLocation, model: Path, log: Path, *words: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start llama-server; it may still be loading, or have given up, when this yields."""
    port = free_port()
    folders = os.pathsep.join(str(folder) for folder in location.library_folders)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(location.llama_server), "-m", str(model), "--port", str(port)),
            *("-c", "512", "-np", "1", "-t", "1", "--no-repack", "--fit", "off", "--no-webui"),
            *words,
            env={**os.environ, "LD_LIBRARY_PATH": folders},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def rpc_words(endpoints: Sequence[str], layers: int, split: str) -> list[str]:
    """Put ``layers`` layers on the rpc-servers, in the proportions of ``split``."""
    devices = ",".join(f"RPC{number}" for number in range(len(endpoints)))
    return [
        *("--rpc", ",".join(endpoints), "--device", devices),
        *("-ngl", str(layers), "-ts", split),
    ]


async def wait_loaded(process: asyncio.subprocess.Process, url: str) -> bool:
    """Wait until the model is loaded; ``False`` where the server ended instead."""
    async with httpx.AsyncClient() as http:
        while process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(f"{url}/health")).status_code == 200:
                    return True
            await asyncio.sleep(0.1)
    return False


async def complete(url: str, tokens: int = 24) -> list[Any]:
    """Return greedy tokens with their log-probabilities."""
    body = {
        "prompt": PROMPT,
        "n_predict": tokens,
        "temperature": 0,
        "n_probs": 8,
        "cache_prompt": False,
    }
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{url}/completion", json=body)
    answer.raise_for_status()
    return [
        (step["id"], [(top["id"], top["logprob"]) for top in step["top_logprobs"]])
        for step in answer.json()["completion_probabilities"]
    ]
