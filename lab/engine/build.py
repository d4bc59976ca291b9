"""Builds an engine from settings: device, model, plugins, KV pool, runner, scheduler."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab import native, registry
from lab.capabilities import Needs
from lab.compile import tape
from lab.compile.compiler import TracedPlugin
from lab.compile.setup import Compiled, compile_for_run, compile_heads, graph_store, num_compilations
from lab.contracts.draft_length import DraftLength
from lab.contracts.spec import Proposer
from lab.engine.backends import asked_by_drafts, backends_of, draft_backends_of, dtype_name, resolve_for_shapes
from lab.engine.drafts import check_layers_fit, check_trees_fit, tree_obstacle
from lab.engine.engine import CompileFacts, Engine, EngineFacts
from lab.engine.executor import InProcessExecutor
from lab.engine.kv_cache import block_manager, group, report_cache
from lab.engine.resolution import Resolved, resolve
from lab.errors import UserError
from lab.kv.blocks import BlockManager
from lab.kv.scales import Ranges, fixed_scales, ranges_of
from lab.kv.sizing import num_blocks_for
from lab.kv.store import KVStore, bytes_per_block
from lab.model.config import ModelConfig, read_config
from lab.model.decoder import attention_layer
from lab.model.layers.fused import NAMESPACE as LAYERS_LIBRARY
from lab.model.layers.fused import SOURCES as LAYERS_SOURCES
from lab.model.load import load_model, weights_bytes
from lab.model.source import check_tokenizer, resolve_model
from lab.runner.draft_cache import scratch_blocks, scratch_positions
from lab.runner.runner import Limits, Runner
from lab.runner.target import BoundTarget, find_draft_model
from lab.sampling_params import SamplingParams
from lab.sched.scheduler import Scheduler
from lab.settings import CacheSettings, PluginChoice, Settings
from lab.types import Chunk, NewRow, Step

log = logging.getLogger("lab")


def build_engine(settings: Settings, clock: Callable[[], float], loaded: nn.Module | None = None) -> Engine:
    """See `Engine.build`."""
    begin = time.perf_counter()
    registry.discover()
    device = choose_device(settings)
    num_threads = _set_num_threads(settings.num_threads)
    folder, config = _find_model(settings)
    dtype = choose_dtype(settings.model.dtype, config, device)
    max_model_len = _max_model_len(settings, config)
    ranges = ranges_of(settings.cache)

    common = {"device": device.type, "dtype": dtype_name(dtype), "features": _asked_of_all(settings)}
    chosen = _choose_plugins(settings, config, common)
    proposer = _make_proposer(settings, chosen["spec"], config, max_model_len)
    shapes = [attention_layer(config, layer, "") for layer in range(config.num_layers)]
    likely = resolve_for_shapes(settings, shapes, dtype, device, asked_by_drafts(proposer, is_bound=False))
    check_trees_fit(settings, shapes, proposer)
    if device.type == "cpu":
        native.build_ahead(_libraries(settings, chosen, likely), {tape.NAMESPACE: tape.FLAGS})
    model, heads = _load(settings, chosen, proposer, folder, config, dtype, device, max_model_len, loaded)
    load_s = time.perf_counter() - begin
    backends = backends_of(settings, model.attention_layers, dtype, device, chosen, asked_by_drafts(proposer, is_bound=True))
    draft_backends = draft_backends_of(settings, proposer, dtype, device, chosen)
    scales = _fixed_scales(settings.cache, ranges, model, config)
    backends, grouping = group(backends, settings.cache, max_model_len)
    check_layers_fit(proposer, grouping)
    limits = _limits(settings, config, max_model_len, grouping.num_groups)
    compiled = compile_for_run(
        settings.compile,
        model,
        config,
        device,
        backends,
        _traced_plugins(chosen),
        max_rows=limits.max_rows,
        max_tokens=limits.max_tokens,
        num_drafts=proposer.num_drafts,
        group_of=grouping.group_of,
    )
    compiled = compile_heads(settings.compile, compiled, heads, device, _traced_plugins(chosen))
    warm_begin = time.perf_counter()
    num_scratch = limits.max_rows * scratch_blocks(scratch_positions(proposer), limits.block_size)
    make_store = partial(
        KVStore,
        backends,
        scales=scales,
        sinks=[layer.sinks_N for layer in model.attention_layers],
        place_of=grouping.place_of,
        draft_backends=draft_backends,
        num_scratch=num_scratch,
    )
    block_bytes = bytes_per_block(backends, grouping.place_of) + bytes_per_block(draft_backends)
    draft_length = chosen["draft_length"].make(proposer.num_drafts, limits.max_rows)
    draft_length.tree_depth = proposer.tree_depth
    runner = _warm_runner(settings, model, compiled, make_store, block_bytes, proposer, draft_length, limits, device)
    warmup_s = time.perf_counter() - warm_begin

    kv_dtype = dtype_name(backends[0].spec.kv_dtype)
    blocks = block_manager(settings, grouping, runner.store.num_blocks, kv_dtype, proposer)
    report_cache(blocks, grouping, max_model_len, block_bytes, backends)
    scheduler = _scheduler(settings, chosen, blocks, max_model_len, proposer)
    executor = InProcessExecutor(runner, overlap=settings.scheduler.async_scheduling)
    facts = EngineFacts(
        model_config=config,
        model_name=settings.model.path,
        tokenizer_folder=Path(settings.model.tokenizer).expanduser() if settings.model.tokenizer else folder,
        max_model_len=max_model_len,
        device=device.type,
        dtype=dtype_name(dtype),
        kv_dtype=kv_dtype,
        weights_bytes=weights_bytes(model),
        kv_bytes_per_token=sum(map(bytes_per_block, (backends, draft_backends))) // settings.cache.block_size,
        kv_bytes_per_block=block_bytes,
        num_threads=num_threads,
        records={kind: resolved.record for kind, resolved in chosen.items()},
        startup_s={"load": load_s, "compile": compiled.seconds, "warmup": warmup_s, "total": time.perf_counter() - begin},
        compile=_compile_facts(compiled, runner),
    )
    return Engine(settings, scheduler, blocks, executor, facts, clock)


def _find_model(settings: Settings) -> tuple[Path, ModelConfig]:
    check_tokenizer(settings.model.tokenizer)
    folder = resolve_model(settings.model.path)
    return folder, read_config(folder)


def _make_proposer(settings: Settings, resolved: Resolved, config: ModelConfig, max_model_len: int) -> Proposer:
    """The proposer, not bound yet; what it will need is there."""
    proposer = resolved.make()
    proposer.check_target(settings.model.path)
    if proposer.model_path is not None:
        find_draft_model(proposer.model_path, config, max_model_len)
    return proposer


def _scheduler(
    settings: Settings, chosen: dict[str, Resolved], blocks: BlockManager, max_model_len: int, proposer: Proposer
) -> Scheduler:
    return Scheduler(
        settings.scheduler,
        blocks,
        chosen["policy"].make(),
        max_model_len=max_model_len,
        num_drafts=proposer.num_drafts,
        draft_depth=proposer.tree_depth or None,
        debug=settings.debug,
    )


def _load(
    settings: Settings,
    chosen: dict[str, Resolved],
    proposer: Proposer,
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    model: nn.Module | None,
) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The model, unless it is given, with the proposer bound to it, and the draft heads that it has."""
    name = settings.model.path
    moe = chosen["moe"].make()
    load = partial(load_model, dtype=dtype, device=device, moe=moe, max_model_len=max_model_len)
    if model is None:
        log.info("loading %s in %s on %s", name, dtype_name(dtype), device.type)
        model = load(
            folder,
            config,
            load_format=settings.model.load_format,
            quant=chosen["quant"].make(),
            batch_invariant=settings.debug.batch_invariant,
        )
    load_another = partial(load, load_format="auto", quant=model.build.plain)
    max_rows = settings.scheduler.max_num_seqs
    obstacle = partial(tree_obstacle, settings, model.attention_layers, dtype, device)
    target = BoundTarget(name, model, config, dtype, device, max_rows, max_model_len, load_another, obstacle)
    proposer.bind(target)
    model.aux_layers = tuple(proposer.aux_layers)
    return model, target.heads


