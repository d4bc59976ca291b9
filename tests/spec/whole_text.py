"""What a proposer with a cache of its own drafts under all kinds of batches, to be compared with what whole texts give."""

import numpy as np

from lab import SamplingParams

BASE = [
    "draft_length=fixed",
    "compile.mode=none",
    "model.dtype=float32",
    "model.max_model_len=128",
    "num_threads=1",
    "debug.check_integrity=true",
]
SETTINGS = {
    "plain": [],
    "chunks-of-7": ["scheduler.max_num_batched_tokens=7"],
    "synchronous": ["scheduler.async_scheduling=false", "scheduler.max_num_batched_tokens=16"],
    "preempted": ["cache.num_blocks=24", "cache.block_size=4", "scheduler.max_num_batched_tokens=48"],
    "block-size-1": ["cache.block_size=1"],
}


def generate(llm, prompts, **params):
    """The greedy outputs, and how many drafts were accepted in each step."""
    params = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True} | params
    outs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], SamplingParams(**params))
    return [o.outputs[0].token_ids for o in outs], [o.outputs[0].timeline.accepted_counts for o in outs]


def texts_and_drafts(monkeypatch, proposer, llm, *, preempts):
    """All (text, drafts after it) that the proposer's class made while requests that share a prefix ran twice."""
    seen = []
    plain = proposer.propose

    def propose(self, view):
        draft = plain(self, view)
        for row, length, ids in zip(view.rows_R, view.lengths_R, draft.token_ids, strict=True):
            seen.append((view.tokens_RC[row, :length].tolist(), ids))
        return draft

    monkeypatch.setattr(proposer, "propose", propose)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 36).tolist()
    prompts = [shared + rng.integers(0, 256, n).tolist() for n in (1, 5, 9)] + [[4], rng.integers(0, 256, 21).tolist()]
    for _ in range(2):  # the second time over what the first has cached
        generate(llm, prompts, max_tokens=7)
    assert llm.engine.scheduler.num_preemptions > 0 if preempts else llm.engine.blocks.stats.hits > 0
    made = [(text, ids) for text, ids in seen if ids]
    assert len(made) >= 2 * len(prompts)
    assert len({tuple(ids) for _, ids in made}) > 5
    return made
