"""Incremental detokenisation: text as the tokens come, with no broken character and nothing taken back.

The joined pieces equal `tokenizer.decode` of all the ids, exactly. Each token costs the same however long the output is:
a byte-level tokenizer (GPT-2's scheme) goes through an incremental UTF-8 decoder; any other decodes a window of the tokens
since the last piece, after one token that was shown before and gives the context (sentencepiece strips the space of a
first token, WordPiece puts one before every other).
"""

import codecs
import json
import re
from typing import Any, Protocol

from lab.engine.stop_strings import partial_match

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # one byte, in the notation of sentencepiece's byte fallback

# What transformers' `clean_up_tokenization` replaces, in its order.
_CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class Detokenizer(Protocol):
    """Turns the token ids of one output into text."""

    def push(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The rest, at the end of the output: an incomplete character becomes U+FFFD."""
        ...


class Vocabulary:
    """What detokenisation must know of a tokenizer; one is shared by all requests.

    `tokenizer` is a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        kinds = _decoder_kinds(self._backend.decoder)
        self._is_byte_level = bool(kinds) and kinds <= {"ByteLevel", "Fuse"}
        self.has_byte_tokens = "ByteFallback" in kinds
        self.special_ids = frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)
        self._cleans_up = _cleans_up(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._alone: dict[int, str] = {}
        self._in_text: dict[int, str] = {}

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one output."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            inner: Detokenizer = _ByteLevelDetokenizer(self, skipped)
        else:
            inner = _WindowDetokenizer(self, skipped)
        return _CleanedUp(inner) if self._cleans_up else inner

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens included, before any clean-up of spaces."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that only the model's padded vocabulary has."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token of a byte-level vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _byte_level_bytes(self.token(token_id) or "")
        return found

    def text_alone(self, token_id: int) -> str:
        """The text of one token at the beginning of a text."""
        found = self._alone.get(token_id)
        if found is None:
            found = self._alone[token_id] = self.decode([token_id])
        return found

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text, its leading space kept; U+FFFD for a part of a character."""
        found = self._in_text.get(token_id)
        if found is None:
            twice = self.decode([token_id, token_id])
            found = self._in_text[token_id] = twice[len(self.text_alone(token_id)) :] or self.text_alone(token_id)
        return found


class _ByteLevelDetokenizer:
    """For vocabularies whose tokens spell bytes: an incomplete character waits in the UTF-8 decoder."""

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """For all other vocabularies: decodes the tokens not yet shown together with the last one that was."""

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were given out already

    def push(self, token_id: int) -> str:
        token = self._vocabulary.token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if self._vocabulary.has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return ""  # a run of byte tokens is text or replacement characters as a whole, so its end must be seen
        text = self._vocabulary.decode(self._window)
        piece = text[self._num_shown :]
        self._window = [token_id]
        self._num_shown = len(self._vocabulary.text_alone(token_id))
        return piece

    def flush(self) -> str:
        piece = self._vocabulary.decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        return piece


class _CleanedUp:
    """Passes another detokenizer's pieces through the replacements of `clean_up_tokenization`, one stage for each."""

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._stages = [_Replacement(old, new) for old, new in _CLEAN_UPS]

    def push(self, token_id: int) -> str:
        piece = self._inner.push(token_id)
        for stage in self._stages:
            piece = stage.feed(piece)
        return piece

    def flush(self) -> str:
        piece = self._inner.flush()
        for stage in self._stages:
            piece = stage.feed(piece) + stage.flush()
        return piece


class _Replacement:
    """`str.replace` on a text that comes in pieces: the beginning of a possible match is held back."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def feed(self, piece: str) -> str:
        *done, rest = (self._held + piece).split(self._old)
        num_held = partial_match(rest, self._old)
        self._held = rest[len(rest) - num_held :]
        return self._new.join([*done, rest[: len(rest) - num_held]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _decoder_kinds(decoder: Any) -> frozenset[str]:
    """The types of a tokenizer's decoder and of its parts."""
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    return frozenset(part["type"] for part in state.get("decoders", [state]))


def _cleans_up(tokenizer: Any) -> bool:
    """Whether `tokenizer.decode` cleans up spaces: as transformers does, a BPE model must ask for it twice."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not is_bpe or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for, as GPT-2 assigned them.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    """An added token is plain text, and shows it by a character that stands for no byte."""
    if all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return token.encode()
