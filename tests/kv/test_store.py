"""The KV pool: what it holds before anything is written, what it costs, and how its bytes are counted."""

import pytest
import torch

from lab import registry
from lab.contracts.attention import AttentionSpec
from lab.kv.sizing import resident_bytes
from lab.kv.store import KVStore, bytes_per_block

registry.discover()


def _backend(name: str, head_dim: int, dtype: torch.dtype = torch.bfloat16):
    entry = registry.get("attention", name)
    spec = AttentionSpec(9, 3, head_dim, head_dim**-0.5, 16, dtype, dtype, torch.device("cpu"))
    return entry.load()(entry.options(), spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pool_is_zero_and_can_be_written(dtype):
    backend = _backend("sdpa", 64, dtype)
    store = KVStore([backend, backend], 5)
    assert [kv.shape for kv in store.layers] == [backend.kv_shape(5, 16)] * 2
    assert all(kv.dtype == dtype and kv.is_contiguous() and not kv.any() for kv in store.layers)
    store.layers[0].fill_(1.0)
    assert store.layers[0].all() and not store.layers[1].any()


def test_memory_is_taken_only_where_it_is_touched():
    backend = _backend("sdpa", 64)
    before = resident_bytes()
    store = KVStore([backend], 100_000)  # 1.2 GB
    assert store.layers[0].nbytes > 1 << 30
    store.layers[0][0, :100] = 1.0
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize(("name", "head_dim", "stored"), [("sdpa", 72, 72), ("flash", 72, 96), ("flash", 64, 64)])
def test_bytes_of_a_block_are_those_of_the_layout(name, head_dim, stored):
    """The dims that a layout adds are counted; blocks that it keeps for itself are not a block's."""
    backend = _backend(name, head_dim)
    per_layer = 2 * 3 * 16 * stored * 2  # keys and values, KV heads, tokens, dims, bytes
    assert bytes_per_block([backend] * 4) == 4 * per_layer
    grown = KVStore([backend], 9).layers[0].nbytes - KVStore([backend], 8).layers[0].nbytes
    assert grown == per_layer


def test_each_layer_keeps_sinks_of_its_own():
    spec = AttentionSpec(9, 3, 8, 1.0, 1, torch.bfloat16, torch.bfloat16, torch.device("cpu"), has_sinks=True)
    entry = registry.get("attention", "eager")
    backend = entry.load()(entry.options(), spec)
    sinks = [torch.arange(9.0), torch.arange(9.0) - 3.5]
    store = KVStore([backend] * 2, 4, sinks=sinks)
    slots = torch.tensor([0, 1, 2, 3, -1])  # all of them, and padding
    for kv, sinks_N in zip(store.layers, sinks, strict=True):
        backend.write(torch.ones(5, 3, 8), torch.ones(5, 3, 8), kv, slots)
        assert torch.equal(backend.sinks(kv), sinks_N)
        assert (backend.export_blocks(kv, torch.arange(4)) == 1).all()
    assert bytes_per_block([backend]) == 2 * 3 * 8 * 2  # sinks are no part of a block
