"""Predicted sizes against what llama-server allocates: equal to the 0.01 MiB that it logs."""

from pathlib import Path

import pytest

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.records import EngineLocation
from linkcpp.model.inventory import read_inventory
from linkcpp.model.memory import (
    coordinator_weight_bytes,
    kv_bytes,
    padded_cells,
    recurrent_bytes,
    window_weight_bytes,
)
from linkcpp.model.records import LayerKind, ModelInventory
from tests.model.server_log import BufferSizes, buffer_sizes, mib, rpc_server
from tests.support.models import (
    TINY_MODELS,
    gemma3,
    llama_parts,
    qwen35moe_next_token,
    smollm2_path,
)

MODELS = {**TINY_MODELS, "smollm2": smollm2_path}


def predicted_cache(
    inventory: ModelInventory,
    *,
    context: int,
    parallel: int = 1,
    key_type: str = "f16",
    value_type: str = "f16",
    ubatch: int = 512,
) -> list[str]:
    """The lines of the log: full attention first, then sliding layers, where there are any."""
    sizes = {
        sliding: sum(
            kv_bytes(
                layer,
                context_tokens=context,
                parallel=parallel,
                cache_type_k=key_type,
                cache_type_v=value_type,
                ubatch_tokens=ubatch,
            )
            for layer in inventory.layers
            if (layer.window_tokens is not None) == sliding
        )
        for sliding in (False, True)
    }
    return [mib(size) for size in sizes.values() if size]


def predicted_state(inventory: ModelInventory, *, parallel: int = 1) -> list[str]:
    size = sum(recurrent_bytes(layer, parallel=parallel) for layer in inventory.layers)
    return [mib(size)] if size else []


def loads_next_token(sizes: BufferSizes) -> bool:
    """Newer builds say that they ignore the block's tensors."""
    return "nextn.eh_proj.weight (size" not in sizes.log


@pytest.mark.parametrize("name", sorted(MODELS))
def test_weights_cache_and_state_are_as_predicted(engine: EngineLocation, name: str) -> None:
    path: Path = MODELS[name]()
    inventory = read_inventory(path)
    real = buffer_sizes(engine, path, "-c", "4096", "-np", "1")
    weights = coordinator_weight_bytes(inventory, inventory.layers, holds_output=True)
    assert real.model == {"CPU": [mib(weights)]}
    assert real.cache.get("CPU", []) == predicted_cache(inventory, context=4096)
    assert real.state.get("CPU", []) == predicted_state(inventory)


@pytest.mark.parametrize("name", ["gemma3", "qwen35moe", "deepseek2", "gpt-oss", "llama"])
def test_several_sequences_of_an_odd_context_are_as_predicted(
    engine: EngineLocation, name: str
) -> None:
    path = MODELS[name]()
    inventory = read_inventory(path)
    real = buffer_sizes(engine, path, "-c", str(3 * 1100), "-np", "3", "-ub", "256")
    assert real.cache["CPU"] == predicted_cache(inventory, context=1100, parallel=3, ubatch=256)
    assert real.state.get("CPU", []) == predicted_state(inventory, parallel=3)


@pytest.mark.parametrize(
    ("key_type", "value_type"), [("q8_0", "q8_0"), ("q4_0", "q5_1"), ("f32", "bf16")]
)
def test_cache_types_are_as_predicted(
    engine: EngineLocation, key_type: str, value_type: str
) -> None:
    path = MODELS["qwen3moe"]()
    real = buffer_sizes(
        engine, path, "-c", "2048", "-np", "1", "-fa", "on", "-ctk", key_type, "-ctv", value_type
    )
    assert real.cache["CPU"] == predicted_cache(
        read_inventory(path), context=2048, key_type=key_type, value_type=value_type
    )


def test_a_split_model_loads_as_predicted(engine: EngineLocation) -> None:
    inventory = read_inventory(llama_parts()[0])
    real = buffer_sizes(engine, llama_parts()[0], "-c", "256", "-np", "1")
    weights = coordinator_weight_bytes(inventory, inventory.layers, holds_output=True)
    assert real.model == {"CPU": [mib(weights)]}


@pytest.mark.parametrize("on_device", [0, 1, 3, 8])
def test_a_tied_embedding_is_loaded_again_where_the_output_is(
    engine: EngineLocation, on_device: int
) -> None:
    inventory = read_inventory(gemma3())
    with rpc_server(engine) as address:
        real = buffer_sizes(
            engine, gemma3(), "--rpc", address, "--device", "RPC0", "-c", "256", "-np", "1",
            "-ngl", str(on_device),
        )  # fmt: skip
    # The output counts as the last layer: the first to go to the device.
    border = len(inventory.layers) - max(on_device - 1, 0)
    device = window_weight_bytes(inventory, inventory.layers[border:], holds_output=on_device > 0)
    here = coordinator_weight_bytes(
        inventory, inventory.layers[:border], holds_output=on_device == 0
    )
    assert real.model.get("RPC0") == ([mib(device)] if on_device else None)
    assert real.model["CPU"] == [mib(here)]


def test_a_next_token_block_counts_as_a_layer_and_has_no_cache(engine: EngineLocation) -> None:
    inventory = read_inventory(qwen35moe_next_token())
    assert [layer.kind for layer in inventory.layers[-2:]] == [
        LayerKind.ATTENTION,
        LayerKind.NEXT_TOKEN,
    ]
    with rpc_server(engine) as address:
        real = buffer_sizes(
            engine, qwen35moe_next_token(), "--rpc", address, "--device", "RPC0", "-c", "256",
            "-np", "1", "-ngl", "3",
        )  # fmt: skip
    # -ngl 3: the output, the next-token block, and one layer that runs.
    assert real.layers_and_output == len(inventory.layers) + 1
    loaded = loads_next_token(real)
    device = window_weight_bytes(
        inventory, inventory.layers[-2:], holds_output=True, loads_next_token=loaded
    )
    assert real.model["RPC0"] == [mib(device)]
    assert real.cache["RPC0"] == [mib(kv_bytes(inventory.layers[-2], context_tokens=256))]
    assert kv_bytes(inventory.layers[-1], context_tokens=256) == 0


def test_cells_are_padded_to_256() -> None:
    assert [padded_cells(tokens) for tokens in (1, 256, 257)] == [256, 256, 512]


def test_a_cache_type_that_does_not_fit_the_width_is_refused() -> None:
    layer = read_inventory(TINY_MODELS["llama"]()).layers[0].model_copy(update={"key_width": 40})
    with pytest.raises(LinkcppError, match="whole number of Q8_0 blocks") as caught:
        kv_bytes(layer, context_tokens=256, cache_type_k="q8_0")
    assert caught.value.hint == "Choose f16 for the K and V cache."
    with pytest.raises(LinkcppError, match="no element type 'q9_9'"):
        kv_bytes(layer, context_tokens=256, cache_type_v="q9_9")
