"""GGUF: rows put back in order, every type of block, config from metadata, damaged files."""

import struct

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from safetensors.torch import load_file

from lab import LLM, SamplingParams
from lab.errors import UserError
from lab.model.config import read_config
from lab.model.gguf_checkpoint import GgufCheckpoint, unpermuted
from lab.model.gguf_convert import convert, describe
from lab.model.gguf_file import TYPES, GgufFile
from tests import rigs
from tests.golden.oracle import greedy
from tests.model import dense, gguf_files

IDS = [(7 * i * i + 3 * i + 1) % 256 for i in range(40)]


def folder_of(path, folder):
    """A model folder as the resolution makes it: config beside a link to the file."""
    folder.mkdir()
    describe(path, folder)
    (folder / "weights.gguf").symlink_to(path)
    return folder


def test_rows_of_a_head_of_8():
    """File row order holds rows [0,4,1,5,2,6,3,7] of each head; with head_dim 4 the wrong direction would not show."""
    assert unpermuted(8, 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert unpermuted(24, 3).tolist() == [8 * head + row for head in range(3) for row in (0, 4, 1, 5, 2, 6, 3, 7)]
    rows = torch.arange(24)
    stored = gguf_files.permuted(rows[:, None], 3)[:, 0]
    assert stored[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    back = torch.empty(24, dtype=torch.long)
    back[torch.from_numpy(unpermuted(24, 3))] = stored
    assert torch.equal(back, rows)


@pytest.mark.parametrize("biased", [False, True])
def test_keys_have_their_own_head_count(biased, tmp_path):
    """9 query heads and 3 KV heads of 8, weights and biases."""
    shape = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "attention_bias": biased}
    rigs.mix(tmp_path / "hf", **shape)
    path = gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf")
    stored = {t.name: t.data for t in GGUFReader(path).tensors}
    original = load_file(tmp_path / "hf/model.safetensors")
    assert not np.array_equal(stored["blk.0.attn_k.weight"], original["model.layers.0.self_attn.k_proj.weight"])
    checkpoint = GgufCheckpoint(path, read_config(tmp_path / "hf"))
    assert set(checkpoint.names()) == set(original)
    for name, weight in original.items():
        found = torch.empty_like(weight)
        checkpoint.read(name, found)
        assert torch.equal(found, weight), name


@pytest.mark.parametrize("architecture", rigs.ARCHITECTURES)
def test_same_logits_as_the_checkpoint_it_was_made_of(architecture, tmp_path):
    overrides = {"sliding_window": None} if architecture == "mistral" else {}
    rigs.mix(tmp_path / "hf", architecture, torch_dtype="float32", **overrides)
    path = gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf")
    folder = folder_of(path, tmp_path / "gguf")
    ours, theirs = read_config(folder), read_config(tmp_path / "hf")
    assert ours.architecture == {"mistral": "llama"}.get(architecture, architecture)
    fields = ("hidden_size", "num_kv_heads", "head_dim", "rms_norm_eps", "rope", "layer_windows", "torch_dtype", "qkv_bias")
    for field in fields:
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.eos_ids == {7}
    expected = dense.logits_of(dense.load(tmp_path / "hf"), IDS)
    assert (dense.logits_of(dense.load(folder), IDS) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("architecture", rigs.GEMMAS)
def test_gemmas(architecture, tmp_path):
    """Windows, caps, ropes and norms, whose weights are stored with the one added; the same tokens as in transformers."""
    published = {"gemma2": {"query_pre_attn_scalar": 32}, "gemma3_text": {"query_pre_attn_scalar": 32, "layer_types": None}}
    local = {"rope_type": "default", "rope_theta": 10000.0}  # the base that no file has
    if architecture == "gemma3_text":
        full = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0}
        published[architecture]["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        published[architecture]["num_hidden_layers"] = 7
    rigs.mix(tmp_path / "hf", architecture, **published[architecture])
    path = gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf")
    folder = folder_of(path, tmp_path / "gguf")
    ours, theirs = read_config(folder), read_config(tmp_path / "hf")
    fields = ("architecture", "head_dim", "layer_windows", "attention_scale", "attention_softcap", "logits_softcap")
    for field in (*fields, "output_norms", "norm_offset", "rope", "local_rope", "activation", "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert len(set(ours.layer_windows)) == 2 and ours.eos_ids == {1}
    expected = dense.logits_of(dense.load(tmp_path / "hf"), IDS)
    assert (dense.logits_of(dense.load(folder), IDS) - expected).abs().max() < 1e-4
    right = greedy(tmp_path / "hf", IDS, 12)
    base = ["compile.mode=none", "model.dtype=float32", "model.max_model_len=256", "cache.num_blocks=100", "num_threads=1"]
    with LLM(str(path), attention="eager", overrides=base) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        assert llm.generate([{"prompt_token_ids": IDS}], params)[0].outputs[0].token_ids == right


def test_tied_embeddings_have_no_output_tensor(tmp_path):
    rigs.mix(tmp_path / "hf", tie_word_embeddings=True)
    folder = folder_of(gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf"), tmp_path / "gguf")
    assert read_config(folder).tie_word_embeddings
    expected = dense.logits_of(dense.load(tmp_path / "hf"), IDS)
    assert torch.equal(dense.logits_of(dense.load(folder), IDS), expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_stored_types_end_to_end(kind, tmp_path):
    rigs.mix(tmp_path / "hf")
    path = gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf", kind=kind)
    model = dense.load(folder_of(path, tmp_path / "gguf"))
    stored = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}
    expected = np.concatenate([stored["blk.1.ffn_gate.weight"], stored["blk.1.ffn_up.weight"]])
    assert np.array_equal(dense.dequantized(model.layers[1].feed_forward.gate_up_proj).numpy(), expected)
    original = load_file(tmp_path / "hf/model.safetensors")["model.layers.1.mlp.gate_proj.weight"].numpy()
    error = np.abs(expected[:128] - original).max()
    assert 0 < error < {"F16": 1e-3, "BF16": 4e-3, "Q8_0": 1e-2}.get(kind, 0.2)
    assert read_config(tmp_path / "gguf").torch_dtype == ("float16" if kind == "F16" else "bfloat16")


@pytest.mark.parametrize("kind", sorted(TYPES - {"F32"}))
def test_every_type_of_block(kind, tmp_path, monkeypatch):
    """Chunk by chunk the same as the gguf package makes of the whole tensor, bit for bit."""
    quant = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[quant]
    raw = np.random.default_rng(1).integers(0, 60, (7, 512 // block * block_bytes), dtype=np.uint8)  # finite float16 scales
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw.view(np.float16) if kind == "F16" else raw, raw_dtype=quant)
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    monkeypatch.setattr("lab.model.gguf_file._CHUNK_ELEMENTS", 1024)
    chunks = list(GgufFile(tmp_path / "m.gguf").dequantized("t"))
    assert [first for first, _ in chunks] == [0, 2, 4, 6]
    expected = raw.view(np.float16).astype(np.float32) if kind == "F16" else dequantize(raw, quant)
    found = np.concatenate([chunk for _, chunk in chunks])
    assert np.isfinite(expected).all() and np.array_equal(found, expected) and len(np.unique(found)) > 20


def test_metadata_equals_that_of_the_gguf_package(tmp_path):
    path = gguf_files.write(rigs.mix(tmp_path / "hf"), tmp_path / "m.gguf", extra={"general.name": "M\u00e9l", "x.y": 2.5})
    theirs = {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    assert GgufFile(path).metadata == theirs


def test_convert_writes_a_checkpoint_in_bfloat16(tmp_path):
    rigs.mix(tmp_path / "hf", tie_word_embeddings=True)
    path = gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf", kind="Q8_0")
    (tmp_path / "st").mkdir()
    convert(path, tmp_path / "st")
    stored = load_file(tmp_path / "st/model.safetensors")
    original = load_file(tmp_path / "hf/model.safetensors")
    assert {name: w.shape for name, w in stored.items()} == {name: w.shape for name, w in original.items()}
    assert {w.dtype for w in stored.values()} == {torch.bfloat16}
    direct = dense.load(folder_of(path, tmp_path / "gguf"), dtype=torch.bfloat16)
    expected = dense.logits_of(direct, IDS)
    assert torch.equal(dense.logits_of(dense.load(tmp_path / "st", dtype=torch.bfloat16), IDS), expected)


def test_rope_factors_become_longrope(tmp_path):
    """Llama 3.1's scaling stands in GGUF as a tensor of divisors of the frequencies."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = gguf_files.write(
        rigs.mix(tmp_path / "hf"), tmp_path / "m.gguf", change=lambda t: t.update({"rope_freqs.weight": factors})
    )
    folder = folder_of(path, tmp_path / "gguf")
    rope = read_config(folder).rope
    assert rope.kind == "longrope" and rope.attention_factor == 1.0
    assert rope.short_factor == rope.long_factor == tuple(factors.tolist())
    plain = dense.logits_of(dense.load(tmp_path / "hf"), IDS)
    assert (dense.logits_of(dense.load(folder), IDS) - plain).abs().max() > 0.01


def test_yarn_of_the_metadata(tmp_path):
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    path = gguf_files.write(rigs.mix(tmp_path / "hf"), tmp_path / "m.gguf", extra=extra)
    rope = read_config(folder_of(path, tmp_path / "gguf")).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 1024)


def edit(path, offset, code, value):
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{code}", data, offset, value)
    path.write_bytes(data)


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


DAMAGED = {
    "empty": (lambda p: p.write_bytes(b""), "is not a GGUF file"),
    "other file": (lambda p: p.write_bytes(b"PK\x03\x04" * 9), "is not a GGUF file"),
    "version": (lambda p: edit(p, 4, "I", 9), "is a version 9 GGUF file"),
    "big-endian": (lambda p: edit(p, 4, "I", 3 << 24), "is a big-endian GGUF file"),
    "cut in the header": (lambda p: cut(p, 200), "is truncated: its header goes on beyond its 200 bytes"),
    "cut in the data": (lambda p: cut(p, -50), r"is truncated: tensor '.+' ends at byte \d+"),
    "count of values": (lambda p: edit(p, 16, "Q", 1 << 60), "is truncated|is corrupt"),
    "length of a name": (lambda p: edit(p, 24, "Q", 1 << 60), "is truncated"),
    "type of a value": (lambda p: edit(p, 24 + 8 + len("general.architecture"), "I", 77), "is corrupt: .* unknown type 77"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case, tmp_path):
    change, message = DAMAGED[case]
    path = gguf_files.write(rigs.mix(tmp_path / "hf"), tmp_path / "m.gguf")
    change(path)
    with pytest.raises(UserError, match=message) as refusal:
        GgufFile(path)
    assert str(path) in str(refusal.value)


def test_tensors_that_do_not_fit(tmp_path):
    def refusal(change):
        path = gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf", change=change)
        with pytest.raises(UserError) as caught:
            model = tmp_path / "gguf"
            model.mkdir(exist_ok=True)
            (model / "weights.gguf").unlink(missing_ok=True)
            (model / "weights.gguf").symlink_to(path)
            dense.load(model, config=read_config(tmp_path / "hf"))
        return str(caught.value)

    rigs.mix(tmp_path / "hf")
    message = refusal(lambda t: t.pop("blk.1.ffn_up.weight"))
    assert "m.gguf" in message or "weights.gguf" in message
    assert "tensor 'model.layers.1.mlp.up_proj.weight' is missing" in message
    assert "blk.7.odd.weight" in refusal(lambda t: t.update({"blk.7.odd.weight": np.ones((2, 2), np.float32)}))
    message = refusal(lambda t: t.update({"output_norm.weight": np.ones(63, np.float32)}))
    assert "'model.norm.weight' has shape [63]; the model needs [64]" in message


def test_unknown_architecture_type_and_tokenizer(tmp_path):
    rigs.mix(tmp_path / "hf")
    plain = gguf_files.write(tmp_path / "hf", tmp_path / "m.gguf", tokenizer=False)
    with pytest.raises(UserError, match=r"m\.gguf: its metadata has no tokenizer"):
        describe(plain, tmp_path)
    GGUFWriter(tmp_path / "x.gguf", "llame").close()
    writer = GGUFWriter(tmp_path / "x.gguf", "llame")
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    with pytest.raises(UserError, match="no GGUF architecture named 'llame'. Did you mean 'llama'"):
        describe(tmp_path / "x.gguf", tmp_path)


def test_type_that_is_not_supported(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    quant = GGMLQuantizationType.IQ4_NL
    writer.add_tensor("t", np.zeros((2, GGML_QUANT_SIZES[quant][1]), np.uint8), raw_dtype=quant)
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    with pytest.raises(UserError, match=r"m\.gguf: tensor 't' is of type IQ4_NL; supported are BF16, F16"):
        list(GgufFile(tmp_path / "m.gguf").dequantized("t"))
