"""Floors from a model's shape, and the remembered measurement of the device."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lab.errors import UserError
from lab.metrics import probes, quiet, roofline
from lab.metrics.roofline import DeviceFacts, floors, known_device, measure_device

SMOL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "layer_windows": (None,) * 30,
}
FACTS = DeviceFacts("test", "cpu", 2, 8 << 30, 40e9, {"float32": 200e9, "bfloat16": 800e9}, "today")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lab" / "device"


def test_floors_of_smollm2_are_those_worked_out_by_hand():
    found = floors(SimpleNamespace(**SMOL), "bfloat16", FACTS)
    weights = 30 * (576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536 + 2 * 576) + 49152 * 576 + 576
    assert weights == 134_515_008  # the parameter count of the checkpoint
    assert found.weights_bytes == found.weights_read_bytes == 2 * weights
    assert found.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040
    assert found.decode_ms() == pytest.approx(2 * weights / 40e9 * 1e3)
    assert found.decode_ms(4096) == pytest.approx((2 * weights + 4096 * 23_040) / 40e9 * 1e3)
    assert found.tokens_per_s == pytest.approx(1e3 / found.decode_ms())
    assert found.ridge == 20
    assert found.max_concurrency(1000, 2 * weights + 23_040_000) == pytest.approx(1.0)
    assert found.max_concurrency(1000, weights) == 0.0


def test_layers_with_a_window_read_and_keep_no_more_than_that():
    found = floors(SimpleNamespace(**{**SMOL, "layer_windows": (100, None) * 15}), "bfloat16", FACTS)
    assert (found.seen(80), found.seen(100), found.seen(300)) == (80, 100, 200)
    read = found.weights_read_bytes + 200 * found.kv_bytes_per_token
    assert found.decode_ms(300) == pytest.approx(read / 40e9 * 1e3)
    assert found.max_concurrency(300, found.weights_bytes + 200 * found.kv_bytes_per_token) == pytest.approx(1.0)


def test_at_saturation_arithmetic_takes_as_long_as_reading_the_weights():
    found = floors(SimpleNamespace(**SMOL), "float32", FACTS)
    rows = found.batch_saturation
    assert found.step_s(int(rows * 0.9)) == found.step_s(1)
    assert found.step_s(int(rows * 2)) == pytest.approx(2 * found.step_s(1), rel=0.05)


def test_untied_embeddings_are_stored_but_not_read():
    found = floors(SimpleNamespace(**{**SMOL, "tie_word_embeddings": False}), "bfloat16", FACTS)
    assert found.weights_bytes - found.weights_read_bytes == 49152 * 576 * 2


def test_a_dtype_that_was_not_measured_is_refused():
    with pytest.raises(UserError, match="float16"):
        floors(SimpleNamespace(**SMOL), "float16", FACTS)


def test_a_measurement_is_remembered_and_measuring_again_keeps_the_higher(cache, monkeypatch):
    measured = [FACTS, DeviceFacts("test", "cpu", 2, 8 << 30, 50e9, {"float32": 100e9, "bfloat16": 900e9}, "later")]
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: measured.pop(0))
    said = []
    assert known_device() is None
    assert measure_device(log=said.append) == FACTS
    assert measure_device(log=said.append) == FACTS == known_device()
    assert len(said) == 1
    again = measure_device(again=True)
    assert (again.bandwidth, again.flops) == (50e9, {"float32": 200e9, "bfloat16": 900e9})
    assert known_device() == again
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_a_disturbed_measurement_is_made_again_until_one_was_quiet(cache, monkeypatch):
    monkeypatch.setattr(roofline, "busy_now", lambda: False)
    noisy = replace(FACTS, bandwidth=3e9, flops={"float32": 300e9, "bfloat16": 50e9}, quiet=False, busy_share=0.5)
    measured = [noisy, replace(noisy, bandwidth=2e9, measured="later"), FACTS]
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: measured.pop(0))
    said = []
    assert measure_device(log=said.append) == noisy == known_device()
    assert len(said) == 2 and "the machine was busy (50% of its processor time went elsewhere)" in said[1]
    second = measure_device(log=said.append)
    assert (second.bandwidth, second.quiet, second.measured) == (3e9, False, "today")
    assert (second.last_bandwidth, second.last_measured, second.shortfall) == (2e9, "later", pytest.approx(1 / 3))
    assert "again" in said[2] and "2.0 GB/s now; the 3.0 GB/s measured today are kept" in said[4]
    third = measure_device(log=said.append)
    assert (third.bandwidth, third.quiet) == (40e9, True)
    assert (third.last_bandwidth, third.shortfall, third.disturbance) == (None, 0.0, None)
    assert third.flops == {"float32": 300e9, "bfloat16": 800e9}
    assert measure_device(log=said.append) == third and not measured and len(said) == 6


def test_a_quiet_measurement_stays_quiet_when_a_disturbed_one_follows(cache, monkeypatch):
    measured = [FACTS, replace(FACTS, bandwidth=1e9, quiet=False, busy_share=0.9, measured="later")]
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: measured.pop(0))
    measure_device()
    kept = replace(FACTS, last_bandwidth=1e9, last_measured="later")
    assert measure_device(again=True) == kept == known_device() and not measured


def test_what_disturbed_a_measurement_is_said_with_its_figure(cache, monkeypatch):
    """A virtual machine whose speed varies is not busy, and is not called so."""
    varying = replace(FACTS, quiet=False, busy_share=0.0, spread=0.45)
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: varying)
    said = []
    measure_device(log=said.append)
    assert "speed varied (half of the repetitions were 45% or more slower than the best)" in said[1]
    assert "busy" not in said[1]
    both = replace(varying, busy_share=0.2).disturbance
    assert "busy (20% of" in both and "45%" in both
    assert replace(varying, quiet=True).disturbance is None


def test_the_threads_are_those_asked_for_or_the_usable_cores(cache, monkeypatch):
    asked = []
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: asked.append(threads) or FACTS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(roofline, "usable_cores", lambda: 7)
    measure_device()
    measure_device(threads=3)
    measure_device(threads=7)  # the default: known already
    assert asked == [7, 3]
    assert len(list(cache.iterdir())) == 2


def test_what_others_do_with_the_processor_is_seen(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(quiet, "_STAT", stat)
    monkeypatch.setattr(quiet, "_own_s", iter([0.0, 5.0]).__next__)
    monkeypatch.setattr(quiet.time, "perf_counter", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  0 0 0 7 0 0 0 0 0 0\ncpu0 1 2 3\n")
    watch = quiet.CpuWatch()
    # of 20 s on two cores: 6 in user, 2 in system, 3 taken by the host, the rest idle; the guest's are counted already
    stat.write_text(f"cpu  {6 * ticks} 0 {2 * ticks} {7 + 8 * ticks} {ticks} 0 0 {3 * ticks} {4 * ticks} 0\n")
    assert watch.busy_share() == pytest.approx((6 + 2 + 3 - 5) / 20)


@pytest.mark.parametrize("content", [None, "cpu  0 0 0 0 0 0 0 0 0 0\n"])
def test_where_the_system_does_not_tell_the_spread_decides(tmp_path, monkeypatch, content):
    monkeypatch.setattr(quiet, "_STAT", tmp_path / "stat")
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert quiet.CpuWatch().busy_share() is None
    assert quiet.is_quiet(None, 0.1) and not quiet.is_quiet(None, 0.9)
    assert quiet.is_quiet(0.02, 0.1) and not quiet.is_quiet(0.5, 0.1)


def test_a_probe_takes_the_best_repetition_and_says_how_far_the_others_were(monkeypatch):
    clock = iter([0.0, 0.0, 2.0, 9.0, 9.0, 12.0, 12.0, 12.0, 16.0, 16.0, 16.0, 19.0, 19.0])  # repetitions of 2, 3, 4, 3 s
    monkeypatch.setattr(probes.time, "perf_counter", clock.__next__)
    monkeypatch.setattr(probes, "LEAST_REPETITIONS", 1)
    monkeypatch.setattr(probes, "PROBE_SECONDS", 17.0)
    found = probes.rate_of(6.0, lambda: None)
    assert (found.best, found.spread) == (3.0, 0.5)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 0}', json.dumps({"version": 2, "facts": {"name": "x"}})])
def test_a_damaged_measurement_is_made_anew(cache, monkeypatch, content):
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: FACTS)
    measure_device()
    next(cache.iterdir()).write_text(content)
    assert known_device() is None
    assert measure_device() == FACTS


def test_measuring_this_machine_gives_possible_figures(cache, monkeypatch):
    monkeypatch.setattr("lab.metrics.probes.STREAM_BYTES", (1 << 20, 8 << 20))
    monkeypatch.setattr("lab.metrics.probes.PROBE_SECONDS", 0.01)
    facts = roofline._measure("cpu", 1)
    assert facts.bandwidth > 1e8 and all(rate > 1e8 for rate in facts.flops.values())
    assert set(facts.flops) == {"float32", "bfloat16", "float16"}
    assert facts.memory_bytes > 1 << 28 and facts.name


def test_a_disturbed_measurement_stays_while_the_machine_is_busy(cache, monkeypatch):
    """Else every run on a busy machine would pay for a measurement that is worth nothing again."""
    noisy = replace(FACTS, quiet=False, busy_share=0.5)
    measured = [noisy]
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: measured.pop())
    monkeypatch.setattr(roofline, "busy_now", lambda: True)
    assert measure_device() == noisy and not measured
    assert measure_device() == noisy
