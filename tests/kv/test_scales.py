"""Quantized KV caches through the engine: capacity, where scales come from, and what is refused."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab import SamplingParams
from lab.errors import UserError
from lab.kv.scales import Ranges
from plugins.attention._quantized import fixed_scales
from tests import rigs
from tests.engine.models import open_llm

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 256 for j in range(50)]} for i in range(6)]
ASK = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
FP8 = "cache.dtype=fp8"
INT8 = "cache.dtype=int8"


@pytest.fixture
def folder(tmp_path):
    return rigs.mix(tmp_path / "model")


def logits(folder, *overrides, attention="eager"):
    """All logits of the prompts but the last one of each, in float32; every key and value was read back from the cache."""
    taken = []

    def keeping(name, call):
        def run(*args):
            found = call(*args)
            if isinstance(found, torch.Tensor) and found.is_floating_point():
                taken.append(found)
            return found

        return run if name == "lm_head" else call

    with open_llm(folder, "scheduler.async_scheduling=false", *overrides, attention=attention) as llm:
        llm.engine.watch(lambda _, call: call, keeping)
        llm.generate(PROMPTS, ASK)
        return torch.cat(taken)


def backends_and_caches(llm):
    runner = llm.engine._executor._runner
    return runner.forward.backends, runner.store.layers


def fixed_scales_of(backend, cache):
    return backend._fixed(cache) if hasattr(backend, "_fixed") else fixed_scales(cache, backend.spec.num_kv_heads)


def add_scales(folder, scales):
    path = folder / "model.safetensors"
    save_file(load_file(path) | scales, path)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.02), ("fp8", 0.1)])
def test_logits_stay_close_to_those_of_the_full_cache(folder, attention, dtype, bound):
    full = logits(folder)
    found = logits(folder, f"cache.dtype={dtype}", attention=attention)
    off = (found - full).square().mean().sqrt() / full.std()
    assert found.shape == full.shape and len(full) > 290
    assert 1e-4 < off < bound


@pytest.mark.parametrize(
    ("attention", "dtype", "scales", "times"),
    [
        ("eager", "int8", "token_head", 64 / 34),  # head dim 32 would be 64 bytes in bfloat16, and is 32 and a scale
        ("sdpa", "fp8", "token_head", 64 / 34),
        ("flash", "int8", "token_head", 64 / 34),
        ("flash", "fp8", "one", 2),
    ],
)
def test_the_same_bytes_hold_about_twice_the_tokens(tmp_path, caplog, attention, dtype, scales, times):
    caplog.set_level(logging.INFO, "lab")
    folder = rigs.mix(tmp_path / "model", "qwen3")
    memory = ["model.dtype=bfloat16", "cache.num_blocks=null", "cache.memory_bytes=10000000"]
    tokens = []
    for overrides in ([], [f"cache.dtype={dtype}", f"cache.scales={scales}"]):
        with open_llm(folder, *memory, *overrides, attention=attention) as llm:
            kv = llm.metrics()["kv"]
            tokens.append(kv["num_blocks"] * 16)
            assert f"KV cache: {tokens[-1]:,} tokens" in caplog.text
            assert (f"GiB ({times:.2f} times those of bfloat16)" in caplog.text) == bool(overrides)
            _, caches = backends_and_caches(llm)
            assert sum(cache.nbytes for cache in caches) <= 10_000_000 * 1.01
    assert tokens[1] / tokens[0] == pytest.approx(times, rel=0.01)


class TestCheckpointScales:
    NAMES = (
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    )

    def scales(self, names, k, v):
        return {f"model.layers.{i}.{name}": x * (1 + i) for i in (0, 1) for name, x in zip(names, (k, v), strict=True)}

    @pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
    @pytest.mark.parametrize("attention", ["eager", "flash"])
    def test_they_reach_the_cache_of_each_layer(self, folder, names, attention):
        add_scales(folder, self.scales(names, torch.tensor(0.02), torch.tensor([0.01, 0.03])))
        with open_llm(folder, FP8, "cache.scales=checkpoint", attention=attention) as llm:
            for layer, (backend, cache) in enumerate(zip(*backends_and_caches(llm), strict=True)):
                wanted = torch.tensor([[0.02, 0.02], [0.01, 0.03]]) * (1 + layer)
                assert backend.spec.kv_scales == "head"
                assert torch.equal(fixed_scales_of(backend, cache), wanted)

    def test_layers_still_share_a_backend(self, folder):
        add_scales(folder, self.scales(self.NAMES[0], torch.tensor([0.02]), torch.tensor([0.02])))
        with open_llm(folder, FP8, "cache.scales=checkpoint", attention="eager") as llm:
            backends, _ = backends_and_caches(llm)
            assert len(backends) == 2 and backends[0] is backends[1]

    def test_the_model_loads_without_using_them(self, folder):
        before = logits(folder)
        add_scales(folder, self.scales(self.NAMES[0], torch.tensor(0.02), torch.tensor(0.03)))
        assert torch.equal(logits(folder), before)

    @pytest.mark.parametrize(
        ("scales", "message"),
        [
            ({"model.layers.0.self_attn.k_scale": torch.tensor(0.1)}, "'model.layers.0.self_attn.v_scale' is missing"),
            (
                {f"model.layers.0.self_attn.{half}_scale": torch.ones(3) for half in "kv"},
                "of shape [3] must be one positive scale, or one for each of 2 KV heads",
            ),
            ({f"model.layers.0.self_attn.{half}_scale": torch.tensor(-1.0) for half in "kv"}, "must be one positive scale"),
        ],
    )
    def test_wrong_ones_are_refused(self, folder, scales, message):
        add_scales(folder, scales)
        with pytest.raises(UserError) as refusal:
            open_llm(folder)
        assert message in str(refusal.value)

    def test_of_another_dtype_or_not_there(self, folder):
        with pytest.raises(UserError, match=r"has no scales of keys and values(.|\n)*Available: token_head, one"):
            open_llm(folder, FP8, "cache.scales=checkpoint")
        add_scales(folder, self.scales(self.NAMES[0], torch.tensor(0.02), torch.tensor(0.03)))
        with pytest.raises(UserError, match=r"made for fp8\. Set cache\.dtype=fp8\."):
            open_llm(folder, INT8, "cache.scales=checkpoint")


class TestRanges:
    RANGES = Ranges("some-model", 100, [[12.7, 25.4], [12.7, 12.7]], [[1.27], [2.54]])

    def test_a_file_gives_the_scales_of_either_dtype(self, folder, tmp_path):
        self.RANGES.write(tmp_path / "ranges.json")
        for dtype, largest in ((INT8, 127), (FP8, 448)):
            with open_llm(folder, dtype, f"cache.scales={tmp_path / 'ranges.json'}", attention="sdpa") as llm:
                (backend, _), caches = backends_and_caches(llm)
                for cache, wanted in zip(caches, ([[12.7, 25.4], [1.27, 1.27]], [[12.7, 12.7], [2.54, 2.54]]), strict=True):
                    assert torch.allclose(fixed_scales_of(backend, cache) * largest, torch.tensor(wanted))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"keys": [[1.0, 2.0]], "values": [[1.0]]}, "of some-model: it has ranges of 1 layers, this model has 2."),
            ({"keys": [[1.0] * 3] * 2}, "layer 0 has ranges of 3 KV heads, this model has 2."),
            ({"keys": [["x"], [1.0]]}, "damaged"),
            ({"keys": [[float("nan")], [1.0]]}, "must be lists of numbers that are finite and not negative"),
            ({"format": "else"}, "not a file of KV ranges"),
            ({"more": 1}, "damaged"),
        ],
    )
    def test_a_wrong_file_is_refused(self, folder, tmp_path, change, message):
        path = tmp_path / "ranges.json"
        self.RANGES.write(path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(UserError) as refusal:
            open_llm(folder, INT8, f"cache.scales={path}")
        assert message in str(refusal.value)

    def test_no_file(self, folder):
        with pytest.raises(UserError, match=r"cache\.scales=tokenhead: No such file(.|\n)*Available: token_head, checkpoint"):
            open_llm(folder, INT8, "cache.scales=tokenhead")


def test_scales_without_a_quantized_cache_are_refused(folder):
    with pytest.raises(UserError, match=r"cache\.dtype=auto has no scales\. Set cache\.dtype=int8 or fp8"):
        open_llm(folder, "cache.scales=token_head")


def test_scale_one_warns_once(folder, caplog):
    with open_llm(folder, FP8, "cache.scales=one", attention="eager"):
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "values over 448 are clipped" in warnings[0].message


def test_blocks_of_other_scales_have_other_names(folder):
    """The prefix cache's names cover the dtype and where its scales are from."""
    hashers = []
    for overrides in ([], [INT8], [FP8], [FP8, "cache.scales=token_head"], [FP8, "cache.scales=one"]):
        with open_llm(folder, *overrides, attention="eager") as llm:
            hashers.append(llm.engine.blocks._hasher.root(None))
    assert len(set(hashers)) == len(hashers)
