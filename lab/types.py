"""What flows through the engine: requests, the plan of a step, and what came of it. Torch-free.

Legend of the shape letters used in tensor names all over the project:

    T tokens of the step   R rows (requests of the step)   L logit rows      N query heads    K KV heads
    H head dim             D hidden size                   V vocabulary      P blocks in the pool
    B tokens per block     M blocks per row                S draft tokens    E experts
    A experts per token    F expert hidden                 I, O a linear layer's input and output features

Host mirrors of device tensors end in `_cpu`; counts start with `num_`.
A slot is a place for one token's keys and values: block * B + offset.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from lab.sampling_params import SamplingParams

Watch = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # (name, call) -> a call that does the same, and is timed


class Status(Enum):
    """Where a request stands. PREEMPTED waits again, with its output kept and its blocks given back."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API (`error`: the engine could not go on with it)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. The front fills the first group once; only the scheduler writes the rest."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams  # n is 1 here: the front made one request of each sample
    arrival_s: float  # on the engine's clock
    seed: int  # always set: the request's own, or drawn by the front
    eos_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower is served first
    cache_salt: str | None = None
    fork_group: str | None = None  # siblings of one n > 1 request share their prompt's blocks under this key
    arrival_index: int = 0  # order of arrival, breaks ties

    # written by the scheduler
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt + accepted output; append-only
    num_computed: int = 0  # tokens whose keys and values are in the cache once the submitted steps are done
    num_in_flight: int = 0  # tokens that submitted steps may still add, drafts counted as accepted
    num_prefill: int = 0  # tokens it had at its last admission: until so many are computed it has nothing to sample
    max_len: int = 0  # tokens in all at which it ends, by max_tokens or the context limit
    num_prompt_logprobs: int = 0  # prompt positions whose log-probabilities have been passed on
    draft_ids: list[int] = field(default_factory=list)  # to be verified in the next step
    num_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    scheduled_s: float | None = None  # first admission into a step, on the engine's clock
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it

    # written by the block manager
    block_ids: list[int] = field(default_factory=list)  # the block table, of several groups as lab.kv.grouped has it
    block_hashes: list[bytes] = field(default_factory=list)  # chain over the full blocks of token_ids
    num_registered: int = 0  # leading full blocks that are in the prefix cache
    kept_from: list[int] = field(default_factory=list)  # of each kind of KV groups: its first block that is not given back

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that gets a device row in this step: newly admitted, or resumed after a preemption."""

    request_id: str
    token_ids: list[int]  # prompt, and for a resumed request its output so far
    num_prompt: int
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int]
    block_ids: list[int]  # of several KV groups side by side, -1 for what a group does not keep (lab.kv.grouped)
    num_computed: int  # tokens already in the cache (prefix hit)


@dataclass(slots=True)  # one a row and step: frozen would double what it costs to make one
class Chunk:
    """The share of one request in a step: positions start .. start + num_tokens - 1.

    When the chunk `samples`, its last `num_drafts` positions hold drafts and the logits of the last 1 + num_drafts
    positions are used. Under async scheduling `start` and `num_drafts` are upper bounds while a step with drafts is in
    flight; the runner, which has verified that step by then, puts the true ones in their place.
    """

    request_id: str
    start: int
    num_tokens: int
    num_drafts: int
    samples: bool
    new_block_ids: list[int]  # appended to the row's block table; empty for a NewRow, which brings its own
    draft_ids: list[int]  # the drafts themselves; empty under async scheduling, where the rows hold them


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, plain ints throughout so that it can cross a process boundary."""

    index: int
    new_rows: list[NewRow]
    chunks: list[Chunk]
    freed: list[str]  # requests whose rows end before this step: finished, aborted or preempted
    num_tokens: int  # sum over chunks
    preempted: int  # requests preempted while planning this step


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the most likely ones (which may repeat it)."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token, 1 is the most likely


@dataclass(slots=True)  # one a row and step: frozen would double what it costs to make one
class RowResult:
    """What a step did for one request."""

    request_id: str
    token_ids: list[int]  # accepted drafts and one more token; empty when the chunk did not sample
    num_drafts: int = 0  # drafts verified
    logprobs: list[TokenLogprobs] | None = None  # one per token of token_ids, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions start+1 .. of this chunk, when asked for
    draft_ids: list[int] = field(default_factory=list)  # proposed for the next step
    draft_depth: int = 0  # the most of the drafts verified that could be accepted: all of a chain, the depth of a tree

    @property
    def num_accepted(self) -> int:
        return max(len(self.token_ids) - 1, 0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step; `rows` is in the order of the step's chunks."""

    index: int
    rows: list[RowResult]
    ms: float  # execution time in the runner
    mode: str = "none"  # dispatch mode: none | piecewise | full
    padded_to: int = 0  # tokens the model ran on, padding included
    draft_ms: float = 0.0  # of it, proposing drafts
    num_tokens: int = 0  # computed, padding not counted: fewer than planned where drafts were counted that were not made


@dataclass(slots=True)  # one a row and step: frozen would double what it costs to make one
class Update:
    """News about one request, from the scheduler to the front."""

    request_id: str
    token_ids: list[int]  # new tokens, cut at the stop token or the length limit
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_accepted: int = 0  # drafts accepted among token_ids
    num_drafts: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    error: str | None = None  # with finish_reason ERROR
    draft_depth: int = 0  # as in RowResult
