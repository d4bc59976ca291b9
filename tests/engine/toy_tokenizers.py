"""Small tokenizers, one for each way in which tokenizers turn tokens into text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "Hello world, this isn't the end . It's ours, we 've seen it ! What ' s that ?",
    "caf\u00e9 \u0434\u0430 \u65e5\u672c \U0001f336 \U0001f468\u200d\U0001f469\u200d\U0001f467 na\u00efve \u010f\u00e1bel",
]
SPECIALS = ["<s>", "</s>"]


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's scheme: tokens spell bytes. Few merges, so that characters often span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=262, initial_alphabet=sorted(alphabet), special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("na\u00efve \u20ac")])  # plain text with characters that no byte-level token has
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2's scheme: a space is part of the next token, the first one is stripped, unknown characters are bytes."""
    words = ["\u2581Hello", "\u2581world", "llo", "\u2581", "\u2581\u2581", "a", "b", ".", "\u2581is", "caf", "\u00e9"]
    tokens = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """T5's scheme: as sentencepiece, by the Metaspace decoder and without bytes."""
    words = ["\u2581Hello", "\u2581", "\u2581a", "b", "c\u2581d", "\u2581\u2581", "."]
    return _word_level(words, decoders.Metaspace())


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's scheme: a space before every token but the first and the ## ones; transformers cleans up spaces after."""
    words = ["it", "'", "s", "##s", "n't", "do", ".", "?", "!", ",", "m", "ve", "re", "'m", "a", "##b", "'ve", "'re", "'s"]
    return _word_level(words, decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True)


def no_decoder() -> PreTrainedTokenizerFast:
    """No decoder at all: tokens are joined by spaces."""
    return _word_level(["one", "two", "three"], None)


def suffixed() -> PreTrainedTokenizerFast:
    """The old BPE scheme: a suffix marks the end of a word and is a space, but not at the end of the text."""
    return _word_level(["lo", "w</w>", "er</w>", "new", "est</w>"], decoders.BPEDecoder(suffix="</w>"))


ALL = [byte_level, sentencepiece, metaspace, word_piece, no_decoder, suffixed]


def _word_level(words: list[str], decoder, **options) -> PreTrainedTokenizerFast:
    tokens = [*SPECIALS, *words]
    tokenizer = Tokenizer(models.WordLevel(vocab={token: i for i, token in enumerate(tokens)}, unk_token="<s>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options)
