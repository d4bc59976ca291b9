"""llama.cpp through llama-cpp-python's low-level API, built for this CPU: one batch of all requests that run.

The loop here does what its server does: prompts are packed into batches, requests decode together, and a prefix that all
prompts begin with is computed once and copied to the other sequences.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.protocol import Generated, Peer, Request, Start, serve

BATCH_TOKENS = 2048
SHARED_AT_LEAST = 32  # tokens: a shorter common prefix is not worth a step of its own


class LlamaCpp(Peer):
    PACKAGES = ("llama-cpp-python",)
    MODULES = ("numpy", "llama_cpp")
    SETTINGS = "GGUF BF16, built natively, f16 KV cache, flash attention, continuous batching, common prefix computed once"

    @staticmethod
    def prepare(model: Path, folder: Path) -> None:
        write_gguf(model, folder / "model.gguf")

    def __init__(self, start: Start) -> None:
        import llama_cpp

        llama_cpp.llama_backend_init()
        self._threads = start.threads
        path = Path(start.prepared) / "model.gguf"
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._context: Any = None

    def set_up(self, requests: Sequence[Request]) -> None:
        """A context with room for these requests: shared cells where they share a prefix, else a stream for each."""
        import llama_cpp

        if self._context is not None:
            llama_cpp.llama_free(self._context)
        lengths = [len(request.prompt_ids) + request.num_output for request in requests]
        num_shared = common_prefix(requests)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = len(requests)
        params.kv_unified = num_shared > 0
        num_cells = sum(lengths) - (len(requests) - 1) * num_shared if num_shared else len(requests) * _padded(max(lengths))
        params.n_ctx = _padded(num_cells)
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")

    def generate(self, requests: Sequence[Request]) -> Generated:
        import llama_cpp

        memory = llama_cpp.llama_get_memory(self._context)
        sequences = [_Sequence(place, request) for place, request in enumerate(requests)]
        if num_shared := common_prefix(requests):
            first = sequences[0]
            self._decode([_Chunk(first, num_shared, samples=False)])
            for sequence in sequences[1:]:
                llama_cpp.llama_memory_seq_cp(memory, 0, sequence.id, 0, num_shared)
                sequence.num_computed = num_shared
        moments = []
        while any(not sequence.done for sequence in sequences):
            if self._decode(_plan(sequences)):
                moments.append(time.monotonic())
        return Generated([sequence.output for sequence in sequences], moments if len(requests) == 1 else None)

    def _decode(self, chunks: "list[_Chunk]") -> bool:
        """One step. True when it brought tokens."""
        import llama_cpp
        import numpy as np

        batch, size = self._batch, 0
        for chunk in chunks:
            sequence = chunk.sequence
            for offset in range(chunk.num_tokens):
                position = sequence.num_computed + offset
                batch.token[size] = sequence.token_at(position)
                batch.pos[size] = position
                batch.n_seq_id[size] = 1
                batch.seq_id[size][0] = sequence.id
                batch.logits[size] = chunk.samples and offset == chunk.num_tokens - 1
                size += 1
            sequence.num_computed += chunk.num_tokens
        batch.n_tokens = size
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        if sampling:
            shape = (len(sampling), self._num_vocab)
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape)
            for sequence, token in zip(sampling, logits.argmax(axis=1).tolist(), strict=True):
                sequence.output.append(token)
        return bool(sampling)


@dataclass
class _Sequence:
    id: int
    request: Request
    num_computed: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.output) == self.request.num_output

    @property
    def num_pending(self) -> int:
        return len(self.request.prompt_ids) + len(self.output) - self.num_computed

    def token_at(self, position: int) -> int:
        num_prompt = len(self.request.prompt_ids)
        return self.request.prompt_ids[position] if position < num_prompt else self.output[position - num_prompt]


@dataclass
class _Chunk:
    sequence: _Sequence
    num_tokens: int
    samples: bool  # it holds the last token so far: the next one follows from it


def _plan(sequences: list[_Sequence]) -> list[_Chunk]:
    """The next step: what is pending of those that run, the shortest (which decode) first, up to a full batch."""
    chunks, room = [], BATCH_TOKENS
    for sequence in sorted((s for s in sequences if not s.done), key=lambda s: s.num_pending > 1):
        num_tokens = min(sequence.num_pending, room)
        if num_tokens == 0:
            break
        chunks.append(_Chunk(sequence, num_tokens, samples=num_tokens == sequence.num_pending))
        room -= num_tokens
    return chunks


def common_prefix(requests: Sequence[Request]) -> int:
    """How many tokens all prompts begin with alike, each keeping one of its own; 0 when it is not worth sharing."""
    prompts = [request.prompt_ids for request in requests]
    if len(prompts) < 2:
        return 0
    shortest = min(len(prompt) for prompt in prompts) - 1
    num_alike = next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest)
    return num_alike if num_alike >= SHARED_AT_LEAST else 0


def _padded(count: int) -> int:
    return -(-count // 256) * 256


def write_gguf(model: Path, path: Path) -> None:
    """A Llama checkpoint as GGUF: matrices in BF16 bit for bit, norms in F32, no vocabulary since only ids are used."""
    import gguf
    import numpy as np

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in read_bfloat16(model / "model.safetensors"):
        kind = name.split(".")[-2]
        if kind in heads:  # GGUF's Llama rotates pairs of neighbours, so the rows of a head are interleaved
            rows, columns = weight.shape
            weight = weight.reshape(heads[kind], 2, rows // heads[kind] // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        stored = names.get_name(name, try_suffixes=(".weight",))
        if weight.ndim == 1:
            writer.add_tensor(stored, (weight.astype(np.uint32) << 16).view(np.float32))
        else:
            data = np.ascontiguousarray(weight).view(np.uint8)
            writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_bfloat16(path: Path) -> "list[tuple[str, Any]]":
    """The tensors of a safetensors file in bfloat16, as arrays of their bits."""
    import numpy as np

    data = np.memmap(path, dtype=np.uint8, mode="r")
    header_size = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + header_size]))
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] != "BF16":
                raise RuntimeError(f"{name} of {path} is {entry['dtype']}, not BF16")
            begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
            tensors.append((name, np.frombuffer(bytes(data[begin:end]), np.uint16).reshape(entry["shape"])))
    return tensors


if __name__ == "__main__":
    serve(LlamaCpp)