def _warm_runner(
    settings: Settings,
    model: nn.Module,
    compiled: Compiled,
    make_store: Callable[[int], KVStore],
    block_bytes: int,
    proposer: Proposer,
    draft_length: DraftLength,
    limits: Limits,
    device: torch.device,
) -> Runner:
    """A runner with its KV pool, sized by a step of the largest size, and with its graphs captured."""
    trial_store = make_store(_profile_blocks(settings, limits))
    runner = Runner(model, compiled.direct, compiled.dispatcher, trial_store, proposer, limits, device, draft_length)
    graphs = graph_store(compiled, runner.builder, device)
    num_blocks = num_blocks_for(
        settings.cache,
        block_bytes,
        device,
        lambda: _profile(runner, settings, limits),
        lambda: graphs.estimate_bytes(trial_store.layers) if graphs is not None else 0,
    )
    runner.replace_store(make_store(num_blocks))
    if graphs is not None:
        graphs.capture(runner.store.layers)
        runner.forward = graphs
    return runner


def _compile_facts(compiled: Compiled, runner: Runner) -> CompileFacts:
    return CompileFacts(
        mode=compiled.mode,
        seconds=compiled.seconds,
        num_graphs=compiled.num_graphs,
        num_captured=runner.forward.num_graphs,
        from_cache=compiled.from_cache,
        num_compilations=num_compilations(),
    )


