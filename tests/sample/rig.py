"""Small ways to drive a Sampler: requests by their parameters, scripted models, and many draws at once."""

import torch

from lab.sample.sampler import Sampler
from lab.sampling_params import SamplingParams

CPU = torch.device("cpu")


def make(requests, vocab_size, max_rows=None):
    """A sampler with one row for each (params, prompt, outputs), seeded by its index unless the params have a seed."""
    sampler = Sampler(max_rows or len(requests), vocab_size, CPU)
    for row, (params, prompt, outputs) in enumerate(requests):
        seed = params.seed if params.seed is not None else row
        sampler.add(row, params, seed, frozenset(), prompt + outputs, len(prompt))
    return sampler


def echo_logits(token, vocab_size=64):
    """The logits of a model that says the same token again: 7.9997 for it, 0 for the others."""
    x_V = torch.zeros(vocab_size)
    x_V[token] = 7.9997
    return x_V


def count_logits(token, vocab_size=64):
    """The logits of a model that says the next token."""
    return echo_logits((token + 1) % vocab_size, vocab_size)


def generate(params, prompt, logits_of, max_tokens, propose=lambda tokens: [], eos_ids=frozenset(), resume_every=None):
    """Run one request to max_tokens with drafts from `propose`; `resume_every` takes its row away every so many steps.

    Returns the outputs and how many drafts were accepted.
    """
    first = logits_of(prompt[-1])
    sampler = Sampler(4, len(first), CPU)
    tokens, accepted, steps, row = list(prompt), 0, 0, 0
    sampler.add(row, params, 42, eos_ids, tokens, len(prompt))
    while len(tokens) < len(prompt) + max_tokens:
        if resume_every and steps % resume_every == 0:
            sampler.remove(row)
            row = (row + 1) % 4
            sampler.add(row, params, 42, eos_ids, tokens, len(prompt))
        drafts = propose(tokens)
        logits_LV = torch.stack([logits_of(token) for token in [tokens[-1], *drafts]])
        out = sampler.run(logits_LV, [row], [len(drafts)], [drafts]).token_ids[0]
        accepted += len(out) - 1
        tokens += out
        steps += 1
    return tokens[len(prompt) :][:max_tokens], accepted


GREEDY = SamplingParams(temperature=0.0)
