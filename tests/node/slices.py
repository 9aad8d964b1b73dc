"""Slices of a small model for tests of the agent."""

from pathlib import Path

from linkcpp.model.parts import open_model
from linkcpp.model.slices.segments import Segment
from linkcpp.model.slices.writing import WrittenFile
from linkcpp.node.records import SliceRequest
from tests.model.test_slices import cut
from tests.model.web_server import Server
from tests.support.models import qwen3moe

URL_PATH = "/repo/qwen3moe.gguf"


def publish(web: Server, model: Path | None = None) -> str:
    """Put the model on a web server; return its address."""
    web.files[URL_PATH] = (model or qwen3moe()).read_bytes()
    return web.url + URL_PATH


def segments(*ranges: tuple[int, int, int]) -> tuple[Segment, ...]:
    """Write (layer, first, last) as segments."""
    return tuple(Segment(layer=a, first=b, last=c) for a, b, c in ranges)


def request_for(url: str, *ranges: tuple[int, int, int]) -> SliceRequest:
    """Ask for experts of the model."""
    with open_model(qwen3moe()) as files:
        digest = files.digest
    return SliceRequest(url=url, model_digest=digest, segments=segments(*ranges))


def cut_here(folder: Path, *ranges: tuple[int, int, int]) -> WrittenFile:
    """Slice the model on this machine."""
    texts = [f"{layer}:{first}-{last}" for layer, first, last in ranges]
    return cut(qwen3moe(), folder / f"{'_'.join(texts)}.gguf", *texts)
