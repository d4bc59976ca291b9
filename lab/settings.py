"""The settings of a run: frozen and typed, resolved once at start. Torch-free and Hydra-free.

`lab.config` builds them from conf/ and the command line; conf/config.yaml holds the same names with a comment on each.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ModelSettings:
    path: str = "smollm2"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class CacheSettings:
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float = 0.92
    memory_bytes: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    enable_prefix_caching: bool = True
    hash_algo: Literal["blake2b", "sha256"] = "blake2b"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    batching: Literal["continuous", "static"] = "continuous"


@dataclass(frozen=True, slots=True)
class WandbSettings:
    mode: Literal["auto", "disabled", "offline", "online"] = "auto"
    project: str = "lab"
    group: str | None = None
    job_type: str = "run"
    name: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    wandb: WandbSettings = field(default_factory=WandbSettings)
    progress: Literal["auto", "bar", "log", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class DebugSettings:
    """Knobs that force rare events, so that tests and studies can reach them."""

    preempt_every: int = 0  # preempt one running request every so many steps; 0 is never
    check_integrity: bool = False  # verify every invariant of the block manager after each step


@dataclass(frozen=True, slots=True)
class PluginChoice:
    """A plugin by name with the options given for it; `auto` lets the capabilities decide."""

    name: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    debug: DebugSettings = field(default_factory=DebugSettings)
    attention: PluginChoice = field(default_factory=PluginChoice)
    spec: PluginChoice = field(default_factory=lambda: PluginChoice("none"))
    quant: PluginChoice = field(default_factory=PluginChoice)
    moe: PluginChoice = field(default_factory=PluginChoice)
    workload: PluginChoice = field(default_factory=lambda: PluginChoice("prompts"))
    sampling: dict[str, Any] = field(default_factory=dict)  # defaults for requests that say nothing themselves
    goodput: dict[str, float] = field(default_factory=dict)  # limits in ms: ttft, tpot, e2e
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    num_threads: int | None = None  # None: the machine's cores
