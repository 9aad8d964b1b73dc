from hypothesis import given
from hypothesis import strategies as st

from linkcpp.launch.enginelog import (
    Buffer,
    BufferKind,
    Milestone,
    Speed,
    failure_reason,
    read_line,
)

MEBIBYTE = 2**20


def test_a_model_buffer_of_an_rpc_device_is_told_with_its_endpoint() -> None:
    line = "0.00.670.523 I load_tensors: RPC0[127.0.0.1:6051] model buffer size =    16.91 MiB"
    assert read_line(line) == Buffer(
        "RPC0", "127.0.0.1:6051", BufferKind.MODEL, round(16.91 * MEBIBYTE)
    )


def test_a_buffer_of_the_coordinator_has_no_endpoint() -> None:
    line = "0.01.016.728 I llama_context:        CPU  output buffer size =     0.19 MiB"
    assert read_line(line) == Buffer("CPU", None, BufferKind.OUTPUT, round(0.19 * MEBIBYTE))
    line = "0.00.670.521 I load_tensors:   CPU_Mapped model buffer size =    81.53 MiB"
    assert read_line(line) == Buffer("CPU_Mapped", None, BufferKind.MODEL, round(81.53 * MEBIBYTE))


def test_kv_recurrent_and_compute_buffers_are_told_apart() -> None:
    endpoint = "127.0.0.1:6053"
    for words, kind in (
        ("llama_kv_cache: RPC0[127.0.0.1:6053] KV", BufferKind.KV),
        ("llama_memory_recurrent: RPC0[127.0.0.1:6053] RS", BufferKind.RECURRENT),
        ("sched_reserve: RPC0[127.0.0.1:6053] compute", BufferKind.COMPUTE),
    ):
        fact = read_line(f"0.01.073.302 I {words} buffer size =    13.50 MiB")
        assert fact == Buffer("RPC0", endpoint, kind, round(13.5 * MEBIBYTE))


def test_speeds_of_prompt_and_answer_are_told_apart() -> None:
    prompt = (
        "0.04.911.209 I slot print_timing: id  0 | task 0 | prompt eval time =     132.25 ms /"
        "     5 tokens (   26.45 ms per token,    37.81 tokens per second)"
    )
    answer = (
        "0.04.911.248 I slot print_timing: id  0 | task 0 |        eval time =    3695.75 ms /"
        "    48 tokens (   76.99 ms per token,    12.99 tokens per second)"
    )
    assert read_line(prompt) == Speed(of_prompt=True, tokens_per_second=37.81)
    assert read_line(answer) == Speed(of_prompt=False, tokens_per_second=12.99)


def test_an_answer_of_one_token_has_no_speed_and_a_prompt_of_one_has() -> None:
    answer = (
        "0.04.911.248 I slot print_timing: id  0 | task 9 |        eval time =       0.00 ms /"
        "     1 tokens (    0.00 ms per token, 1000000.00 tokens per second)"
    )
    prompt = (
        "0.03.689.269 I slot print_timing: id  0 | task 9 | prompt eval time =      95.89 ms /"
        "     1 tokens (   95.89 ms per token,    10.43 tokens per second)"
    )
    assert read_line(answer) == Speed(of_prompt=False, tokens_per_second=None)
    assert read_line(prompt) == Speed(of_prompt=True, tokens_per_second=10.43)


def test_milestones_are_seen() -> None:
    warm_up = (
        "0.01.199.027 I cmn  common_init_: warming up the model with an empty run - please wait"
    )
    assert read_line(warm_up) is Milestone.WARMING_UP
    assert read_line("0.01.435.467 I srv  llama_server: model loaded") is Milestone.MODEL_LOADED


def test_the_total_of_the_cache_is_not_taken_for_a_buffer() -> None:
    line = "0.01.084.764 I llama_kv_cache: size =   45.00 MiB (  2048 cells,  30 layers)"
    assert read_line(line) is None


def test_the_reason_of_an_abort_is_found_among_backtraces() -> None:
    tail = (
        "0.06.169 I srv  update_slots: all slots are idle\n"
        "/src/ggml-rpc.cpp:471: Remote RPC server crashed or returned malformed response\n"
        "#1  0x00007f in futex () from /lib/libc.so.6\n"
    )
    assert failure_reason(tail) == "Remote RPC server crashed or returned malformed response"


def test_a_taken_port_is_the_reason_rather_than_the_farewell() -> None:
    tail = (
        "0.006.286 E srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 80\n"
        "0.007.466 E srv  llama_server: exiting due to HTTP server error\n"
    )
    assert failure_reason(tail) == (
        "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 80"
    )


def test_a_log_without_a_reason_gives_none() -> None:
    assert failure_reason("0.01.435 I srv  update_slots: all slots are idle\n") is None


@given(st.text(max_size=20_000))
def test_no_line_upsets_the_reader(line: str) -> None:
    fact = read_line(line)
    assert fact is None or isinstance(fact, Buffer | Speed | Milestone)
    failure_reason(line)
