"""Drafts that are known to be right, as far as they shall be: an upper bound, and any acceptance on any model.

What a request will put out is known in one of two ways:

- A file tells: JSON lines with `output_token_ids`, and `id` or `prompt_token_ids` to find the request by. requests.jsonl of an
  earlier run of the same workload is such a file. A line may have an `acceptance` of its own.
- The request has one token in `allowed_token_ids`: it can put out no other, whatever the weights are. So a model of random
  weights, `model.load_format=dummy`, shows what drafts of a given acceptance bring at its size.

Drafts are right with the probabilities of `acceptance`, by a hash of seed, request and position: the same in every run.
"""

import json
import logging
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from lab.api import Capabilities, Draft, Proposer, ProposeView, UserError, register

from ._options import check_whole

log = logging.getLogger("lab")


@dataclass(frozen=True, slots=True)
class _Output:
    """What a request is known to put out: the tokens of a file, or one token for ever."""

    token_ids: list[int]
    forever: int | None
    acceptance: tuple[float, ...]


@dataclass(slots=True)
class _Row:
    """A row whose output is known, as far as it has been seen to be so."""

    request_id: str
    num_prompt: int
    output: _Output
    num_seen: int = 0


@register("spec", "replay")
class Replay(Proposer):
    """Proposes a known output: that of a file, or of requests that allow one token alone; right as often as is asked for."""

    capabilities = Capabilities(features={"batch_invariant"})

    @dataclass(frozen=True)
    class Options:
        path: str | None = None  # JSON lines with output_token_ids, and id or prompt_token_ids; a run's requests.jsonl
        num_drafts: int = 5  # tokens proposed for a row and step
        acceptance: tuple[float, ...] = (1.0,)  # probability that the draft of a position is right; the last one holds on
        seed: int = 0  # of which drafts are right

    def __init__(self, options: Options) -> None:
        """Raises UserError for a file that cannot be read or a line that is wrong, with its number."""
        super().__init__(options)
        check_whole("num_drafts", options.num_drafts)
        if not _is_acceptance(options.acceptance):
            raise UserError(f"spec.acceptance takes probabilities from 0 to 1, got {list(options.acceptance)}.")
        self.num_drafts = options.num_drafts
        self._known = _read(Path(options.path).expanduser(), options.acceptance) if options.path is not None else {}
        self._rows: dict[int, _Row] = {}

    def start(self, row: int, request: Any) -> None:
        prompt = tuple(request.token_ids[: request.num_prompt])
        allowed = request.params.allowed_token_ids
        output = self._known.get(prompt) or self._known.get(request.request_id)
        if output is None and allowed is not None and len(allowed) == 1:
            output = _Output([], allowed[0], self.options.acceptance)
        if output is not None:
            self._rows[row] = _Row(request.request_id, request.num_prompt, output)
        elif self.options.path is not None:
            log.warning("spec=replay: request %s is not in %s and gets no drafts", request.request_id, self.options.path)

    def end(self, row: int, tokens: np.ndarray) -> None:
        self._rows.pop(row, None)

    def propose(self, view: ProposeView) -> Draft:
        counts = np.minimum(view.limits_R, self.num_drafts).tolist()
        rows = zip(view.rows_R.tolist(), view.lengths_R.tolist(), counts, strict=True)
        return Draft([self._continuation(row, view.tokens_RC[row, :length], count) for row, length, count in rows])

    def _continuation(self, number: int, tokens: np.ndarray, count: int) -> list[int]:
        row = self._rows.get(number)
        if row is None or count < 1:
            return []
        position = len(tokens) - row.num_prompt
        if row.output.forever is not None:
            right = [row.output.forever] * count
        else:
            seen = tokens[row.num_prompt + row.num_seen :].tolist()
            if seen != row.output.token_ids[row.num_seen : position]:
                log.warning("spec=replay: request %s went another way than its file says: no more drafts", row.request_id)
                del self._rows[number]
                return []
            row.num_seen = position
            right = row.output.token_ids[position : position + count]
        return self._spoiled(right, row, position)

    def _spoiled(self, right: list[int], row: _Row, position: int) -> list[int]:
        """The drafts, wrong from the first one on that shall be refused."""
        acceptance = row.output.acceptance
        for place in range(len(right)):
            share = acceptance[min(place, len(acceptance) - 1)]
            name = f"{self.options.seed}/{row.request_id}/{position}/{place}".encode()
            if int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >= share * 2**64:
                return right[:place] + [token - 1 if token else 1 for token in right[place:]]
        return right


def _is_acceptance(values: Any) -> bool:
    """Whether these are probabilities by position, one at least."""
    numbers = isinstance(values, list | tuple) and all(type(value) in (int, float) for value in values)
    return numbers and len(values) > 0 and all(0 <= value <= 1 for value in values)


def _read(path: Path, acceptance: tuple[float, ...]) -> dict[Any, _Output]:
    """The outputs of a file, by prompt and by the engine's request id."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"spec.path: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"spec.path: {path} is not UTF-8 text (byte {error.start}).") from None
    known: dict[Any, _Output] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            data = _line(line, f"spec.path: {path}, line {number}")
            output = _Output(data["output_token_ids"], None, tuple(data.get("acceptance", acceptance)))
            if "prompt_token_ids" in data:
                known[tuple(data["prompt_token_ids"])] = output
            elif data.get("index", 0) == 0:
                known[data["id"]] = output
            if "id" in data:
                known[f"{data['id']}-{data.get('index', 0)}"] = output  # of a request for several samples
    if not known:
        raise UserError(f"spec.path: {path} holds no outputs.")
    return known


def _line(line: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}.") from None
    if not isinstance(data, dict) or "output_token_ids" not in data or not ("id" in data or "prompt_token_ids" in data):
        raise UserError(f"{where}: must be an object with output_token_ids, and id or prompt_token_ids.")
    for key in ("output_token_ids", "prompt_token_ids"):
        value = data.get(key, [])
        if not isinstance(value, list) or any(type(token) is not int or token < 0 for token in value):
            raise UserError(f"{where}: {key} must be a list of token ids.")
    if not _is_acceptance(data.get("acceptance", [1.0])):
        raise UserError(f"{where}: acceptance must be a list of probabilities from 0 to 1.")
    if not isinstance(data.get("id", ""), str):
        raise UserError(f"{where}: id must be text.")
    return data
