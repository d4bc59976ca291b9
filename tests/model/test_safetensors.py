"""Loading safetensors: shards, dtypes, and every way in which a checkpoint can be wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab import registry
from lab.errors import UserError
from lab.model.config import read_config
from lab.model.load import weights_bytes
from tests import rigs
from tests.model import dense

ROOT = Path(rigs.__file__).parents[1]
IDS = list(range(30))
DOWN = "model.layers.1.mlp.down_proj.weight"


def rewrite(folder, change):
    """Let `change` edit the tensors of model.safetensors."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def shard(folder):
    """Split model.safetensors in two with an index. Returns the tensors' places."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    names = sorted(weights)
    places = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        save_file({name: weights[name] for name in names if places[name] == place}, folder / place)
    path.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_shards_equal_one_file(tmp_path):
    expected = dense.logits_of(dense.load(rigs.mix(tmp_path)), IDS)
    shard(tmp_path)
    assert torch.equal(dense.logits_of(dense.load(tmp_path), IDS), expected)


def test_one_file_of_another_name(tmp_path):
    expected = dense.logits_of(dense.load(rigs.mix(tmp_path)), IDS)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert torch.equal(dense.logits_of(dense.load(tmp_path), IDS), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtype_is_converted(stored, tmp_path):
    rigs.mix(tmp_path)
    original = load_file(tmp_path / "model.safetensors")[DOWN]
    rewrite(tmp_path, lambda w: w.update({name: x.to(stored) for name, x in w.items()}))
    assert torch.equal(dense.dequantized(dense.load(tmp_path).layers[1].feed_forward.down_proj), original.to(stored).float())


def test_fused_layers_hold_their_parts_in_order(tmp_path):
    weights = load_file(rigs.mix(tmp_path) / "model.safetensors")
    attention = dense.load(tmp_path).layers[0].self_attention
    parts = [weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(dense.dequantized(attention.qkv_proj), torch.cat(parts))


def test_tied_head_is_the_embedding_and_a_stored_copy_is_ignored(tmp_path):
    rigs.mix(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda w: w.update({"lm_head.weight": torch.zeros(256, 64)}))
    model = dense.load(tmp_path)
    assert torch.equal(dense.dequantized(model.lm_head), model.embed.weight)
    assert model.embed.weight.abs().max() > 1


def test_harmless_leftovers_of_old_checkpoints(tmp_path):
    rigs.mix(tmp_path)
    rewrite(tmp_path, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    dense.load(tmp_path)


def test_weights_bytes_counts_what_is_held(tmp_path):
    stored = sum(w.nbytes for w in load_file(rigs.mix(tmp_path) / "model.safetensors").values())
    handles = 9 * 8  # one packed linear layer each: 4 a decoder layer and the head
    assert weights_bytes(dense.load(tmp_path)) - stored in (0, handles)


def drop(name):
    return lambda folder: rewrite(folder, lambda w: w.pop(name))


def replace(name, tensor):
    return lambda folder: rewrite(folder, lambda w: w.update({name: tensor}))


def cut(num_bytes):
    def change(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:num_bytes])

    return change


def overwrite(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def edit_header(edit):
    def change(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return change


def lose_shard(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def lose_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def point_wrong(folder):
    places = shard(folder)
    places[DOWN] = next(p for p in places.values() if p != places[DOWN])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def escape(folder):
    places = shard(folder) | {DOWN: "../model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def break_index(content):
    def change(folder):
        shard(folder)
        (folder / "model.safetensors.index.json").write_text(content)

    return change


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FILE = "model.safetensors"
REFUSED = {
    "missing tensor": (drop(DOWN), (FILE, f"tensor '{DOWN}' is missing")),
    "missing head": (drop("lm_head.weight"), (FILE, "tensor 'lm_head.weight' is missing")),
    "misspelled": (
        lambda f: rewrite(f, lambda w: w.update({DOWN + "s": w.pop(DOWN)})),
        (FILE, f"tensor '{DOWN}' is missing", f"nearest one it has is '{DOWN}s'"),
    ),
    "extra tensor": (replace("model.layers.2.mlp.down_proj.weight", torch.ones(2)), (FILE, "model.layers.2.mlp", "2 layers")),
    "shape": (replace(DOWN, torch.ones(64, 127)), (FILE, DOWN, "shape [64, 127]; the model needs [64, 128]")),
    "dimensions": (replace(DOWN, torch.ones(64 * 128)), (FILE, DOWN, "shape [8192]; the model needs [64, 128]")),
    "dtype": (replace(DOWN, torch.ones(64, 128, dtype=torch.int8)), (FILE, DOWN, "dtype int8; the model needs a float dtype")),
    "fp8 unasked": (
        replace(DOWN, torch.ones(64, 128).to(torch.float8_e4m3fn)),
        (FILE, DOWN, "dtype float8_e4m3fn; the model needs a float dtype"),
    ),
    "empty file": (cut(0), (FILE, "truncated or not a safetensors file", "0 bytes")),
    "cut in the length": (cut(5), (FILE, "truncated or not a safetensors file")),
    "cut in the header": (cut(100), (FILE, "truncated or not a safetensors file")),
    "cut in the data": (cut(-1), (FILE, "is truncated", "tensor '")),
    "not safetensors": (overwrite(FILE, b"<html>not found</html>" * 9), (FILE, "not a safetensors file")),
    "header is no JSON": (overwrite(FILE, (4).to_bytes(8, "little") + b"{{{{"), (FILE, "corrupt", "not valid JSON")),
    "header is a list": (overwrite(FILE, (2).to_bytes(8, "little") + b"[]"), (FILE, "corrupt", "not a JSON object")),
    "entry": (edit_header(lambda h: h[DOWN].pop("shape")), (FILE, "corrupt", f"entry of tensor '{DOWN}' is malformed")),
    "negative": (edit_header(lambda h: h[DOWN].update(shape=[-64, 128])), (FILE, "corrupt", "malformed")),
    "size": (edit_header(lambda h: h[DOWN].update(shape=[64, 129])), (FILE, "corrupt", DOWN, "does not fill its 32768 bytes")),
    "unknown dtype": (edit_header(lambda h: h[DOWN].update(dtype="I7")), (FILE, DOWN, "dtype I7")),
    "missing shard": (lose_shard, ("shard 'model-00002-of-00002.safetensors' is missing", "puts tensor '")),
    "missing index": (lose_index, ("2 safetensors files", "no model.safetensors.index.json")),
    "index points wrong": (point_wrong, ("-of-00002.safetensors", f"tensor '{DOWN}' is missing", "index.json puts it there")),
    "index leads out": (escape, ("shard '../model-00001-of-00002.safetensors' is missing",)),
    "index is no JSON": (break_index("{"), ("model.safetensors.index.json is not valid JSON",)),
    "index without a map": (break_index('{"weight_map": [1]}'), ("index.json has no 'weight_map'",)),
    "pickle": (only_pickle, ("only pickled weights (pytorch_model.bin)", "Convert them to safetensors")),
    "nothing": (lambda f: (f / FILE).unlink(), ("no safetensors or GGUF weights", "load_format=dummy")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_file_and_tensor(case, tmp_path):
    change, parts = REFUSED[case]
    rigs.mix(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError) as refusal:
        dense.load(tmp_path)
    for part in (str(tmp_path), *parts):
        assert part in str(refusal.value)


def test_format_that_is_not_there(tmp_path):
    rigs.mix(tmp_path)
    with pytest.raises(UserError, match="has no gguf weights"):
        dense.load(tmp_path, load_format="gguf")
    with pytest.raises(UserError, match="no load format named 'safetensor'. Did you mean 'safetensors'"):
        dense.load(tmp_path, load_format="safetensor")


def test_quantized_checkpoint_that_no_plugin_claims(tmp_path):
    rigs.mix(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match=r"config\.json: the checkpoint is quantized \('gptq'\), and quant plugin 'none'"):
        dense.load(tmp_path)


def test_unpacked_weights_are_freed(tmp_path):
    """Each layer holds its weights once, packed where that is faster, and the packed ones die with the model."""
    none = sys.modules[registry.get("quant", "none").load().__module__]
    before = len(none._packed)
    model = dense.load(rigs.mix(tmp_path))
    linears = [m for m in model.modules() if isinstance(m, type(model.lm_head))]
    assert len(linears) == 9
    assert all("weight" not in linear.weights or "packed" not in linear.weights for linear in linears)
    num_packed = sum("packed" in linear.weights for linear in linears)
    assert len(none._packed) - before == num_packed
    del model, linears
    assert len(none._packed) == before


PEAK = """
import re, sys, torch
from pathlib import Path
from tests.model import dense
from lab.model.load import weights_bytes

