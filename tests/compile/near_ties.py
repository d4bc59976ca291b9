"""In bfloat16 two runs may part at a tie, and nowhere else: the rule that says which is one."""

import math

from lab import LLM, SamplingParams


def spacing(logit: float) -> float:
    """The distance between neighbouring bfloat16 numbers at this size: they have 8 significant bits."""
    return math.ldexp(1.0, math.frexp(logit)[1] - 8)


def count_near_ties(reference_llm: LLM, prompts: list[list[int]], reference: list, found: list[list[int]]) -> int:
    """How many outputs part from the reference's, each of them where the reference's own logits are a tie.

    A tie are two logits that lie closer than bfloat16 numbers of their size do. `reference` are the outputs of
    `reference_llm`, with all log-probabilities; a difference of those is one of logits.

    Raises:
        AssertionError: outputs part at another place; it names the gap.
    """
    count = 0
    for prompt, right, token_ids in zip(prompts, reference, found, strict=True):
        pairs = zip(right.token_ids, token_ids, strict=True)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if index is None:
            continue
        best, other = right.token_ids[index], token_ids[index]
        gap = right.logprobs[index][best].logprob - right.logprobs[index][other].logprob
        rounding = spacing(_logit(reference_llm, [*prompt, *right.token_ids[:index]], best))
        assert 0 <= gap < rounding, f"token {index} of prompt {prompt[:8]}: {best} and {other} are {gap} apart, over {rounding}"
        count += 1
    return count


def _logit(llm: LLM, token_ids: list[int], token: int) -> float:
    """The logit of `token` after these."""
    model, seen = llm.engine.model, []
    own = model.logits
    model.logits = lambda hidden_LD: seen.append(own(hidden_LD)) or seen[-1]
    try:
        llm.generate({"prompt_token_ids": token_ids}, SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    finally:
        del model.logits
    return float(seen[-1][-1, token])
