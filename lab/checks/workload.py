"""Contract checks of workloads: requests that can be sent, in order of arrival, the same for the same seed."""

import math
from typing import Any

from lab.checks import CheckFailed
from lab.contracts.workload import ModelFacts, WorkItem
from lab.errors import UserError
from lab.registry import Entry
from lab.sampling_params import SamplingParams

MODEL = ModelFacts(
    vocab_size=1000, max_model_len=4096, special_ids=frozenset({0, 1, 2}), encode=lambda text: [3 + ord(c) % 900 for c in text]
)
SEEDS = (0, 1, 12345)


def check_same_seed_same_requests(entry: Entry, options: Any) -> None:
    """Two instances with one seed make the same list, and so does asking one of them again."""
    for seed in SEEDS:
        workload = entry.load()(options, seed)
        first = workload.items(MODEL)
        if workload.items(MODEL) != first:
            raise CheckFailed(f"asked twice with seed {seed}, it gives two different lists")
        if entry.load()(options, seed).items(MODEL) != first:
            raise CheckFailed(f"two instances with seed {seed} give different lists: draw from a generator of the seed alone")


def check_requests_can_be_sent(entry: Entry, options: Any) -> None:
    """Each request has one kind of prompt, token ids of the vocabulary and valid sampling parameters."""
    items = entry.load()(options, 0).items(MODEL)
    if not items:
        raise CheckFailed("it makes no requests")
    for number, item in enumerate(items):
        problem = _problem(item)
        if problem:
            raise CheckFailed(f"request {number} {problem}")


def check_arrivals_are_in_order(entry: Entry, options: Any) -> None:
    """Arrival times are finite, never negative, and never before those of an earlier request."""
    for seed in SEEDS:
        times = [item.arrival_s for item in entry.load()(options, seed).items(MODEL)]
        for number, time in enumerate(times):
            if not math.isfinite(time) or time < 0:
                raise CheckFailed(f"request {number} arrives at {time}")
            if number and time < times[number - 1]:
                raise CheckFailed(
                    f"request {number} arrives at {time:g} s, before request {number - 1} at {times[number - 1]:g} s"
                )


def _problem(item: WorkItem) -> str | None:
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if getattr(item, name) is not None]
    if len(given) != 1:
        return f"must have exactly one of prompt, prompt_token_ids and messages; it has {' and '.join(given) or 'none'}"
    for token in item.prompt_token_ids or ():
        if not 0 <= token < MODEL.vocab_size:
            return f"has token id {token}; the vocabulary has 0 to {MODEL.vocab_size - 1}"
    try:
        SamplingParams.from_mapping(item.sampling, base=SamplingParams(max_tokens=None))
    except UserError as error:
        return f"has wrong sampling parameters: {error}"
    return None
