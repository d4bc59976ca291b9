"""The summary's tables."""

import io

import pytest

from lab.report.table import headline, latency_rows, milliseconds, plain_table, print_summary, size

METRICS = {
    "num_requests": 12,
    "num_failed": 2,
    "prompt_tokens": 12345,
    "output_tokens": 640,
    "duration_s": 2.5,
    "output_tok_per_s": 256.0,
    "requests_per_s": 4.0,
    "ttft_ms": {"mean": 12.3, "p50": 9.99, "p90": 99.95, "p99": 1234.0, "max": 180000.0},
}


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.0, "0 us"), (0.25, "250 us"), (1.0, "1.00 ms"), (9.99, "9.99 ms"), (12.34, "12.3 ms"), (99.96, "100 ms")]
    + [(999.4, "999 ms"), (999.6, "1.00 s"), (12345.0, "12.35 s"), (119_600.0, "2.0 min")],
)
def test_times_have_the_unit_that_fits(ms, text):
    assert milliseconds(ms) == text


@pytest.mark.parametrize(("count", "text"), [(512, "512 B"), (2048, "2 KiB"), (5 << 20, "5 MiB"), (3 << 29, "1.50 GiB")])
def test_sizes_are_binary(count, text):
    assert size(count) == text


def test_only_what_the_run_has_is_shown():
    assert [name for name, _ in headline(METRICS)] == ["requests", "tokens", "duration", "throughput"]
    assert headline(METRICS)[0] == ("requests", "12, 2 failed")
    assert latency_rows(METRICS) == [["TTFT", "12.3 ms", "9.99 ms", "100 ms", "1.23 s", "3.0 min"]]


@pytest.mark.parametrize(("share", "told"), [(None, False), (0.04, False), (0.31, True)])
def test_a_machine_that_was_busy_during_the_run_is_told(share, told):
    rows = dict(headline(METRICS if share is None else {**METRICS, "others_cpu_share": share}))
    assert ("machine" in rows) == told
    if told:
        assert rows["machine"].startswith("busy: other processes took 31% of the CPU during the run")


@pytest.mark.parametrize(
    ("quiet", "text"),
    [
        (True, "6.00 ms, 1.50 times its floor of 4.00 ms"),
        (
            False,
            "6.00 ms; the floor is a guess (4.00 ms): its measurement was disturbed, `lab roofline --measure` makes another",
        ),
    ],
)
def test_a_floor_from_a_busy_machine_is_called_a_guess(quiet, text):
    roofline = {"decode_step_ms": 6.0, "decode_floor_ms": 4.0, "floor_ratio": 1.5, "quiet": quiet}
    roofline["disturbance"] = None if quiet else "the machine was busy"
    assert ("decode step", text) in headline({**METRICS, "roofline": roofline})


def test_a_machine_that_was_slower_of_late_is_said_to_be():
    roofline = {"decode_step_ms": 6.0, "decode_floor_ms": 4.0, "floor_ratio": 1.5, "quiet": True, "shortfall": 0.2}
    ((_, text),) = [row for row in headline({**METRICS, "roofline": roofline}) if row[0] == "decode step"]
    assert text.endswith("; when last measured, the memory was 20% slower than that floor supposes")


@pytest.mark.parametrize(
    ("stored", "text"),
    [(257, "weights 257 MiB"), (311, "weights 311 MiB (as stored for computing; the parameters are 257 MiB)")],
)
def test_weights_that_are_packed_say_so(stored, text):
    memory = {"peak_rss_bytes": 1 << 30, "weights_bytes": stored << 20, "parameter_bytes": 257 << 20}
    assert ("memory", f"peak of this process 1.00 GiB; {text}") in headline({**METRICS, "memory": memory})


def test_memory_of_the_process_and_of_the_gpu_are_told_apart():
    memory = {"peak_rss_bytes": 1 << 30, "peak_device_bytes": 5 << 30, "weights_bytes": 257, "parameter_bytes": 257}
    assert dict(headline({**METRICS, "memory": memory}))["memory"] == (
        "peak of this process 1.00 GiB, of its tensors on the GPU 5.00 GiB; weights 257 B"
    )


def test_the_cache_is_told_in_blocks_and_in_bytes():
    kv = {"peak_used_blocks": 150, "num_blocks": 50_000, "bytes_per_block": 1 << 18}
    assert ("KV cache", "peak 150 of 50,000 blocks (0.3%), 38 MiB") in headline({**METRICS, "kv": kv})


@pytest.mark.parametrize(("num_steps", "told"), [(1, True), (2, False)])
def test_equal_ttfts_are_explained_where_one_step_brought_all_first_tokens(num_steps, told):
    stream = io.StringIO()
    print_summary({**METRICS, "num_first_token_steps": num_steps}, stream)
    assert ("came in the same step" in stream.getvalue()) == told


def test_a_single_request_needs_no_such_word():
    stream = io.StringIO()
    print_summary({**METRICS, "num_requests": 3, "num_first_token_steps": 1}, stream)
    assert "the same step" not in stream.getvalue()


def test_plain_columns_line_up():
    assert plain_table([["a", "bbb", "c"], ["dddd", "e", "f"]]) == "a     bbb  c\ndddd  e    f"


def test_elsewhere_than_on_a_terminal_the_summary_is_plain():
    stream = io.StringIO()
    print_summary(METRICS, stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "requests    12, 2 failed" and "\x1b" not in stream.getvalue()
    assert lines[-1].split()[0] == "TTFT"
