"""Contract checks of proposers with a model of their own: what they draft for, and with, is there only in a run."""

import dataclasses
from typing import Any

from torch import nn

from lab.checks import CheckFailed, NotDeclared
from lab.contracts.spec import Proposer
from lab.engine.llm import LLM
from lab.engine.stack import build_stack
from lab.registry import Entry
from lab.sampling_params import SamplingParams
from lab.settings import CacheSettings, CompileSettings, DebugSettings, ModelSettings, PluginChoice, SchedulerSettings, Settings

MODEL = "smollm2"
NUM_TOKENS = 16
PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time", "def add(a, b):\n    return a +")
SETTINGS = {  # each is told of when outputs differ under it
    "as they come": {},
    "in chunks of 3 tokens, without async scheduling": {
        "scheduler": SchedulerSettings(max_num_batched_tokens=8, long_prefill_token_threshold=3, async_scheduling=False)
    },
    "with forced preemptions": {"debug": DebugSettings(preempt_every=3), "cache": CacheSettings(num_blocks=64, block_size=4)},
}


def check_outputs(entry: Entry, options: Any) -> None:
    """In runs on a model, greedy outputs are the model's own, whatever the scheduler does, and drafts are made."""
    _must_be_bound(entry)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    runs = _Runs()
    right, _ = runs(PluginChoice("none"), params)
    for how, changes in SETTINGS.items():
        found, num_drafts = runs(_choice(entry, options), params, **changes)
        if found != right:
            number = next(i for i, (its, wanted) in enumerate(zip(found, right, strict=True)) if its != wanted)
            raise CheckFailed(f"{how}: the output of prompt {number} is {found[number]}, without drafts {right[number]}")
        if not num_drafts:
            raise CheckFailed(f"{how}: it proposed nothing in {len(PROMPTS) * NUM_TOKENS} tokens")


def check_seeds(entry: Entry, options: Any) -> None:
    """In runs on a model, a sampling request with a seed gets the same tokens again, alone and beside other requests."""
    _must_be_bound(entry)
    params = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, seed=11, ignore_eos=True)
    choice, runs = _choice(entry, options), _Runs()
    together, _ = runs(choice, params)
    again, _ = runs(choice, params)
    if again != together:
        raise CheckFailed("the second run of the same requests gave other tokens")
    alone, _ = runs(choice, params, prompts=PROMPTS[:1])
    if alone[0] != together[0]:
        raise CheckFailed("a request gets other tokens alone than beside others: its drafts depend on the rows beside it")


def is_bound(proposer: type[Proposer]) -> bool:
    """Whether it can do nothing without a target."""
    return proposer.bind is not Proposer.bind


def _must_be_bound(entry: Entry) -> None:
    if not is_bound(entry.load()):
        raise NotDeclared("it has no model of its own")


def _choice(entry: Entry, options: Any) -> PluginChoice:
    return PluginChoice(entry.name, dataclasses.asdict(options))


class _Runs:
    """Runs on the same weights, each in an engine of its own: reading them takes longer than all that is run."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def __call__(
        self, spec: PluginChoice, params: SamplingParams, prompts: tuple[str, ...] = PROMPTS, **changes: Any
    ) -> tuple[list[list[int]], int]:
        """The tokens of each prompt, and how many drafts were verified."""
        settings = Settings(
            model=ModelSettings(MODEL, dtype="float32", max_model_len=64),
            cache=CacheSettings(num_blocks=64),
            compile=CompileSettings(mode="none", cudagraph_mode="none"),
            draft_length=PluginChoice("fixed"),
            spec=spec,
        )
        with LLM.of(build_stack(dataclasses.replace(settings, **changes), model=self._model)) as llm:
            self._model = llm.engine.model
            num_drafts = 0

            def count(record: dict[str, Any]) -> None:
                nonlocal num_drafts
                num_drafts += record["num_drafts"]

            llm.engine.on_step = count
            outputs = llm.generate(list(prompts), params)
        return [list(output.outputs[0].token_ids) for output in outputs], num_drafts
