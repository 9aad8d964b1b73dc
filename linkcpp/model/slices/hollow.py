"""Telling a hollow model from a whole one."""

from collections.abc import Iterator

from linkcpp.model.expert_tensors import is_expert_weight
from linkcpp.model.parts import ModelFiles

_SAMPLE_BYTES = 4096


def has_no_experts(files: ModelFiles) -> bool:
    """Whether a model's experts are holes, however these were copied.

    No real expert begins with so many zeros, let alone all of them.
    """
    samples = _expert_samples(files)
    return not any(any(sample) for sample in samples)


def _expert_samples(files: ModelFiles) -> Iterator[bytes]:
    for part, tensor in files.tensors:
        if is_expert_weight(tensor.name):
            # Past the first block of the file system, which a neighbour may share.
            start = tensor.offset_bytes + min(_SAMPLE_BYTES, tensor.size_bytes // 2)
            length = min(_SAMPLE_BYTES, tensor.offset_bytes + tensor.size_bytes - start)
            yield files.sources[part].read(start, length)
