"""The documented sampling rules, written out in plain Python for one row: slow, in float64, and with nothing shared."""

import math

import torch

from lab.sampling_params import SamplingParams


def edited(
    logits: list[float], params: SamplingParams, prompt: list[int], outputs: list[int], eos_ids: frozenset[int]
) -> list[float]:
    """Logits after everything that comes before temperature, in the documented order."""
    x = list(logits)
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -math.inf
        for word in params.bad_words_ids:
            history = prompt + outputs
            if word[-1] == token and history[len(history) - len(word) + 1 :] == list(word[:-1]):
                x[token] = -math.inf
        ends = token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos)
        if ends and len(outputs) < params.min_tokens:
            x[token] = -math.inf
        x[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in outputs:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= params.frequency_penalty * outputs.count(token)
        x[token] -= params.presence_penalty * (token in outputs)
    return x


def argmax(x: list[float]) -> int:
    return min(range(len(x)), key=lambda token: (-x[token], token))


def distribution(x: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    """(token, probability) of the tokens kept, in the order in which a uniform runs over them."""
    scaled = [value / params.temperature for value in x]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    total, running, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if running >= params.top_p * total:
            break
        running += weights[token]
        kept.append(token)
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    if params.top_k <= 0 and params.top_p == 1.0:
        kept.sort()
    total = sum(weights[token] for token in kept)
    return [(token, weights[token] / total) for token in kept if weights[token] > 0]


def draw(kept: list[tuple[int, float]], uniform: float) -> tuple[int, float]:
    """The token at `uniform`, and how far the uniform is from the nearest edge between two tokens."""
    running, margin, chosen = 0.0, math.inf, None
    for token, probability in kept:
        running += probability
        margin = min(margin, abs(running - uniform))
        if chosen is None and running > uniform:
            chosen = token
    return (kept[-1][0] if chosen is None else chosen), margin


def chi_square_p(counts: list[int], probabilities: list[float]) -> float:
    """The p value of observed counts; a count where the probability is zero gives 0."""
    n = sum(counts)
    if any(c and p <= 0 for c, p in zip(counts, probabilities, strict=True)):
        return 0.0
    cells = [(c, p * n) for c, p in zip(counts, probabilities, strict=True) if p > 0]
    if len(cells) == 1:
        return 1.0
    statistic = sum((c - wanted) ** 2 / wanted for c, wanted in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
