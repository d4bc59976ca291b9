"""How a request's tokens are chosen and when it ends. Torch-free; every bad value is refused here, by name."""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from lab.errors import UserError, nearest

MAX_LOGPROBS = 1024
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,10}")  # JSON has only strings for keys
GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing logits by it would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters in the names that vLLM and the OpenAI API use.

    Order in which they act on the logits: allowed_token_ids, bad_words, min_tokens, logit_bias, repetition, frequency and
    presence penalty, temperature, top_k, top_p (over what top_k left, renormalised), min_p (relative to the most likely
    token, after temperature). Log-probabilities are those of the unchanged logits; `logprobs` and `prompt_logprobs` ask for
    those of so many most likely tokens beside the one that is there: 0 to 1024 (MAX_LOGPROBS), and no more than the
    vocabulary has.

    Raises UserError naming the field for a value out of range; `check` adds the limits that depend on the model.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # on tokens of the output
    frequency_penalty: float = 0.0  # on tokens of the output, by count
    repetition_penalty: float = 1.0  # on tokens of prompt and output
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context limit
    min_tokens: int = 0
    logprobs: int | None = None  # so many alternatives beside the chosen token, 1024 at most
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    seed: int | None = None
    skip_special_tokens: bool = True
    max_drafts: int | None = None  # drafts verified in a step at most; 0: this request does without. It changes no output
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # written by the front, which has the tokenizer

    def __post_init__(self) -> None:
        for name in ("bad_words", "stop"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _token_ids(name, value))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        self._check_numbers()
        if self.allowed_token_ids == ():
            raise UserError("sampling: allowed_token_ids is empty, so no token could be chosen; leave it out to allow all.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"sampling: min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}.")

    def _check_numbers(self) -> None:
        _whole("n", self.n, 1, 1024)
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, 2**31)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _real("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _whole("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_drafts is not None:
            _whole("max_drafts", self.max_drafts, 0, 2**31)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"sampling: {name} must be true or false, got {getattr(self, name)!r}.")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check(self, vocab_size: int) -> None:
        """Refuse token ids outside the model's vocabulary, and more logprobs than it has tokens. Raises UserError."""
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise UserError(f"sampling: {name} is {count}; the vocabulary has {vocab_size} tokens.")
        ids = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, values in ids.items():
            for token in values:
                if not 0 <= token < vocab_size:
                    raise UserError(f"sampling: {name} has token id {token}; the vocabulary has 0 to {vocab_size - 1}.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], base: "SamplingParams | None" = None) -> "SamplingParams":
        """Build from plain data, over `base` where given. Raises UserError for an unknown name."""
        names = [f.name for f in fields(cls) if f.name != "bad_words_ids"]
        for key in values:
            if key not in names:
                guess = nearest(key, names)
                hint = f" Did you mean '{guess}'?" if guess else ""
                raise UserError(f"sampling: no parameter named '{key}'.{hint}\nAvailable: {', '.join(names)}.")
        return replace(base, **values) if base is not None else cls(**values)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else () if value is None else value
    if isinstance(items, (bytes, Mapping)) or not isinstance(items, Iterable):
        raise UserError(f"sampling: {name} takes a string or a list of strings, got {value!r}.")
    items = tuple(items)
    for item in items:
        if not isinstance(item, str) or not item:
            raise UserError(f"sampling: {name} takes strings that are not empty, got {item!r}.")
    return items


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UserError(f"sampling: {name} takes a list of token ids, got {value!r}.")
    value = tuple(value)
    for item in value:
        if not isinstance(item, Integral) or isinstance(item, bool) or item < 0:
            raise UserError(f"sampling: {name} takes token ids (whole numbers from 0), got {item!r}.")
    return tuple(int(item) for item in value)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise UserError(f"sampling: logit_bias takes a mapping of token id to bias, got {value!r}.")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        is_id = isinstance(key, Integral) and not isinstance(key, bool)
        if not is_id and not (isinstance(key, str) and _WHOLE_NUMBER.fullmatch(key)):
            raise UserError(f"sampling: logit_bias has the key {key!r}, which is not a token id.")
        token = int(key)
        if token < 0:
            raise UserError(f"sampling: logit_bias has token id {token}; ids start at 0.")
        _real(f"logit_bias[{token}]", amount, -math.inf, math.inf)
        bias[token] = float(amount)
    return bias


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UserError(f"sampling: {name} must be a whole number, got {value!r}.")
    if not low <= value <= high:
        raise UserError(f"sampling: {name} must be from {low} to {high}, got {value}.")


def _real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= value <= sys.float_info.max:  # false for NaN too
        raise UserError(f"sampling: {name} must be a finite number, got {value!r}.")
    if value < low or value > high or (open_low and value == low):
        bounds = f"{'over' if open_low else 'at least'} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
        shown = bounds if not math.isinf(low) else "a finite number"
        raise UserError(f"sampling: {name} must be {shown}, got {float(value):g}.")