def _asked_of_all(settings: Settings) -> frozenset[str]:
    """Features that every plugin in the way of a token must have."""
    return frozenset({"batch_invariant"} if settings.debug.batch_invariant else ())


def _choose_plugins(settings: Settings, config: ModelConfig, common: dict[str, Any]) -> dict[str, Resolved]:
    """Every plugin but attention, which needs the model's layers."""
    quant = resolve("quant", _claimed(settings.quant, config), Needs(**common))
    quant.record["asked_for"] = settings.quant.name  # `auto` goes by the checkpoint, not by priorities
    return {
        "quant": quant,
        "moe": resolve("moe", settings.moe, Needs(**common)),
        "spec": resolve("spec", settings.spec, Needs(device=common["device"], features=common["features"])),
        "draft_length": resolve("draft_length", settings.draft_length, Needs()),
        "policy": resolve("policy", PluginChoice(settings.scheduler.policy, settings.scheduler.policy_options), Needs()),
    }


def _libraries(settings: Settings, chosen: dict[str, Resolved], likely: Resolved) -> dict[str, Sequence[Path]]:
    """The C++ that the run will load; `likely` is the attention of its first layer."""
    libraries = {LAYERS_LIBRARY: LAYERS_SOURCES, **chosen["quant"].entry.load().libraries, **likely.entry.load().libraries}
    return libraries if settings.compile.mode == "none" else {**libraries, tape.NAMESPACE: tape.SOURCES}


def _claimed(choice: PluginChoice, config: ModelConfig) -> PluginChoice:
    """For `auto`: none for a plain checkpoint, else the one weight format that recognises it."""
    if choice.name != "auto":
        return choice
    if "quantization_config" not in config.raw:
        return PluginChoice("none", choice.options)
    claims = [e.name for e in registry.entries("quant") if not e.broken and e.load().detect(config.raw)]
    if len(claims) != 1:
        method = config.raw["quantization_config"].get("quant_method")
        found = f"{len(claims)} plugins claim it: {', '.join(claims)}" if claims else "no plugin reads it"
        raise UserError(f"the checkpoint's weight format '{method}': {found}. Choose one with +quant=NAME.")
    return PluginChoice(claims[0], choice.options)


