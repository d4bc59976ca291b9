"""Floors from a model's shape, and the remembered measurement of the device."""

import json
from types import SimpleNamespace

import pytest

from lab.errors import UserError
from lab.metrics import roofline
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
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind: measured.pop(0))
    said = []
    assert known_device() is None
    assert measure_device(log=said.append) == FACTS
    assert measure_device(log=said.append) == FACTS == known_device()
    assert len(said) == 1
    again = measure_device(again=True)
    assert (again.bandwidth, again.flops) == (50e9, {"float32": 200e9, "bfloat16": 900e9})
    assert known_device() == again
    assert [path.suffix for path in cache.iterdir()] == [".json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 0}', json.dumps({"version": 1, "facts": {"name": "x"}})])
def test_a_damaged_measurement_is_made_anew(cache, monkeypatch, content):
    monkeypatch.setattr(roofline, "_measure_apart", lambda kind: FACTS)
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
