"""From a user's prompt and parameters to requests for the engine. Everything is checked here, before any of it gets there."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from lab.engine.engine import Engine
from lab.engine.tokenizer import check_text, encode, encode_chat, word_ids
from lab.errors import UserError, unknown
from lab.sampling_params import SamplingParams
from lab.types import Request

Prompt = str | Mapping[str, Any]

_CONTENT_KEYS = ("prompt", "prompt_token_ids", "messages")
_PROMPT_KEYS = (*_CONTENT_KEYS, "cache_salt", "priority", "arrival_s")


@dataclass(frozen=True, slots=True)
class Submission:
    """A user's request, checked and ready: one engine request for each of its n samples."""

    id: str
    prompt: str | None  # as text; None when it came as ids or messages
    prompt_ids: list[int]
    params: SamplingParams  # as the user gave them
    requests: list[Request]


class Frontend:
    """Tokenises and checks prompts, and makes requests of them.

    A prompt is a string, or a mapping with exactly one of `prompt`, `prompt_token_ids` and `messages`, and optionally
    `cache_salt`, `priority` and `arrival_s` (on the engine's clock; now, by default).

    Seeds: a request without one gets a hash of `seed` and its number, so that runs repeat and no two requests draw alike.

    Args:
        tokenizer: a fast tokenizer of transformers; None for a model that has none, which then takes token ids only.
        defaults: the parameters of requests that give none.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        seed: int = 0,
        defaults: SamplingParams | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingParams()
        self._clock = engine.clock
        self._vocab_size = engine.model_config.vocab_size
        self._eos_ids = frozenset(engine.model_config.eos_ids)
        self._max_model_len = engine.max_model_len
        self._seed = seed
        self._num_submissions = 0
        self._num_requests = 0

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None) -> Submission:
        """Make the requests of one prompt. Raises UserError for whatever is wrong with it; nothing has changed then."""
        given = {"prompt": prompt} if isinstance(prompt, str) else self._checked_mapping(prompt)
        params = params if params is not None else self.defaults
        if not isinstance(params, SamplingParams):
            raise UserError(f"sampling parameters must be a SamplingParams, got {type(params).__name__}.")
        text, prompt_ids = self._prompt_ids(given)
        self._check_prompt(prompt_ids)
        own = self._engine_params(params, len(prompt_ids))
        priority, cache_salt, arrival_s = _extras(given)

        number = self._num_submissions
        self._num_submissions += 1
        submission_id = request_id if request_id is not None else str(number)
        seed = int(params.seed) if params.seed is not None else _derived_seed(self._seed, number)
        arrival_s = arrival_s if arrival_s is not None else self._clock()
        requests = []
        for index in range(params.n):
            # the prompt's log-probabilities are the same for all samples: the first brings them
            wanted = own if index == 0 or own.prompt_logprobs is None else replace(own, prompt_logprobs=None)
            requests.append(
                Request(
                    id=submission_id if params.n == 1 else f"{submission_id}-{index}",
                    prompt_ids=prompt_ids,
                    params=wanted,
                    arrival_s=arrival_s,
                    seed=(seed + index) % 2**64,
                    eos_ids=frozenset() if params.ignore_eos else self._eos_ids,
                    priority=priority,
                    cache_salt=cache_salt,
                    fork_group=submission_id if params.n > 1 else None,
                    arrival_index=self._num_requests + index,
                )
            )
        self._num_requests += params.n
        return Submission(submission_id, text, prompt_ids, params, requests)

    def _checked_mapping(self, prompt: Any) -> Mapping[str, Any]:
        if not isinstance(prompt, Mapping):
            raise UserError(
                f"a prompt is a string or a mapping with one of {', '.join(_CONTENT_KEYS)}; got {type(prompt).__name__}."
            )
        for key in prompt:
            if key not in _PROMPT_KEYS:
                raise unknown("field of a prompt", str(key), _PROMPT_KEYS)
        contents = [key for key in _CONTENT_KEYS if prompt.get(key) is not None]
        if len(contents) != 1:
            found = " and ".join(contents) or "none"
            raise UserError(f"a prompt takes exactly one of {', '.join(_CONTENT_KEYS)}; got {found}.")
        return prompt

    def _prompt_ids(self, given: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        """The prompt's text, where it has one, and its token ids."""
        if given.get("prompt_token_ids") is not None:
            return None, self._checked_ids(given["prompt_token_ids"])
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer: give the prompt as prompt_token_ids.")
        if given.get("messages") is not None:
            messages = given["messages"]
            if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
                raise UserError(f"messages must be a list, got {type(messages).__name__}.")
            return None, encode_chat(self.tokenizer, messages)
        text = given["prompt"]
        if not isinstance(text, str):
            raise UserError(f"prompt must be a string, got {type(text).__name__}; token ids go into prompt_token_ids.")
        check_text(text, "the prompt")
        return text, encode(self.tokenizer, text, add_special_tokens=True)

    def _checked_ids(self, given: Any) -> list[int]:
        if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
            raise UserError(f"prompt_token_ids must be a list of token ids, got {type(given).__name__}.")
        ids = list(given)
        for token_id in ids:
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise UserError(f"prompt_token_ids takes whole numbers, got {token_id!r}.")
            if not 0 <= token_id < self._vocab_size:
                raise UserError(f"prompt_token_ids has token id {token_id}; the vocabulary has 0 to {self._vocab_size - 1}.")
        return [int(token_id) for token_id in ids]

    def _check_prompt(self, prompt_ids: list[int]) -> None:
        if not prompt_ids:
            raise UserError("the prompt is empty: it must have at least one token.")
        if len(prompt_ids) >= self._max_model_len:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens; the context limit is {self._max_model_len}, output included."
            )

    def _engine_params(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """The parameters of one sample: what needs the tokenizer or the context limit is settled."""
        params.check(self._vocab_size)
        for name in ("stop", "bad_words"):
            for i, text in enumerate(getattr(params, name)):
                check_text(text, f"sampling: {name}[{i}]")
        if params.stop and self.tokenizer is None:
            raise UserError("sampling: stop needs a tokenizer, and this model has none; use stop_token_ids.")
        room = self._max_model_len - num_prompt
        if params.min_tokens > room:
            raise UserError(
                f"sampling: min_tokens {params.min_tokens} cannot be reached: the prompt has {num_prompt} tokens; "
                f"the context limit is {self._max_model_len}."
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(params, n=1, max_tokens=max_tokens, bad_words_ids=self._bad_words_ids(params.bad_words))

    def _bad_words_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if words and self.tokenizer is None:
            raise UserError("sampling: bad_words needs a tokenizer, and this model has none; use logit_bias.")
        found: list[tuple[int, ...]] = []
        for word in words:
            spellings = word_ids(self.tokenizer, word)
            if not spellings:
                raise UserError(f"sampling: bad_words has {word!r}, which this model's tokenizer cannot write.")
            found += spellings
        return tuple(found)


def _extras(given: Mapping[str, Any]) -> tuple[int, str | None, float | None]:
    """A prompt's priority, cache_salt and arrival_s, checked."""
    priority, cache_salt, arrival_s = given.get("priority", 0), given.get("cache_salt"), given.get("arrival_s")
    if not isinstance(priority, Integral) or isinstance(priority, bool):
        raise UserError(f"priority must be a whole number, got {priority!r}.")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise UserError(f"cache_salt must be a string that is not empty, got {cache_salt!r}.")
    check_text(cache_salt or "", "cache_salt")
    if arrival_s is None:
        return int(priority), cache_salt, None
    if not isinstance(arrival_s, Real) or isinstance(arrival_s, bool) or not math.isfinite(arrival_s):
        raise UserError(f"arrival_s must be a number of seconds, got {arrival_s!r}.")
    return int(priority), cache_salt, float(arrival_s)


def _derived_seed(seed: int, number: int) -> int:
    """A seed in 0 .. 2**64 - 1, the same in every process."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