def peak():  # not ru_maxrss, which a child process inherits
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
dense.load(Path(sys.argv[2]))  # so that libraries and buffers are there already
before = peak()
model = dense.load(Path(sys.argv[1]), dtype=torch.bfloat16)
print(peak() - before, weights_bytes(model))
"""


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_peak_memory_is_near_the_weights(load_format, tmp_path):
    """With a large tied vocabulary, whose table is in memory twice (as a table and packed), under weights + 20%."""
    big = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 32768, "num_hidden_layers": 6}
    rigs.mix(tmp_path / "big", tie_word_embeddings=True, **big)
    rewrite(tmp_path / "big", lambda w: w.update({name: x.bfloat16() for name, x in w.items()}))
    rigs.mix(tmp_path / "small")
    code = PEAK.replace("dtype=", f"load_format={load_format!r}, dtype=")
    command = [sys.executable, "-c", code, str(tmp_path / "big"), str(tmp_path / "small")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    grown, weights = map(int, done.stdout.split())
    assert weights > 100 * 2**20
    assert 0.9 * weights < grown < 1.2 * weights


def test_dummy_weights_need_only_a_config(tmp_path):
    rigs.mix(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").unlink()
    first, second = (dense.logits_of(dense.load(tmp_path, load_format="dummy"), IDS) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all() and 0.1 < first.std() < 10
    assert len(set(first.argmax(-1).tolist())) > 5
    model = dense.load(tmp_path, load_format="dummy")
    assert not torch.equal(*(dense.dequantized(layer.feed_forward.down_proj) for layer in model.layers))
    assert read_config(tmp_path).architecture == "qwen2"
