"""The settings of a run: frozen and typed, resolved once at start. Torch-free and Hydra-free.

`lab.config` builds them from conf/ and the command line; conf/config.yaml holds the same names with a comment on each.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from lab.errors import UserError, unknown
from lab.sampling_params import SamplingParams

GOODPUT_LIMITS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how it is loaded."""

    path: str = "smollm2"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("model.path is empty: give a name of conf/model, a folder, a .gguf file or a hub id.")
        _at_least("model.max_model_len", self.max_model_len, 1)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV cache: its blocks, its size, and whether prompts share it."""

    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float = 0.92
    memory_bytes: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto"
    scales: str = "auto"  # of a quantized cache: auto, token_head, checkpoint, one, or a file of `lab calibrate`
    enable_prefix_caching: bool = True
    free_behind_window: bool = True
    hash_algo: Literal["blake2b", "sha256"] = "blake2b"

    def __post_init__(self) -> None:
        _at_least("cache.block_size", self.block_size, 1)
        _at_least("cache.num_blocks", self.num_blocks, 1)
        _at_least("cache.memory_bytes", self.memory_bytes, 1)
        if not 0 < self.memory_utilization <= 1:
            raise UserError(f"cache.memory_utilization must be over 0 and at most 1; got {self.memory_utilization:g}.")
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise UserError("cache.num_blocks and cache.memory_bytes both fix the size of the cache: give one of them.")
        if self.scales != "auto" and not self.is_quantized:
            raise UserError(
                f"cache.scales={self.scales}: a cache of cache.dtype={self.dtype} has no scales. Set cache.dtype=int8 or fp8."
            )

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are kept in a dtype that needs scales."""
        return self.dtype in ("fp8", "int8")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What one step may hold, and in which order requests are served."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    policy: str = "fcfs"
    policy_options: dict[str, Any] = field(default_factory=dict)
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    batching: Literal["continuous", "static"] = "continuous"

    def __post_init__(self) -> None:
        _at_least("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("scheduler.max_num_seqs", self.max_num_seqs, 1)
        _at_least("scheduler.long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise UserError(
                f"scheduler.long_prefill_token_threshold={self.long_prefill_token_threshold} splits prompts, which "
                "scheduler.enable_chunked_prefill=false forbids; set one of them only."
            )


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """How the forward pass is compiled, and which batch shapes are captured as graphs."""

    mode: Literal["auto", "none", "piecewise"] = "auto"
    cudagraph_mode: Literal["auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"] = "auto"
    capture_sizes: tuple[int, ...] | None = None
    pad: Literal["auto", "always", "never"] = "auto"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.capture_sizes is not None:
            if not self.capture_sizes:
                raise UserError("compile.capture_sizes is empty: give token counts, or null to derive them.")
            _at_least("compile.capture_sizes", min(self.capture_sizes), 1)


@dataclass(frozen=True, slots=True)
class WandbSettings:
    """Where and how Weights & Biases records a run."""

    mode: Literal["auto", "disabled", "offline", "online"] = "auto"
    project: str = "lab"
    group: str | None = None
    job_type: str = "run"
    name: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    """What is shown and recorded while a run goes on."""

    wandb: WandbSettings = field(default_factory=WandbSettings)
    sinks: tuple[str, ...] = ()  # sink plugins beside the run folder's own and W&B, by name
    progress: Literal["auto", "bar", "log", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class DebugSettings:
    """Knobs for tests and studies: rare events forced, and outputs that do not depend on the batch to the last bit."""

    preempt_every: int = 0  # preempt one running request every so many steps; 0 is never
    check_integrity: bool = False  # verify every invariant of the block manager after each step
    batch_invariant: bool = False  # a request's outputs have the same bits whatever is computed beside it

    def __post_init__(self) -> None:
        _at_least("debug.preempt_every", self.preempt_every, 0)


@dataclass(frozen=True, slots=True)
class PluginChoice:
    """A plugin by name with the options given for it; `auto` lets the capabilities decide."""

    name: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """All of a run's settings; the names and comments are in conf/config.yaml."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    compile: CompileSettings = field(default_factory=CompileSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    debug: DebugSettings = field(default_factory=DebugSettings)
    attention: PluginChoice = field(default_factory=PluginChoice)
    spec: PluginChoice = field(default_factory=lambda: PluginChoice("none"))
    draft_length: PluginChoice = field(default_factory=lambda: PluginChoice("batch"))
    quant: PluginChoice = field(default_factory=PluginChoice)
    moe: PluginChoice = field(default_factory=PluginChoice)
    workload: PluginChoice = field(default_factory=lambda: PluginChoice("prompts"))
    sampling: dict[str, Any] = field(
        default_factory=lambda: {"temperature": 0.0, "max_tokens": 128}
    )  # for requests that say nothing
    goodput: dict[str, float] = field(default_factory=dict)  # limits in ms: ttft, tpot, e2e
    profile: bool = False  # of `lab run`: a timeline, and a table of a decode step's time
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    num_threads: int | None = None  # None: the machine's cores

    def __post_init__(self) -> None:
        """Raises UserError by dotted name for what no run could use."""
        SamplingParams.from_mapping(self.sampling)
        for name, limit_ms in self.goodput.items():
            if name not in GOODPUT_LIMITS:
                raise unknown("limit of goodput", name, GOODPUT_LIMITS)
            if not limit_ms > 0:
                raise UserError(f"goodput.{name} must be over 0 ms; got {limit_ms:g}.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be from 0 to 2**63 - 1; got {self.seed}.")
        _at_least("num_threads", self.num_threads, 1)


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise UserError(f"{name} must be at least {low}; got {value}.")
