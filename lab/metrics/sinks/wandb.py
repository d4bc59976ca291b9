"""Weights & Biases: the run's settings, series, summary and folder."""

import logging
import netrc
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab.contracts.sink import RunInfo, Sink
from lab.registry import register
from lab.settings import WandbSettings

log = logging.getLogger("lab")

DEFAULT_URL = "https://api.wandb.ai"
ANSWER_SECONDS = 3.0  # for the server to be reachable at all
INIT_SECONDS = 20.0
UPLOAD_SECONDS = 60.0  # at the end of the run; what is left can be sent with `wandb sync`
SERIES_SECONDS = 1.0  # one point of every series so often
RUN_FILES = ("config.yaml", "resolved.json", "env.json", "metrics.json", "requests.jsonl", "steps.jsonl", "trace.json")
SERIES = (
    *("ms", "num_tokens", "num_requests", "kv_used_blocks", "waiting", "running", "preempted"),
    *("num_drafts", "num_drafting", "num_accepted", "draft_ms"),
)


@register("sink", "wandb")
class WandbSink(Sink):
    """Weights & Biases, offline unless a key and a network are there."""

    Options = WandbSettings

    def start(self, run: RunInfo) -> None:
        import wandb

        options = self.options
        self._folder = run.folder
        self._sums: dict[str, float] = dict.fromkeys(SERIES, 0.0)
        self._num_summed = 0
        self._last: dict[str, Any] = {}
        self._next_s = time.monotonic()
        limits = {"init_timeout": INIT_SECONDS, "finish_timeout": UPLOAD_SECONDS, "login_timeout": INIT_SECONDS}
        known = {name: value for name, value in limits.items() if name in wandb.Settings.model_fields}
        self._run = wandb.init(
            mode=choose_mode(options.mode),
            project=options.project,
            group=options.group,
            job_type=options.job_type,
            name=options.name or run.folder.name,
            tags=list(options.tags),
            dir=str(run.folder),
            config={**flatten(run.config), **flatten({"resolved": _names(run.resolved)})},
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, save_code=False, **known),
        )

    def step(self, record: dict[str, Any]) -> None:
        """Series hold the mean over the steps since the last point: a point for each step would slow the steps."""
        self._num_summed += 1
        for name in SERIES:
            self._sums[name] += record[name]
        self._last = record
        if time.monotonic() >= self._next_s:
            self._log_point()

    def request(self, record: dict[str, Any]) -> None:
        """Requests go with the run folder."""

    def finish(self, metrics: dict[str, Any], exit_code: int) -> None:
        import wandb

        if self._num_summed:
            self._log_point()
        self._run.summary.update(flatten(metrics))
        for name, bars in acceptance_bars(metrics).items():
            table = wandb.Table(columns=["of", "acceptance"], data=[list(bar) for bar in bars.items()])
            self._run.log({f"spec/{name}": wandb.plot.bar(table, "of", "acceptance", title=f"acceptance {name}")})
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for name in RUN_FILES:
            if (path := self._folder / name).exists():
                artifact.add_file(str(path), policy="immutable")  # in place: no copy is staged elsewhere
        self._run.log_artifact(artifact)
        self._run.finish(exit_code=exit_code)

    def _log_point(self) -> None:
        sums = self._sums
        point = {f"step/{name}": total / self._num_summed for name, total in sums.items()}
        if sums["num_drafts"]:
            point["spec/acceptance_rate"] = sums["num_accepted"] / sums["num_drafts"]
            point["spec/mean_accepted_length"] = 1 + sums["num_accepted"] / sums["num_drafting"]
            point["spec/draft_ms_share"] = sums["draft_ms"] / sums["ms"]
        self._run.log({**point, "step/t_s": self._last["t_s"]}, step=self._last["step"])
        self._sums = dict.fromkeys(SERIES, 0.0)
        self._num_summed = 0
        self._next_s = time.monotonic() + SERIES_SECONDS


def acceptance_bars(metrics: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The charts of how often drafts were accepted: by position, and by category where requests have one."""
    charts: dict[str, dict[str, float]] = {}
    if spec := metrics.get("spec"):
        by_position = enumerate(spec["acceptance_per_position"], start=1)
        charts["by position"] = {str(position): share for position, share in by_position}
        its = {name: found["acceptance_rate"] for name, found in metrics.get("categories", {}).items() if "alpha" in found}
        charts |= {"by category": its} if its else {}
    return charts


def choose_mode(asked: str) -> str:
    """The mode for W&B: `auto` is WANDB_MODE if set, else online with a key and a server that answers, else offline."""
    if asked != "auto":
        return asked
    url = os.environ.get("WANDB_BASE_URL", DEFAULT_URL)
    from_environment = os.environ.get("WANDB_MODE")
    if from_environment in ("online", "offline", "disabled"):
        return from_environment
    if not has_key(url):
        log.info("W&B: offline, no API key is configured")
        return "offline"
    if not answers(url):
        log.info("W&B: offline, %s does not answer", url)
        return "offline"
    return "online"


def has_key(url: str) -> bool:
    """Whether a key for this server is configured, in the environment or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(urlsplit(url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def answers(url: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether the server takes a connection within `seconds`, looking up its name included, which has no timeout of its own."""
    parts = urlsplit(url)
    connected = threading.Event()

    def connect() -> None:
        try:
            with socket.create_connection((parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)), seconds):
                connected.set()
        except OSError:
            return

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return connected.is_set()


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names; everything else as it is."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _names(resolved: dict[str, Any]) -> dict[str, Any]:
    """Only which plugin serves each component; the reasons are in resolved.json."""
    return {kind: record["name"] for kind, record in resolved.items() if isinstance(record, dict) and "name" in record}
