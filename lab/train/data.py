"""Texts to learn from: read from JSON lines, cut into batches in an order that the seed fixes."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.errors import UserError

SORTED_TOGETHER = 256  # texts that are put in order of length, so that a batch has little padding


@dataclass(frozen=True, slots=True)
class Text:
    """A text as tokens. Only what comes after the first `num_prompt` of them is to be proposed one day."""

    ids: list[int]
    num_prompt: int
    number: int = 0  # among all texts of a training


@dataclass(frozen=True, slots=True)
class TextBatch:
    """R texts padded to L tokens. `asked_RL`: where the next token is one that counts."""

    ids_RL: torch.Tensor
    asked_RL: torch.Tensor
    numbers: list[int]  # of the texts


def read_texts(path: Path, encode: Callable[[str], list[int]], vocab_size: int, max_len: int) -> list[Text]:
    """The texts of a file: lines of {"text"}, or of {"prompt_token_ids", "output_token_ids"}.

    Raises UserError with the line's number for what is neither, or has tokens that the model lacks.
    """
    texts = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"train.data: cannot read {path}: {error}.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            texts.append(_parsed(line, f"{path}, line {number}", encode, vocab_size, max_len))
    long_enough = [text for text in texts if len(text.ids) > text.num_prompt + 2]
    if not long_enough:
        raise UserError(f"train.data: {path} has no text of more than two tokens to learn from.")
    return long_enough


def _parsed(line: str, where: str, encode: Callable[[str], list[int]], vocab_size: int, max_len: int) -> Text:
    try:
        data = json.loads(line)
        if "text" in data:
            ids, num_prompt = encode(data["text"]), 1
        else:
            prompt = data["prompt_token_ids"]
            ids, num_prompt = prompt + data["output_token_ids"], len(prompt)
        fits = all(0 <= token < vocab_size for token in ids)
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f'{where}: must be {{"text": ...}} or {{"prompt_token_ids": [...], "output_token_ids": [...]}}.'
        ) from None
    if not fits:
        raise UserError(f"{where}: a token id is outside the model's vocabulary of {vocab_size}.")
    return Text(ids[:max_len], num_prompt)


def frequent_tokens(texts: list[Text], vocab_size: int, count: int) -> torch.Tensor:
    """The `count` tokens that the texts' answers use most, in the order of their ids (int64)."""
    seen = Counter(token for text in texts for token in text.ids[text.num_prompt :])
    ranked = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(ranked[:count]))


def endless(texts: list[Text], batch_tokens: int, seed: int) -> Iterator[TextBatch]:
    """Batches of at most so many tokens, epoch after epoch, each in another order."""
    epoch = 0
    while True:
        yield from one_epoch(texts, batch_tokens, random.Random(f"{seed} {epoch}"))
        epoch += 1


def one_epoch(texts: list[Text], batch_tokens: int, rng: random.Random) -> Iterator[TextBatch]:
    """Every text once."""
    order = list(texts)
    rng.shuffle(order)
    groups: list[list[Text]] = []
    for first in range(0, len(order), SORTED_TOGETHER):
        group: list[Text] = []
        for text in sorted(order[first : first + SORTED_TOGETHER], key=lambda text: len(text.ids)):
            if group and len(text.ids) * (len(group) + 1) > batch_tokens:
                groups.append(group)
                group = []
            group.append(text)
        groups.append(group)
    rng.shuffle(groups)
    yield from map(batch_of, groups)


def batch_of(texts: list[Text]) -> TextBatch:
    """The texts as tensors."""
    longest = max(len(text.ids) for text in texts)
    ids_RL = torch.zeros(len(texts), longest, dtype=torch.int64)
    asked_RL = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids_RL[row, : len(text.ids)] = torch.tensor(text.ids)
        asked_RL[row, max(text.num_prompt - 1, 0) : len(text.ids) - 1] = True
    return TextBatch(ids_RL, asked_RL, [text.number for text in texts])


def digest(texts: list[Text]) -> str:
    """Names the data, so that a training is not resumed on other texts."""
    found = hashlib.sha256()
    for text in texts:
        found.update(repr((text.ids, text.num_prompt)).encode())
    return found.hexdigest()[:16]
