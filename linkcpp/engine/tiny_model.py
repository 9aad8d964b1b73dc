"""A complete llama model of a few hundred kilobytes, made here, to run an engine for real.

It is random, so its text means nothing, but it runs the same kernels as a real model: quantized
matrices in the types that CPU builds repack (``Q4_0``, ``Q8_0``), ``F16`` embeddings, and two
layers, so that one can lie on an RPC device and one in the process itself.

Format: GGUF version 3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linkcpp.common.files import write_atomically
from linkcpp.common.paths import cache_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LAYER_COUNT = 2
_WIDTH = 128
_FEED_FORWARD = 256
_HEADS = 4
_CONTEXT = 512


def tiny_model() -> Path:
    """Give the tiny model's path in the cache folder; it is written, or mended, where needed.

    Raises:
        LinkcppError: the cache folder cannot be written.
    """
    path = cache_folder() / "tiny-llama.gguf"
    content = _model_bytes()
    # Compared, not trusted: a damaged file would otherwise make every good engine look broken.
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return path


@functools.cache
def _model_bytes() -> bytes:
    # Slow imports, which the many commands that find a check in the cache do not need.
    import gguf  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="linkcpp-") as folder:
        path = Path(folder, "model.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        _add_numbers(writer)
        printable = _add_vocabulary(writer)
        _add_tensors(writer, np.random.default_rng(0), printable)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _add_numbers(writer: Any) -> None:
    writer.add_name("linkcpp engine check")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(LAYER_COUNT)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)


def _add_vocabulary(writer: Any) -> "NDArray[np.bool_]":
    """Add a SentencePiece vocabulary; tell which tokens are printable ASCII words or letters."""
    import gguf  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    kinds = gguf.TokenType
    controls = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    letters = ["\u2581", *string.ascii_letters, *string.digits, *",.!?"]
    words = [f"\u2581{word}" for word in ("the", "of", "and", "to", "in", "is", "it", "for")]
    plain = letters + words
    writer.add_tokenizer_model("llama")
    writer.add_token_list(controls + byte_tokens + plain)
    writer.add_token_scores(
        [0.0] * len(controls)
        + [-1000.0] * len(byte_tokens)
        + [-float(rank) for rank in range(len(plain))]
    )
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
        + [kinds.BYTE] * len(byte_tokens)
        + [kinds.NORMAL] * len(plain)
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    total = len(controls) + len(byte_tokens) + len(plain)
    return np.arange(total) >= len(controls) + len(byte_tokens)


def _add_tensors(
    writer: Any, random: "np.random.Generator", printable: "NDArray[np.bool_]"
) -> None:
    import gguf  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    types = gguf.GGMLQuantizationType

    def matrix(rows: int, columns: int) -> "NDArray[np.float32]":
        values = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return np.asarray(values, dtype=np.float32)

    def add(name: str, values: "NDArray[np.float32]", kind: Any) -> None:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    ones = np.ones(_WIDTH, dtype=np.float32)
    add("token_embd.weight", matrix(len(printable), _WIDTH), types.F16)
    output = matrix(len(printable), _WIDTH)
    # Rows of byte and control tokens are zero, so that they are never the likeliest: some builds
    # answer 500 when the generated text is not valid UTF-8.
    output[~printable] = 0
    add("output.weight", output, types.Q8_0)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(LAYER_COUNT):
        prefix = f"blk.{layer}"
        writer.add_tensor(f"{prefix}.attn_norm.weight", ones)
        writer.add_tensor(f"{prefix}.ffn_norm.weight", ones)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{prefix}.{name}.weight", matrix(_WIDTH, _WIDTH), types.Q8_0)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{prefix}.{name}.weight", matrix(_FEED_FORWARD, _WIDTH), types.Q4_0)
        add(f"{prefix}.ffn_down.weight", matrix(_WIDTH, _FEED_FORWARD), types.Q4_0)
