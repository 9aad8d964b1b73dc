"""What an inventory says of a model's layers, roles and experts."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest

from linkcpp.cli.output import byte_bar
from linkcpp.common.errors import LinkcppError
from linkcpp.hub.weights.adding import Addition, add_model
from linkcpp.hub.weights.catalogue import Catalogue, models_folder
from linkcpp.model.architecture import Architecture
from linkcpp.model.header import Value
from linkcpp.model.inventory import read_inventory
from linkcpp.model.records import LayerKind, ModelInventory, TensorRole
from linkcpp.model.roles import Side, block_role, side
from linkcpp.model.slices.writing import open_whole_model
from linkcpp.model.state import LayerState, layer_state, recurrent_state_bytes
from linkcpp.model.summary import summarize
from tests.model import gguf_bytes as raw
from tests.support import models


@pytest.mark.parametrize("name", sorted(models.TINY_MODELS))
def test_every_weight_is_counted_once(name: str) -> None:
    path = models.TINY_MODELS[name]()
    inventory = read_inventory(path)
    expected = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    assert inventory.weight_bytes == expected
    assert sum(summarize(inventory).role_bytes.values()) == expected
    of_layers = sum(layer.weight_bytes for layer in inventory.layers)
    outside = inventory.embedding_bytes + inventory.output_bytes + inventory.other_bytes
    assert of_layers + outside - inventory.tied_bytes == expected


def test_one_expert_is_three_slabs() -> None:
    layer = read_inventory(models.qwen3moe()).layers[0]
    gate_or_up, down = 512 * 256 * 144 // 256, 256 * 512 * 210 // 256
    assert layer.expert_count == 16
    assert layer.expert_bytes == 2 * gate_or_up + down
    assert layer.role_bytes[TensorRole.EXPERT] == 16 * layer.expert_bytes


def test_an_experts_biases_belong_to_it() -> None:
    layer = read_inventory(models.gpt_oss()).layers[0]
    assert layer.expert_bytes == 3 * (256 * 256 * 17 // 32 + 256 * 4)


@pytest.mark.slow
def test_a_hybrid_tells_its_kinds_of_layers_apart() -> None:
    inventory = read_inventory(models.qwen35moe_next_token())
    assert [layer.kind for layer in inventory.layers] == (
        [*[LayerKind.RECURRENT] * 3, LayerKind.ATTENTION] * 2 + [LayerKind.NEXT_TOKEN]
    )
    recurrent = inventory.layers[0].role_bytes
    assert TensorRole.ATTENTION not in recurrent
    assert recurrent[TensorRole.RECURRENT] > 0
    assert any("Next-token block" in note for note in inventory.notes)


def test_windows_latent_attention_and_tied_embeddings_are_noted() -> None:
    gemma, deepseek = read_inventory(models.gemma3()), read_inventory(models.deepseek2())
    assert [layer.window_tokens for layer in gemma.layers] == [128] * 5 + [None, 128]
    assert gemma.output_is_tied
    assert gemma.tied_bytes == gemma.embedding_bytes
    assert {"Tied", "Sliding"} <= {note.split()[0] for note in gemma.notes}
    assert any("Latent attention" in note for note in deepseek.notes)
    assert deepseek.layers[0].expert_count == 0
    assert deepseek.layers[1].role_bytes[TensorRole.SHARED_EXPERT] > 0


ROLES = {
    "attn_q.weight": TensorRole.ATTENTION,
    "attn_kv_a_mqa.weight": TensorRole.ATTENTION,
    "attn_sinks.weight": TensorRole.ATTENTION,
    "attn_q_norm.weight": TensorRole.NORM,
    "post_attention_norm.weight": TensorRole.NORM,
    "ffn_norm.weight": TensorRole.NORM,
    "ffn_norm_exps.weight": TensorRole.NORM,
    "post_ffw_norm_1.weight": TensorRole.NORM,
    "ffn_gate_inp.weight": TensorRole.ROUTER,
    "exp_probs_b.bias": TensorRole.ROUTER,
    "ffn_gate_inp_shexp.weight": TensorRole.SHARED_EXPERT,
    "ffn_down_shexp.weight": TensorRole.SHARED_EXPERT,
    "ffn_gate_up_exps.weight": TensorRole.EXPERT,
    "ffn_down_exps.bias": TensorRole.EXPERT,
    "ffn_up_exps.scale": TensorRole.EXPERT,
    "ffn_up_chexps.weight": TensorRole.EXPERT,
    "ffn_down.weight": TensorRole.FEED_FORWARD,
    "ssm_a": TensorRole.RECURRENT,
    "ssm_norm.weight": TensorRole.RECURRENT,
    "time_mix_key.weight": TensorRole.RECURRENT,
    "shortconv.conv.weight": TensorRole.RECURRENT,
    "nextn.eh_proj.weight": TensorRole.OTHER,
    "something_new.weight": TensorRole.OTHER,
}


@pytest.mark.parametrize("part", sorted(ROLES))
def test_a_tensors_role_follows_from_its_name(part: str) -> None:
    assert block_role(part) is ROLES[part]


@pytest.mark.parametrize(
    ("name", "architecture", "where"),
    [
        ("token_embd.weight", "llama", Side.INPUT),
        ("token_embd_norm.weight", "bloom", Side.INPUT),
        ("token_embd_norm.weight", "lfm2", Side.OUTPUT),
        ("per_layer_token_embd.weight", "gemma4", Side.INPUT),
        ("output.weight", "llama", Side.OUTPUT),
        ("output_norm.weight", "llama", Side.OUTPUT),
        ("rope_freqs.weight", "llama", Side.EVERY_DEVICE),
        ("rope_factors_long.weight", "phi3", Side.EVERY_DEVICE),
    ],
)
def test_a_tensor_outside_the_blocks_has_its_place(
    name: str, architecture: str, where: Side
) -> None:
    assert side(name, architecture) is where


def architecture(name: str, **numbers: Value) -> Architecture:
    metadata: dict[str, Value] = {
        f"{name}.{key.replace('__', '.')}": value for key, value in numbers.items()
    }
    return Architecture("model.gguf", name, metadata)


# f32 elements by the formulas of llama-hparams.cpp, worked out by hand.
STATES = {
    "mamba": (architecture(
        "mamba", embedding_length=64, ssm__inner_size=128, ssm__state_size=16, ssm__conv_kernel=4,
    ), 3 * 128 + 16 * 128),
    "mamba2": (architecture(
        "mamba2", embedding_length=64, ssm__inner_size=128, ssm__state_size=16,
        ssm__conv_kernel=4, ssm__group_count=2,
    ), 3 * (128 + 2 * 2 * 16) + 16 * 128),
    "lfm2": (architecture("lfm2", embedding_length=64, shortconv__l_cache=3), 64 * 2),
    "rwkv7": (architecture("rwkv7", embedding_length=64, wkv__head_size=16), 2 * 64 + 64 * 16),
    "kimi-linear": (architecture(
        "kimi-linear", embedding_length=64, kda__head_dim=8, attention__head_count=4,
        ssm__conv_kernel=4,
    ), 3 * 3 * 32 + 32 * 8),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(STATES))
def test_the_recurrent_state_of_other_families_follows_the_formula(name: str) -> None:
    numbers, elements = STATES[name]
    assert recurrent_state_bytes(numbers) == 4 * elements


def windows(numbers: Architecture, count: int) -> list[int | None]:
    return [
        layer_state(numbers, layer, has_keys=True, has_recurrence=False).window_tokens
        for layer in range(count)
    ]


def attention(name: str, **numbers: Value) -> Architecture:
    usual: dict[str, Value] = {
        "block_count": 4, "embedding_length": 64, "attention__head_count": 4,
    }  # fmt: skip
    return architecture(name, **{**usual, **numbers})


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (attention("cohere2", attention__sliding_window=9), [9, 9, 9, None]),
        (attention("smallthinker", attention__sliding_window=9), [None, 9, 9, 9]),
        (attention("gemma2"), [4096, None, 4096, None]),
        (attention("exaone4", attention__sliding_window=9), [None] * 4),
        (
            attention(
                "new", attention__sliding_window=9,
                attention__sliding_window_pattern=(False, True, True, False),
            ),
            [None, 9, 9, None],
        ),
        (
            attention(
                "new", attention__sliding_window=9, attention__sliding_window_pattern=2,
            ),
            [9, None, 9, None],
        ),
        (attention("new", attention__sliding_window=9), [None] * 4),
        (attention("phi3", attention__sliding_window=9), [None] * 4),
        (attention("llama"), [None] * 4),
    ],
)  # fmt: skip
def test_which_layers_slide_follows_the_architecture(
    numbers: Architecture, expected: Sequence[int | None]
) -> None:
    assert windows(numbers, 4) == list(expected)


def test_numbers_may_differ_from_layer_to_layer() -> None:
    numbers = attention(
        "jamba",
        attention__head_count_kv=(0, 2, 0, 2),
        ssm__inner_size=8,
        ssm__state_size=2,
        ssm__conv_kernel=2,
    )
    assert layer_state(numbers, 1, has_keys=True, has_recurrence=False) == LayerState(32, 32)
    assert layer_state(numbers, 0, has_keys=False, has_recurrence=True) == LayerState(
        recurrent_state_bytes=4 * (8 + 16)
    )


def test_attention_beside_recurrence_keeps_both() -> None:
    numbers = attention("falcon-h1", ssm__inner_size=8, ssm__state_size=2, ssm__conv_kernel=2)
    state = layer_state(numbers, 0, has_keys=True, has_recurrence=True)
    assert state.key_width == 64
    assert state.recurrent_state_bytes > 0


def test_layers_that_share_a_cache_have_none_of_their_own() -> None:
    numbers = attention("gemma3n", attention__sliding_window=9, attention__shared_kv_layers=1)
    kept = [layer_state(numbers, i, has_keys=True, has_recurrence=False) for i in (2, 3)]
    assert [state.key_width for state in kept] == [64, 0]


def take_stock(
    tmp_path: Path, pairs: Sequence[bytes], tensors: Sequence[raw.Tensor]
) -> ModelInventory:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.gguf(pairs, tensors, data_bytes=4096))
    return read_inventory(path)


LLAMA = [
    raw.text("general.architecture", "llama"),
    raw.u32("llama.block_count", 1),
    raw.u32("llama.embedding_length", 8),
    raw.u32("llama.attention.head_count", 2),
]
BLOCK = raw.Tensor("blk.0.attn_k.weight", (8, 8))
REFUSED: dict[str, tuple[list[bytes], list[raw.Tensor], str]] = {
    "a projector": ([raw.text("general.architecture", "clip")], [BLOCK], "vision projector"),
    "an adapter": (
        [raw.text("general.architecture", "llama"), raw.text("general.type", "adapter")],
        [BLOCK],
        "type 'adapter'",
    ),
    "no architecture": ([raw.u32("a", 1)], [BLOCK], "does not tell its architecture"),
    "a vocabulary": (LLAMA, [], "has no weights"),
    "F64 weights": (LLAMA, [raw.Tensor("blk.0.attn_k.weight", (8, 8), kind=28)], "F64"),
    "no layer count": (LLAMA[:1], [BLOCK], r"llama\.block_count: it is missing"),
    "a layer too few": (LLAMA, [raw.Tensor("output.weight", (8, 8))], "promises 1 layers"),
    "a layer too many": (
        LLAMA,
        [BLOCK, raw.Tensor("blk.1.attn_k.weight", (8, 8), offset=256)],
        "promises 1 layers, but has tensors of 2",
    ),
    "billions of layers": (
        [LLAMA[0], raw.u32("llama.block_count", 2**31 - 1), *LLAMA[2:]],
        [BLOCK],
        "promises 2147483647 layers",
    ),
    "a width of nothing": (
        [*LLAMA[:2], raw.u32("llama.embedding_length", 0), LLAMA[3]],
        [BLOCK],
        r"llama\.embedding_length: 0 is not a sensible number",
    ),
    "no number of heads": (LLAMA[:3], [BLOCK], r"llama\.attention\.head_count: it is missing"),
    "no heads": (
        [*LLAMA[:3], raw.u32("llama.attention.head_count", 0)],
        [BLOCK],
        r"llama\.attention\.head_count: 0 is not a sensible number",
    ),
    "a number that is text": (
        [*LLAMA[:2], raw.text("llama.embedding_length", "many"), LLAMA[3]],
        [BLOCK],
        r"llama\.embedding_length: many is not a sensible number",
    ),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_llama_cpp_could_not_run_is_refused_by_name(tmp_path: Path, what: str) -> None:
    pairs, tensors, words = REFUSED[what]
    with pytest.raises(LinkcppError, match=words) as caught:
        take_stock(tmp_path, pairs, tensors)
    assert caught.value.hint


EXPERTS = raw.Tensor("blk.0.ffn_up_exps.weight", (8, 8, 4), offset=256)
UNSOUND: dict[str, tuple[list[bytes], list[raw.Tensor], str]] = {
    "an architecture that is a path": (
        [raw.text("general.architecture", "../../etc"), *LLAMA[1:]],
        [BLOCK],
        r"'\.\./\.\./etc', which is not one",
    ),
    "more layers than a number has": (
        [LLAMA[0], raw.u32("llama.block_count", 2**32 - 1), *LLAMA[2:]],
        [BLOCK],
        r"block_count: 4294967295 is not a sensible number",
    ),
    "more experts than a number has": (
        [*LLAMA, raw.u32("llama.expert_count", 2**32 - 1)],
        [BLOCK, EXPERTS],
        r"expert_count: 4294967295 is not a sensible number",
    ),
    "many experts and none of them": (
        [*LLAMA, raw.u32("llama.expert_count", 2**31 - 1)],
        [BLOCK],
        "promises 2147483647 experts",
    ),
    "other experts than its tensors": (
        [*LLAMA, raw.u32("llama.expert_count", 5)],
        [BLOCK, EXPERTS],
        r"promises 5 experts, but blk\.0\.ffn_up_exps\.weight has 4",
    ),
}


@pytest.mark.parametrize("what", sorted(UNSOUND))
def test_all_verbs_refuse_the_same_headers(tmp_path: Path, what: str) -> None:
    pairs, tensors, words = UNSOUND[what]
    with pytest.raises(LinkcppError, match=words) as inspected:
        take_stock(tmp_path, pairs, tensors)
    model = tmp_path / "model.gguf"
    catalogue = Catalogue(models_folder(tmp_path / "hub"))
    added = Addition(location=str(model), name="m", copies=False, unix_time=0)
    for use in (lambda: open_whole_model(model), lambda: add_model(catalogue, added, byte_bar)):
        with pytest.raises(LinkcppError) as refused:
            use()
        assert refused.value.message == inspected.value.message
    assert not (tmp_path / "hub").exists()


def test_a_name_cannot_move_the_cursor(tmp_path: Path) -> None:
    named = [*LLAMA, raw.text("general.name", "\x1b[2JModel\n\u202eX")]
    assert take_stock(tmp_path, named, [BLOCK]).name == "[2JModelX"


def test_a_model_without_a_name_is_named_by_its_file(tmp_path: Path) -> None:
    assert take_stock(tmp_path, LLAMA, [BLOCK]).name == "model"


def test_an_inventory_survives_json() -> None:
    inventory = read_inventory(models.qwen35moe())
    assert ModelInventory.model_validate_json(inventory.model_dump_json()) == inventory
