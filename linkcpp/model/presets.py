"""Models known by their shape alone: ``plans/models/*.json``, expanded into inventories.

A preset is data: the numbers of the architecture as a GGUF header would give them, and each kind of
tensor once, with its shape, its type and the layers that have it. Sizes follow from these.
"""

import difflib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import expand_home
from linkcpp.common.records import Record
from linkcpp.common.resources import resource_folder
from linkcpp.model.ggml_types import TYPES_BY_NAME
from linkcpp.model.header import TensorInfo, Value
from linkcpp.model.inventory import (
    TENSOR_ALIGNMENT_BYTES,
    ModelIdentity,
    build_inventory,
    read_inventory,
)
from linkcpp.model.parts import is_url
from linkcpp.model.records import ModelInventory

EVERY_LAYER = "*"
_MAX_OFFERED = 3
# By this measure 122B is like 12B, and 235B is not.
_LIKENESS = 0.6
_LAYER_RANGE = re.compile(r"(\d+)(?:-(\d+))?(?:/(\d+))?")


class MixedType(Record):
    """llama-quantize's mixtures: some layers of a tensor kind get a larger type.

    The layers are those of ``use_more_bits`` in ``llama-quant.cpp``: the first and the last eighth,
    and every third of those between.
    """

    usual: str
    more_bits: str

    def of_layer(self, layer: int, layer_count: int) -> str:
        """The type's name in one layer."""
        eighth = layer_count // 8
        has_more = layer < eighth or layer >= 7 * layer_count // 8 or (layer - eighth) % 3 == 2
        return self.more_bits if has_more else self.usual


class TensorTemplate(Record):
    """One kind of tensor. ``name`` has ``*`` for the layer number; ``shape`` is in ggml order.

    ``layers`` names the blocks that have it: ``*``, or ranges with steps such as ``3-47/4,48``.
    """

    name: str
    shape: tuple[int, ...] = Field(min_length=1, max_length=4)
    type: str | MixedType = "F32"
    layers: str = EVERY_LAYER


class Preset(Record):
    """A model without a file.

    ``published_bytes`` is the size of the published file that the preset stands for, to check the
    expansion against; ``sources`` tell where the numbers are from, ``note`` what is not certain.
    """

    schema_version: Literal[1]
    name: str
    aliases: tuple[str, ...]
    sources: tuple[str, ...] = Field(min_length=1)
    note: str | None = None
    published_bytes: int
    architecture: str
    numbers: dict[str, int | tuple[int, ...]]
    tensors: tuple[TensorTemplate, ...]


def load_model(text: str) -> ModelInventory:
    """Take stock of a model named as a user names it: a path, an http(s) URL, or a preset.

    Raises:
        LinkcppError: there is no such file, address or preset (the nearest presets are offered), or
            the file cannot be used.
    """
    if is_url(text):
        return read_inventory(text)
    path = expand_home(Path(text))
    preset = find_preset(text)
    try:
        is_there = path.exists()
        is_file = path.is_file()
    except (OSError, ValueError):
        # An unreadable folder, an impossible name: opening it says what is wrong.
        is_there = is_file = True
    if is_file or (preset is None and (is_there or _looks_like_path(text))):
        return read_inventory(path)
    if preset is not None:
        return expand_preset(preset)
    raise _unknown(text)


def find_preset(name: str) -> Preset | None:
    """The preset of this name or alias, in any spelling of case, spaces and dashes."""
    wanted = _normal(name)
    return next((preset for preset in presets() if wanted in _names(preset)), None)


