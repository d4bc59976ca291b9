"""The model's tokenizer: loading, and its errors in our words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from lab.errors import UserError
from lab.model.source import has_tokenizer


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of transformers in `folder`; None when the folder has none.

    Raises UserError when there is one that cannot be read.
    """
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer  # costs a second, which a model without tokenizer need not pay

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer in {folder} has no tokenizer.json (transformers' fast format), which lab needs.")
    return tokenizer


def check_text(text: str, where: str) -> None:
    """Refuse half a surrogate pair, which JSON can write and no UTF-8 can. Raises UserError naming `where` it is."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} is not text: its character {error.start} is {text[error.start]!r}, half of a surrogate pair."
        ) from None


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """The token ids of `text`. Raises UserError for a character that the vocabulary cannot spell."""
    try:
        # not verbose: it would warn of texts longer than the model's context, which are refused where they are too long
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers package raises the bare type, and nothing of ours does
            raise
        raise UserError(f"the tokenizer cannot encode {_shortened(text)}: {error}") from None


def encode_chat(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """The token ids of a conversation by the model's chat template, ready for the assistant's turn.

    Raises UserError when there is no template, when `messages` is not a list of role and content, or the template refuses it.
    """
    if not tokenizer.chat_template:
        raise UserError("messages need a chat template, and this model's tokenizer has none: send a prompt in its own format.")
    if not messages:
        raise UserError("messages is empty.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"messages[{i}] must be {{'role': ..., 'content': ...}}, got {_shortened(message)}.")
        _check_texts(message, f"messages[{i}]")
        _check_parts(message["content"], f"messages[{i}].content")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"the model's chat template refuses these messages: {error}") from None
    check_text(text, "what the chat template made of the messages")
    return encode(tokenizer, text, add_special_tokens=False)  # the template has written the special tokens


def _check_parts(content: Any, where: str) -> None:
    """Refuse what is no text among the parts of a message: a template would leave its place empty."""
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise UserError(f"{where}[{i}] is of type {part['type']!r}: lab takes text only.")


def _check_texts(value: Any, where: str) -> None:
    """`check_text` for each text in a message, whose content may be a list of parts."""
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_texts(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _check_texts(inner, f"{where}[{i}]")


def word_ids(tokenizer: Any, word: str) -> list[tuple[int, ...]]:
    """The ways a word is written at the beginning of a text and after a space, as token ids; empty when in neither."""
    spellings: list[tuple[int, ...]] = []
    for text in (word, " " + word.lstrip()):
        try:
            ids = tuple(encode(tokenizer, text, add_special_tokens=False))
        except UserError:  # a vocabulary without a space cannot spell the second
            continue
        if ids and ids not in spellings and tokenizer.decode(list(ids)).strip() == word.strip():
            spellings.append(ids)
    return spellings


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
