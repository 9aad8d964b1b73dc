"""What every verb relies on in a model's header, checked once for all of them. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from linkcpp.common.errors import LinkcppError
from linkcpp.model.architecture import Architecture
from linkcpp.model.expert_tensors import LARGEST_EXPERT_COUNT, is_expert_weight
from linkcpp.model.header import TensorInfo, Value
from linkcpp.model.roles import layer_and_part

# As llama.cpp names them. The name becomes part of keys, and of what people and programs read.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_architecture(
    source: str, metadata: Mapping[str, Value], tensors: Iterable[tuple[int, TensorInfo]]
) -> Architecture:
    """Return the architecture of a language model whose numbers fit its tensors.

    ``tensors`` come with the number of the file that has them.

    Raises:
        LinkcppError: it is not a language model, has no usable architecture, or its counts of
            layers or experts are not those of its tensors.
    """
    architecture = _architecture(source, metadata)
    names = [(info, layer_and_part(info.name)[0]) for _, info in tensors]
    if not names:
        raise LinkcppError(
            f"{source} has no weights.",
            hint="It is a vocabulary or a template only; give the model's own GGUF.",
        )
    _check_layers(source, architecture, {layer for _, layer in names if layer is not None})
    for info, layer in names:
        if layer is not None and is_expert_weight(info.name) and len(info.shape) == 3:
            count = architecture.layer_number("expert_count", layer, 0)
            if count != info.shape[-1]:
                raise _unsound(source, f"{count} experts, but {info.name} has {info.shape[-1]}")
    if architecture.number("expert_count", 0) > LARGEST_EXPERT_COUNT:
        raise _unsound(
            source,
            f"{architecture.number('expert_count')} experts, more than {LARGEST_EXPERT_COUNT}",
        )
    return architecture


def _architecture(source: str, metadata: Mapping[str, Value]) -> Architecture:
    kind = metadata.get("general.type", "model")
    name = metadata.get("general.architecture")
    if name == "clip" or kind == "mmproj":
        raise LinkcppError(
            f"{source} is a vision projector (mmproj), not a language model.",
            hint="Give the language model's own GGUF; the projector goes beside it.",
        )
    if kind != "model":
        raise LinkcppError(
            f"{source} is a GGUF of type {str(kind)[:40]!r}, not a language model.",
            hint="Give the GGUF of the model itself.",
        )
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise LinkcppError(
            f"{source} does not tell its architecture.",
            hint="Convert the model anew with llama.cpp's convert_hf_to_gguf.py.",
        )
    if _NAME.fullmatch(name) is None:
        raise LinkcppError(
            f"{source} names the architecture {name[:40]!r}, which is not one.",
            hint="Download the model again, or convert it anew.",
        )
    return Architecture(source, name, metadata)


def _check_layers(source: str, architecture: Architecture, layers: set[int]) -> None:
    count = architecture.number("block_count")
    # Compared before any loop over the promised count, which a damaged header may have made huge.
    if count != len(layers) or (layers and max(layers) >= count):
        raise _unsound(source, f"{count} layers, but has tensors of {len(layers)}")


def _unsound(source: str, promise: str) -> LinkcppError:
    return LinkcppError(
        f"{source} promises {promise}.",
        hint="Download all of the model again, or convert it anew.",
    )
