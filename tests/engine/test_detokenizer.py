"""Incremental detokenisation: the joined pieces are the tokenizer's own decoding, and no piece has a broken character."""

import random

import pytest
from transformers import AutoTokenizer

from lab.engine.detokenizer import Vocabulary
from tests import rigs
from tests.engine import toy_tokenizers


def pieces_of(tokenizer, token_ids, skip_special_tokens=True):
    """The piece that each token brings, and the last flush."""
    detokenizer = Vocabulary(tokenizer).detokenizer(skip_special_tokens)
    return [detokenizer.push(token_id) for token_id in token_ids], detokenizer.flush()


@pytest.mark.parametrize("make", toy_tokenizers.ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_joined_pieces_equal_the_full_decoding_of_random_ids(make, skip_special_tokens):
    tokenizer = make()
    vocabulary = Vocabulary(tokenizer)
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer) + 3) for _ in range(rng.randrange(40))]  # some past the vocabulary's end
        detokenizer = vocabulary.detokenizer(skip_special_tokens)
        joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert joined == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), ids


def test_the_clean_up_of_spaces_takes_place():
    tokenizer = toy_tokenizers.word_piece()
    ids = tokenizer.convert_tokens_to_ids(["do", "n't", "it", "'", "s", ".", "it", "'ve", "!"])
    pieces, rest = pieces_of(tokenizer, ids)
    assert "".join(pieces) + rest == "don't it's. it've!"
    assert sum(bool(piece) for piece in pieces) > 4  # and not all at the end


def test_a_long_run_of_incomplete_bytes_costs_no_decoding():
    """A model that is stuck in byte tokens must not make every token decode all the ones before."""
    tokenizer = toy_tokenizers.sentencepiece()
    vocabulary = Vocabulary(tokenizer)
    decoded: list[int] = []
    decode = vocabulary.decode
    vocabulary.decode = lambda ids: decoded.append(len(ids)) or decode(ids)
    ids = tokenizer.convert_tokens_to_ids(["<0xF0>"]) * 2000 + tokenizer.convert_tokens_to_ids(["a"]) * 1000
    detokenizer = vocabulary.detokenizer(True)
    joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert joined == tokenizer.decode(ids)
    assert sum(decoded) < 3 * len(ids)


@pytest.mark.parametrize("make", [toy_tokenizers.byte_level, toy_tokenizers.sentencepiece], ids=lambda make: make.__name__)
def test_text_with_characters_of_many_tokens_streams_unbroken(make):
    tokenizer = make()
    text = "Hello caf\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467 a"
    ids = [i for char in text for i in tokenizer.encode(char.replace(" ", "\u2581"), add_special_tokens=False)]
    if make is toy_tokenizers.byte_level:
        ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = pieces_of(tokenizer, ids)
    assert len(ids) > len(text)
    assert "".join(pieces) + rest == text
    assert "\ufffd" not in text and not any("\ufffd" in piece for piece in pieces)


def test_token_text_keeps_the_leading_space():
    sentencepiece = Vocabulary(toy_tokenizers.sentencepiece())
    tokenizer = toy_tokenizers.sentencepiece()
    hello, byte = tokenizer.convert_tokens_to_ids(["\u2581Hello", "<0xC3>"])
    assert sentencepiece.token_text(hello) == " Hello"
    assert sentencepiece.token_text(byte) == "\ufffd"
    byte_level = toy_tokenizers.byte_level()
    (space,) = byte_level.encode(" ", add_special_tokens=False)
    assert Vocabulary(byte_level).token_text(space) == " "


SMOLLM2_LISTS = {
    "pepper": ([19556, 905, 15107, 230, 131], "Hello world \U0001f336"),
    "czech": ([143, 233, 5415, 82, 1025, 91, 2756], "\u010f\u00e1belsk\u00e9"),
    "cut": ([19556, 905, 15107], "Hello world \ufffd"),
}


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    return AutoTokenizer.from_pretrained(rigs.smollm2())


@pytest.mark.parametrize("name", SMOLLM2_LISTS)
def test_smollm2_streams_a_piece_for_each_completed_character(smollm2_tokenizer, name):
    ids, text = SMOLLM2_LISTS[name]
    pieces, rest = pieces_of(smollm2_tokenizer, ids)
    assert "".join(pieces) + rest == text == smollm2_tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert rest == ("\ufffd" if name == "cut" else "")
    expected = {"pepper": ["Hello", " world", " ", "", "\U0001f336"], "cut": ["Hello", " world", " "]}
    if name in expected:
        assert pieces == expected[name]
    else:
        assert sum(bool(piece) for piece in pieces) >= 4


def test_smollm2_streams_the_family_emoji_of_13_tokens(smollm2_tokenizer):
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    ids = smollm2_tokenizer.encode(family)
    assert len(ids) == 13
    pieces, rest = pieces_of(smollm2_tokenizer, ids)
    assert "".join(pieces) == family and rest == ""
    assert sum(bool(piece) for piece in pieces) == len(family)  # one for each code point


def test_smollm2_joined_pieces_equal_the_full_decoding_of_random_ids(smollm2_tokenizer):
    vocabulary = Vocabulary(smollm2_tokenizer)
    rng = random.Random(1)
    for _ in range(100):
        ids = [rng.randrange(len(smollm2_tokenizer)) for _ in range(50)]
        for skip in (True, False):
            detokenizer = vocabulary.detokenizer(skip)
            joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            assert joined == smollm2_tokenizer.decode(ids, skip_special_tokens=skip)
