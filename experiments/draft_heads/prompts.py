"""Writes the prompts that the shipped draft head was trained on: `python prompts.py --count=3000 --seed=0 --out=prompts.jsonl`.

Seeded templates over many kinds of requests: questions, explanations, letters and stories, role play, word problems, logic,
code, extraction, classification, rewriting, translation, and summaries of made-up news of a few hundred words. A line for
each, in the form of the `prompts` workload; every second answer is to be greedy, the others are drawn at temperatures of
0.7 to 1, so that the head sees both.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import material as m


def question(rng: random.Random) -> str:
    topic = rng.choice(m.SCIENCE + m.SOCIETY)
    return rng.choice(
        (
            f"What is the main idea behind {topic}?",
            f"Explain {topic} to a ten year old.",
            f"How does our understanding of {topic} affect daily life? Give two examples.",
            f"What are common misunderstandings about {topic}?",
            f"Describe the history of {topic} in a few paragraphs.",
            f"List five facts about {topic}.",
            f"Compare {topic} with {rng.choice(m.SCIENCE + m.SOCIETY)}.",
            f"Why does {topic} matter? Justify your answer.",
            f"What are the advantages and disadvantages of {topic}?",
            f"Give an outline for a lecture on {topic}.",
        )
    )


def advice(rng: random.Random) -> str:
    topic = rng.choice(m.PRACTICAL)
    return rng.choice(
        (
            f"Give me {rng.randint(3, 8)} tips for {topic}.",
            f"I know nothing about {topic}. Where do I start?",
            f"Write a checklist for {topic}.",
            f"What mistakes do people make when {topic}?",
            f"Make a plan of one week for {topic}.",
            f"What do experts recommend about {topic}, and why?",
        )
    )


def writing(rng: random.Random) -> str:
    genre, subject = rng.choice(m.GENRES), rng.choice(m.SUBJECTS)
    return rng.choice(
        (
            f"Write a {genre} about {subject}.",
            f"Write a {genre} about {subject} that takes place in {rng.choice(m.PLACES)}.",
            f"Compose a {genre} from {rng.choice(m.NAMES)} to {rng.choice(m.NAMES)} about {subject}. Keep it short.",
            f"Write the opening paragraph of a story about {subject}, in a {rng.choice(('funny', 'dark', 'calm'))} tone.",
            f"Draft a professional email to a colleague about {subject}. Be polite and come to the point.",
            f"Write a travel post about {rng.choice(m.PLACES)} with things to see and to eat.",
            f"Describe {rng.choice(m.PLACES)} in vivid detail, using all the senses.",
        )
    )


def role(rng: random.Random) -> str:
    return (
        f"{rng.choice(('Pretend that you are', 'Act as', 'Imagine yourself as', 'Take the role of'))} {rng.choice(m.ROLES)}. "
        f"{rng.choice(m.ROLE_QUESTIONS)}"
    )


def word_problem(rng: random.Random) -> str:
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 9)
    who, other = rng.sample(m.NAMES, 2)
    thing, second = rng.sample(m.THINGS, 2)
    return rng.choice(
        (
            f"{who} has {a * c} {thing}. {who} gives {a} of them to {other} and buys {b} more. How many {thing} does "
            f"{who} have now?",
            f"A shop sells {thing} at ${b} each and {second} at ${c} each. {who} buys {a} {thing} and {b} {second}. How "
            f"much does {who} pay in total?",
            f"{who} reads {a} pages a day. {other} reads {c} times as many. How many pages do they read together in {b} days?",
            f"A tank holds {a * 10} litres. It is filled at {b} litres a minute and loses {c / 2:g} litres a minute through a "
            "leak. How long does it take to fill it?",
            f"{who} packs {a * b} {thing} into boxes of {b}. Each box costs ${c}. How much do the boxes cost?",
            f"There are {a + b} {thing} in a bag, {b} of them are red. {who} takes {c} {thing} and none is red. How "
            f"many {thing} are left that are not red?",
            f"{who} earns ${a} an hour and works {b} hours a day, {c} days a week. {other} earns half as much in that time. "
            f"How much do both earn in {rng.randint(2, 8)} weeks?",
            f"A train travels {a * 5} km in {b} hours. How far does it go in {c} hours at the same speed?",
            f"{who} bought {thing} for ${a * 4} and sold them for {c * 10}% more. What is the profit?",
            f"In a class of {a + 10} children, {c * 10}% play football and {b} play chess. How many play neither, if nobody "
            "plays both?",
            f"Solve for x: {b}x + {a} = {a + b * c}. Show every step.",
            f"What is the area of a rectangle with sides of {a} cm and {b} cm, and its perimeter?",
            f"{who} is {a} years old. In {b} years {who} will be twice as old as {other} is now. How old is {other}?",
        )
    )


def logic(rng: random.Random) -> str:
    a, b, c = rng.sample(m.NAMES, 3)
    return rng.choice(
        (
            f"{a} is taller than {b}, and {b} is taller than {c}. Who is the shortest? Explain.",
            f"{a} stands behind {b} in a queue, and {c} stands in front of {b}. In which order do they stand?",
            f"If all {rng.choice(m.THINGS)} are blue and this is not blue, what follows? Explain your reasoning step by step.",
            f"{a} has {rng.randint(2, 5)} sisters, and each sister has one brother. How many brothers are there? Explain.",
            f"Which word does not belong: {', '.join(rng.sample(m.THINGS, 4))}? Give a reason.",
            f"It takes {rng.randint(2, 6)} hours to dry one shirt in the sun. How long does it take for ten? Explain.",
        )
    )


def code(rng: random.Random) -> str:
    task, language = rng.choice(m.TASKS), rng.choice(m.LANGUAGES)
    return rng.choice(
        (
            f"Write a {language} function that {task}.",
            f"Write a {language} program that {task}. Explain how it works.",
            f"How would you write code that {task} in {language}? Give an example of its use.",
            f"Write unit tests for a {language} function that {task}.",
            f"Write an HTML page with a button that changes its text to '{rng.choice(m.NAMES)}' when it is clicked.",
            "Find the bug: def total(items):\n    sum = 0\n    for i in range(1, len(items)):\n        sum += items[i]\n"
            "    return sum",
            f"What is the time complexity of code that {task}? Explain.",
        )
    )


def news(rng: random.Random, num_paragraphs: int) -> str:
    """A made-up report."""
    town, event = rng.choice(m.TOWNS), rng.choice(m.EVENTS)
    people = [f"{rng.choice(m.NAMES)} {rng.choice(m.SURNAMES)}" for _ in range(4)]
    day = rng.choice(("Monday", "Tuesday", "Wednesday", "Friday", "Saturday", "Sunday"))
    paragraphs = [
        f"{town} is still talking about {event} on {day}. It came after {rng.choice(m.REASONS)}, and {rng.choice(m.RESULTS)}."
    ]
    for _ in range(num_paragraphs):
        who, job, age = rng.choice(people), rng.choice(m.JOBS), rng.randint(19, 78)
        sentences = [
            f"'{rng.choice(m.QUOTES)},' said {who}, {age}, a {job} from {rng.choice(m.TOWNS)}.",
            f"According to the {job}, {rng.choice(m.RESULTS)}.",
            f"The cost is put at ${rng.randint(2, 90)} million, {rng.randint(5, 60)} % more than in {rng.randint(1990, 2019)}.",
            f"{who} added that {rng.choice(m.REASONS)} had played a part, and that {rng.choice(m.RESULTS)}.",
            f"Not everyone agrees: '{rng.choice(m.QUOTES)},' {rng.choice(people)} told reporters outside the town hall.",
            f"A meeting is planned for {rng.randint(1, 28)} {rng.choice(('March', 'June', 'May'))} in {rng.choice(m.TOWNS)}.",
            f"It is the {rng.choice(('second', 'third', 'fourth'))} time in {rng.randint(2, 9)} years that something like "
            f"{rng.choice(m.EVENTS)} has made headlines here.",
        ]
        paragraphs.append(" ".join(rng.sample(sentences, rng.randint(2, 4))))
    return " ".join(paragraphs)


def summary(rng: random.Random) -> str:
    text = news(rng, rng.randint(4, 12))
    return rng.choice(
        (
            f"Summarize: {text}",
            f"Summarize: {text}",
            f"Summarise the following report in three sentences.\n\n{text}",
            f"{text}\n\nWhat happened? Give the main points.",
            f"Write a headline and a short summary for this text:\n{text}",
        )
    )


def extraction(rng: random.Random) -> str:
    text = news(rng, rng.randint(1, 3))
    return rng.choice(
        (
            f"List the names of all people in this text, one a line.\n\n{text}",
            f"Which numbers are in the text, and what do they stand for?\n\n{text}",
            f"Answer from the text: who said what?\n\n{text}",
            f"Turn the text into bullet points.\n\n{text}",
            "Rate each review from 1 (bad) to 5 (good):\n"
            + "\n".join(f"{i}. {line}" for i, line in enumerate(rng.sample(m.SENTIMENTS, 4), 1)),
            f"Is this review positive or negative? {rng.choice(m.SENTIMENTS)}",
            "Return a JSON object with the keys name, age and town for each person: "
            + " ".join(f"{rng.choice(m.NAMES)} is {rng.randint(18, 80)} and lives in {rng.choice(m.TOWNS)}." for _ in range(3)),
        )
    )


def rewriting(rng: random.Random) -> str:
    text = news(rng, 1)
    return rng.choice(
        (
            f"Rewrite this in simple words: {text}",
            f"Make this text more formal: {text}",
            f"Rewrite in the first person: {text}",
            f"Correct the grammar: she dont know why the {rng.choice(m.THINGS)} was sell in {rng.choice(m.TOWNS)} yesterday.",
            f"Translate into {rng.choice(m.TONGUES)}: {rng.choice(m.SENTIMENTS)}",
            f"Translate into {rng.choice(m.TONGUES)}: {rng.choice(m.QUOTES)}.",
        )
    )


KINDS: dict[Callable[[random.Random], str], int] = {  # with how often each is drawn
    question: 5,
    advice: 3,
    writing: 4,
    role: 2,
    word_problem: 7,
    logic: 1,
    code: 3,
    summary: 7,
    extraction: 2,
    rewriting: 1,
}


def prompts(count: int, seed: int) -> list[dict]:
    """So many different requests."""
    rng = random.Random(seed)
    found: dict[str, dict] = {}
    while len(found) < count:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        sampling = {"max_tokens": rng.choice((128, 192, 256, 320)), "seed": len(found)}
        sampling["temperature"] = 0.0 if len(found) % 2 else rng.choice((0.7, 0.85, 1.0))
        text = kind(rng)
        found.setdefault(text, {"messages": [{"role": "user", "content": text}], "sampling": sampling})
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("prompts.jsonl"))
    arguments = parser.parse_args()
    lines = [json.dumps(line, ensure_ascii=False) for line in prompts(arguments.count, arguments.seed)]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
