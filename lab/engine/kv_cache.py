"""The KV cache of an engine: the groups of its layers, the manager of their blocks, and what the pool holds."""

import logging
from collections.abc import Sequence

from lab.contracts.attention import Attention, AttentionSpec
from lab.contracts.spec import Proposer
from lab.kv.blocks import BlockManager
from lab.kv.grouped import GroupedBlockManager
from lab.kv.groups import Full, Grouping, LayerCache, group_layers, need_of
from lab.kv.sizing import GIB
from lab.kv.store import bytes_per_block
from lab.sched.limits import reach
from lab.settings import CacheSettings, Settings

log = logging.getLogger("lab")


def group(backends: list[Attention], cache: CacheSettings, max_len: int) -> tuple[list[Attention], Grouping]:
    """The KV groups of the layers of these backends, and a backend for each layer that no layer of another group has.

    A backend may keep what it planned for a step, and each group is planned for apart.
    """
    layers = [_layer_cache(number, backend, cache, max_len) for number, backend in enumerate(backends)]
    grouping = group_layers(layers, max_len)
    if grouping.num_groups == 1 and len({layer.need for layer in layers}) > 1:
        log.info("KV cache: its layers cannot lie in each other's place, so that nothing behind a window is given back")
    of_group: dict[tuple[AttentionSpec, int], Attention] = {}
    taken = set()
    apart = []
    for backend, number in zip(backends, grouping.group_of, strict=True):
        key = backend.spec, number
        if key not in of_group:
            of_group[key] = type(backend)(backend.options, backend.spec) if id(backend) in taken else backend
            taken.add(id(backend))
        apart.append(of_group[key])
    return apart, grouping


def _layer_cache(layer: int, backend: Attention, cache: CacheSettings, max_len: int) -> LayerCache:
    spec = backend.spec
    page = (type(backend).name, backend.kv_shape(1, spec.block_size), str(spec.kv_dtype))
    if spec.kv_scales == "head" or spec.has_sinks:  # the layer's own scales or sinks are in its tensor
        page = (*page, layer)
    return LayerCache(need_of(spec.sliding_window if cache.free_behind_window else None, max_len), page)


def block_manager(settings: Settings, grouping: Grouping, num_blocks: int, kv_dtype: str, proposer: Proposer) -> BlockManager:
    """The manager of the pool's blocks."""
    cache = settings.cache
    options = {
        "enable_prefix_caching": cache.enable_prefix_caching,
        "hash_algo": cache.hash_algo,
        "extra_keys": (kv_dtype, cache.scales),
    }
    if grouping.is_plain:
        return BlockManager(num_blocks, cache.block_size, lookahead=proposer.lookahead, **options)
    most = reach(settings.scheduler, proposer.num_drafts)
    return GroupedBlockManager(num_blocks, cache.block_size, grouping.needs, reach=most, **options)


def report_cache(
    blocks: BlockManager, grouping: Grouping, max_len: int, block_bytes: int, backends: Sequence[Attention]
) -> None:
    """Say how much the cache holds, and in what. With groups the tokens are those of requests of the greatest length."""
    concurrency = blocks.num_blocks / blocks.blocks_for(max_len)
    if grouping.is_plain:
        num_tokens = blocks.num_blocks * blocks.block_size
        concurrency = num_tokens / max_len
    else:
        num_tokens = int(concurrency * max_len)
        kinds = [f"{'all' if isinstance(need, Full) else f'a window of {need.window}'} tokens" for need in grouping.needs]
        log.info("KV groups: %s", "; ".join(f"{kinds.count(kind)} of layers that keep {kind}" for kind in dict.fromkeys(kinds)))
    log.info(
        "KV cache: %s tokens in %.2f GiB%s, maximum concurrency for %s tokens: %.2f",
        f"{num_tokens:,}",
        blocks.num_blocks * block_bytes / GIB,
        _gain(backends),
        f"{max_len:,}",
        concurrency,
    )


def _gain(backends: Sequence[Attention]) -> str:
    """How many times the tokens a quantized cache holds that one in the model's dtype would."""
    specs = [backend.spec for backend in backends]
    if all(spec.kv_scales == "none" for spec in specs):
        return ""
    plain = sum(2 * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize for spec in specs)
    return f" ({plain / bytes_per_block(backends):.2f} times those of {str(specs[0].dtype).removeprefix('torch.')})"


def row_slack(blocks: BlockManager, block_tokens: float) -> float:
    """How many of the tokens that a row's blocks stand for, `block_tokens` each, may be empty or out of sight.

    In each group a table has an end that may be empty but for one token, and with a window a beginning that may be passed.
    """
    num_ends = sum(1 if isinstance(need, Full) else 2 for need in blocks.needs)
    return num_ends * block_tokens * (1 - 1 / blocks.block_size)
