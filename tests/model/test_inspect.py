"""``linkcpp inspect`` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from linkcpp.cli.inspect import bar, format_count
from tests.model import gguf_bytes as raw
from tests.support.models import gemma3, llama_parts, qwen35moe_next_token


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "linkcpp.cli.main", "inspect", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_table_tells_layers_experts_memory_and_what_is_unusual() -> None:
    shown = inspect(str(qwen35moe_next_token()))
    assert shown.returncode == 0
    for words in (
        "qwen35moe", "9: 2 attention, 6 recurrent, 1 next-token", "288 of 127 kB", "█",
        "recurrent state a sequence", "Next-token block", "Q4_K",
    ):  # fmt: skip
        assert words in shown.stdout.replace("\n", " "), words


def test_a_preset_is_shown_like_a_file() -> None:
    shown = inspect("122b")
    assert shown.returncode == 0
    assert "12,544 of 5.31 MB" in shown.stdout
    assert "77.6 GB" in shown.stdout


def test_json_is_all_that_is_on_stdout() -> None:
    shown = inspect(str(gemma3()), "--json", "-c", "1024")
    data = json.loads(shown.stdout)
    assert data["shape"]["architecture"] == "gemma3"
    assert data["memory"]["context_tokens"] == 1024
    assert "tensors" not in data
    assert len(json.loads(inspect(str(gemma3()), "--json", "--tensors").stdout)["tensors"]) > 50


def test_a_split_model_shows_its_parts() -> None:
    assert "in 3 parts" in inspect(str(llama_parts()[2])).stdout.replace("\n", " ")


def test_the_list_has_every_preset() -> None:
    names = [entry["name"] for entry in json.loads(inspect("--list", "--json").stdout)]
    assert len(names) >= 7
    shown = inspect("--list").stdout
    assert all(name.split()[0] in shown for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model to inspect"),
        (("absent.gguf",), "There is no file absent.gguf"),
        (("120B",), "Did you mean 122B"),
        (("/",), "is a folder"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], words: str
) -> None:
    shown = inspect(*arguments)
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert words in shown.stderr
    assert "hint:" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_f64_weights_get_the_hint(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    pairs = [raw.text("general.architecture", "llama"), raw.u32("llama.block_count", 1)]
    path.write_bytes(
        raw.gguf(pairs, [raw.Tensor("blk.0.attn_k.weight", (8, 8), kind=28)], data_bytes=512)
    )
    shown = inspect(str(path))
    assert shown.returncode == 2
    assert "F64" in shown.stderr
    assert "llama-quantize" in shown.stderr


def test_bars_are_as_long_as_their_share() -> None:
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 4) == "██  "
    assert bar(0.0, 4) == "    "
    assert bar(0.0001, 4).strip()


@pytest.mark.parametrize(
    ("count", "text"), [(124_635_000_000, "124.6 B"), (134_515_008, "135 M"), (999, "999")]
)
def test_parameters_are_counted_as_models_are_named(count: int, text: str) -> None:
    assert format_count(count) == text
