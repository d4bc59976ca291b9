"""Prompts for the golden tests: token ids for the random models, texts for the real one."""

import random

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 18, 23, 24, 25, 31, 32, 33, 40, 47, 48, 49, 57, 63, 64, 65, 66, 80, 90, 95,
           96, 97, 110, 120, 127, 128, 129, 140, 150, 160)  # fmt: skip


def token_prompts(vocab_size: int = 256, seed: int = 0) -> list[list[int]]:
    """One prompt for each of LENGTHS; every third begins like an earlier one, so that prefixes can be shared."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for index, length in enumerate(LENGTHS):
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        if index % 3 == 2:
            shared = rng.choice(prompts)[: length * 2 // 3]
            prompt[: len(shared)] = shared
        if index % 4 == 3:  # a repeated part, which gives the n-gram proposer something to find
            half = length // 2
            prompt[half : 2 * half] = prompt[:half]
        prompts.append(prompt)
    return prompts


TEXTS = (
    "Water boils at",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 4, 8, 16,",
    "Q: What is photosynthesis?\nA:",
    "import numpy as np\n\n",
    "The train leaves at seven, and",
    "In 1969, humans first",
    "SELECT name FROM users WHERE",
    "Roses are red,",
    "A good cup of tea needs",
    "The largest planet in the solar system",
    "<html>\n<head>\n<title>",
    "My favourite season is autumn because",
    "To be or not to be,",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n",
    "She opened the letter and",
    "The capital of Italy is",
    "Monday, Tuesday, Wednesday,",
    "If x = 3 and y = 4, then x + y =",
    "The old clock on the wall",
    "class Stack:\n    def __init__(self):\n",
    "Translate to French: 'good morning' means",
    "A triangle has three",
    "The recipe calls for two cups of",
)

SENTENCES = (
    "The harbour was quiet when the first boats came in, heavy with the night's catch.",
    "Nobody remembered who had planted the lime trees along the avenue, but everyone agreed they should stay.",
    "A bridge carries more than weight; it carries the habits of the towns on either side.",
    "When the power failed, the baker lit candles and went on shaping loaves by touch.",
    "The survey counted eleven kinds of bees in the meadow, two of them thought lost.",
    "He kept a notebook of every repair: date, part, cost, and the sound the engine made before.",
    "Rain on the tin roof made conversation impossible, so they played cards instead.",
    "The librarian sorted returns by colour when she was tired, and by author when she was not.",
    "Maps of the valley disagreed about the river, because the river disagreed with itself each spring.",
    "After the concert the hall smelled of dust, varnish and oranges.",
)


def long_text(num_sentences: int, seed: int) -> str:
    """Running text of shuffled, numbered sentences."""
    rng = random.Random(seed)
    return " ".join(f"({i + 1}) {rng.choice(SENTENCES)}" for i in range(num_sentences))