def _fixed_scales(cache: CacheSettings, ranges: Ranges | None, model: nn.Module, config: ModelConfig) -> list[torch.Tensor]:
    """scales_2K of each layer, where the cache has fixed ones."""
    layers = model.attention_layers
    quantization = config.raw.get("quantization_config") or {}
    scheme = (quantization.get("kv_cache_scheme") or {}).get("type", "float")
    of_checkpoint = [layer.kv_scales_2K for layer in layers]
    return fixed_scales(cache, ranges, [layer.num_kv_heads for layer in layers], of_checkpoint, scheme)


def _traced_plugins(chosen: dict[str, Resolved]) -> list[TracedPlugin]:
    """The plugins whose code torch.compile traces; plain layers of a quantized model are those of `none`."""
    used = [chosen["quant"], chosen["moe"]]
    traced = [TracedPlugin(resolved.entry.name, repr(resolved.options), resolved.entry.load()) for resolved in used]
    plain = registry.get("quant", "none")
    return [*traced, TracedPlugin(plain.name, "", plain.load())]


def _limits(settings: Settings, config: ModelConfig, max_model_len: int, num_groups: int) -> Limits:
    return Limits(
        settings.scheduler.max_num_seqs,
        max_model_len,
        settings.cache.block_size,
        config.vocab_size,
        settings.scheduler.max_num_batched_tokens,
        num_groups,
    )


def choose_device(settings: Settings) -> torch.device:
    """The device that the settings come to. Raises UserError for one that is not here."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch finds no CUDA device here. Use device=cpu, or see `lab doctor`.")
    name = settings.device if settings.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name) if name == "cpu" else torch.device(name, torch.cuda.current_device())


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own, but float32 for float16 on the CPU, which computes it slowly."""
    if name == "auto":
        name = config.torch_dtype
        if name == "float16" and device.type == "cpu":
            name = "float32"
    return getattr(torch, name)


def _set_num_threads(wanted: int | None) -> int:
    num_cores = len(os.sched_getaffinity(0))
    if wanted is not None and wanted > num_cores:
        log.warning("num_threads=%d: this process may use %d cores, so threads will wait for one another", wanted, num_cores)
    torch.set_num_threads(wanted or num_cores)
    return wanted or num_cores


def _max_model_len(settings: Settings, config: ModelConfig) -> int:
    limit, asked = config.max_position_embeddings, settings.model.max_model_len
    if asked is not None and asked > limit:
        raise UserError(f"model.max_model_len={asked}: the model was made for at most {limit} positions.")
    return asked or limit


def _profile_blocks(settings: Settings, limits: Limits) -> int:
    """Blocks that the profiling step writes to; none when the pool's size is given and nothing is profiled."""
    if settings.cache.num_blocks is not None or settings.cache.memory_bytes is not None:
        return 1
    return (-(-settings.scheduler.max_num_batched_tokens // limits.block_size) + limits.max_rows) * limits.num_groups


def _profile(runner: Runner, settings: Settings, limits: Limits) -> None:
    """One ordinary step of the largest size: as many tokens as the budget allows, every row sampling."""
    budget = settings.scheduler.max_num_batched_tokens
    lengths, rest = [], budget
    for rows_left in range(min(limits.max_rows, budget), 0, -1):  # as long as may be, but at least one token for each
        lengths.append(min(limits.max_model_len, rest - rows_left + 1))
        rest -= lengths[-1]
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1)
    new_rows, chunks, next_block = [], [], 0
    for index, length in enumerate(lengths):
        num_blocks = -(-length // limits.block_size) * limits.num_groups
        block_ids = list(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        request_id = f"profile-{index}"
        new_rows.append(NewRow(request_id, [0] * length, length, params, 0, frozenset(), block_ids, 0))
        chunks.append(Chunk(request_id, 0, length, 0, True, [], []))
    runner.execute(Step(-1, new_rows, chunks, [], sum(lengths), 0))
    runner.execute(Step(-1, [], [], [row.request_id for row in new_rows], 0, 0))