@functools.cache
def presets() -> tuple[Preset, ...]:
    """All presets, in the order of their sizes.

    Raises:
        LinkcppError: a preset's file is damaged.
    """
    found = []
    for path in sorted((resource_folder("plans") / "models").glob("*.json")):
        try:
            found.append(Preset.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise LinkcppError(
                f"The preset {path.name} cannot be read: {error}.", hint="Install linkcpp again."
            ) from error
    return tuple(sorted(found, key=lambda preset: preset.published_bytes))


def expand_preset(preset: Preset) -> ModelInventory:
    """The inventory that the file would give, with tensors packed as in one file."""
    metadata: dict[str, Value] = {
        f"{preset.architecture}.{key}": value for key, value in preset.numbers.items()
    }
    metadata["general.architecture"] = preset.architecture
    metadata["general.name"] = preset.name
    tensors = list(_tensors(preset))
    total = sum(_padded(tensor.size_bytes) for tensor in tensors)
    identity = ModelIdentity(source=f"preset {preset.aliases[0]}", digest=None, file_bytes=total)
    inventory = build_inventory(identity, metadata, ((0, tensor) for tensor in tensors))
    remarks = [preset.note] if preset.note else []
    remarks.append(f"A preset, not a file; its numbers are from {' and '.join(preset.sources)}.")
    return inventory.model_copy(update={"notes": (*inventory.notes, *remarks)})


def _tensors(preset: Preset) -> Iterator[TensorInfo]:
    layer_count = preset.numbers["block_count"]
    assert isinstance(layer_count, int)  # noqa: S101 - tells mypy what the data says
    running = layer_count - _number(preset, "nextn_predict_layers")
    offset = 0
    for name, template, layer in _named(preset, layer_count):
        mixed = template.type
        type_name = mixed if isinstance(mixed, str) else mixed.of_layer(layer, running)
        kind = TYPES_BY_NAME[type_name]
        rows = 1
        for extent in template.shape[1:]:
            rows *= extent
        size = kind.row_bytes(template.shape[0]) * rows
        yield TensorInfo(name, kind, template.shape, offset, size)
        offset += _padded(size)


def _named(preset: Preset, layer_count: int) -> Iterator[tuple[str, TensorTemplate, int]]:
    outside = [template for template in preset.tensors if "*" not in template.name]
    inside = [template for template in preset.tensors if "*" in template.name]
    for template in outside:
        yield template.name, template, 0
    of_template = [set(_layers(template.layers, layer_count)) for template in inside]
    for layer in range(layer_count):
        for template, layers in zip(inside, of_template, strict=True):
            if layer in layers:
                yield template.name.replace("*", str(layer)), template, layer


def _layers(text: str, layer_count: int) -> Iterator[int]:
    if text == EVERY_LAYER:
        yield from range(layer_count)
        return
    for part in text.split(","):
        match = _LAYER_RANGE.fullmatch(part)
        if match is None:
            raise LinkcppError(f"A preset has the layers {text!r}, which are not ranges.")
        first = int(match[1])
        yield from range(first, int(match[2] or first) + 1, int(match[3] or 1))


def _number(preset: Preset, key: str) -> int:
    value = preset.numbers.get(key, 0)
    return value if isinstance(value, int) else 0


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES


def _normal(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().casefold())


def _names(preset: Preset) -> set[str]:
    return {_normal(name) for name in (preset.name, *preset.aliases)}


def _looks_like_path(text: str) -> bool:
    return "/" in text or text.startswith(("~", ".")) or text.casefold().endswith(".gguf")


def _unknown(text: str) -> LinkcppError:
    known = {_normal(name): name for preset in presets() for name in preset.aliases}
    wanted = _normal(text)
    starting = [name for name in known if wanted and name.startswith(wanted)]
    nearest = difflib.get_close_matches(wanted, known, n=_MAX_OFFERED, cutoff=_LIKENESS)
    names = list(dict.fromkeys([*starting, *nearest]))[:_MAX_OFFERED]
    offered = ", ".join(known[name] for name in names)
    return LinkcppError(
        f"{text!r} is neither a file nor a known preset.",
        hint=(f"Did you mean {offered}? " if offered else "")
        + "`linkcpp inspect --list` shows all presets.",
    )
