"""The model of a deployment opened where it is: files here, on the web, or at a hub."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from linkcpp.model.parts import ModelFiles
from linkcpp.model.slices.hashing import Progress
from linkcpp.model.slices.hollow import has_no_experts
from linkcpp.model.slices.manifest import Manifest
from linkcpp.model.slices.segments import Segment, merge_segments
from linkcpp.model.slices.writing import open_whole_model, write_backbone, write_slice
from linkcpp.registry.hub_location import parse_hub_location
from linkcpp.registry.hub_model import HubModel
from linkcpp.registry.model_lookup import is_elsewhere, opened_at_hub


@dataclass(frozen=True)
class OpenedModel:
    """A model whose parts can be written here; ``at_hub`` gives and checks them, if it is set."""

    files: ModelFiles
    is_hollow: bool = False
    at_hub: HubModel | None = None

    @property
    def state(self) -> list[object]:
        """What is another one where the weights are others though the headers are the same."""
        if self.at_hub is not None:
            return [self.at_hub.record.manifest_digest]
        return [[source.name, source.size_bytes, source.version] for source in self.files.sources]

    def write_backbone(self, output: Path, on_progress: Progress) -> None:
        """Write the hollow model; raises as ``linkcpp.model.slices.writing.write_backbone``."""
        supply_of = self.at_hub.backbone_supply() if self.at_hub else None
        write_backbone(self.files, output, on_progress, supply_of)

    def write_slice(
        self, segments: tuple[Segment, ...], output: Path, on_progress: Progress
    ) -> None:
        """Write a slice; raises as ``linkcpp.model.slices.writing.write_slice``."""
        merged = merge_segments(segments)
        supply_of = self.at_hub.slice_supply(merged) if self.at_hub else None
        write_slice(self.files, merged, output, on_progress, supply_of)

    def promised_manifest(self, segments: tuple[Segment, ...]) -> Manifest | None:
        """Return the hashes that a hub promises for a slice, ``None`` without a hub."""
        return self.at_hub.slice_manifest(merge_segments(segments)) if self.at_hub else None


@contextmanager
def opened_model(location: str) -> Iterator[OpenedModel]:
    """Open a model by path, URL or hub location.

    Raises:
        LinkcppError: it cannot be read, or is itself a slice; a hub cannot be asked.
    """
    with contextlib.ExitStack() as stack:
        at_hub = parse_hub_location(location)
        if at_hub is not None:
            model = stack.enter_context(opened_at_hub(at_hub))
            yield OpenedModel(model.files, at_hub=model)
        else:
            files = stack.enter_context(open_whole_model(location))
            yield OpenedModel(files, is_hollow=not is_elsewhere(location) and has_no_experts(files))
