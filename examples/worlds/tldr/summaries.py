"""Summaries in small, after TL;DR (arXiv 2009.01325): made-up posts, noisy references, and preferences by a rule.

A post tells 1 to 3 salient facts (who did what to whom, how it ended) among fillers, 4 to 7 sentences in all. A good
summary has a clause for every salient fact and no other clause: `Tom sold the car to Ana and Eva moved out.`

`quality` is the rule: the share of salient facts that are told, less penalties. A clause that the post does not say (a
wrong name or thing, broken grammar) costs 0.5; a filler or a repetition costs 0.25. If two summaries have the same
quality, the shorter one is better. Preferences follow the rule, but for a share of flipped labels.

Posts fall into fixed splits by a hash of the set of their salient facts, so no set is in two splits. A single clause of
a larger set may be in a post of another split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, permutations
from types import MappingProxyType
from typing import Any

from examples.worlds.rows import bucket_of, distinct_prompts
from tba.api import Prompt

EOS = "<|endoftext|>"
"""Ends a reference, as in the data set of the paper."""
SPLITS = MappingProxyType(
    {
        "sft": range(30),
        "train": range(30, 60),
        "validation": range(60, 68),
        "preferences_proxy": range(68, 80),
        "preferences_gold": range(80, 96),
        "preferences_heldout": range(96, 100),
    }
)
"""Split -> its hash buckets, of 100."""
NUM_ROWS = MappingProxyType(
    {
        "sft": 8000,
        "train": 4000,
        "validation": 512,
        "preferences_proxy": 3000,
        "preferences_gold": 12_000,
        "preferences_heldout": 1000,
    }
)
FAULTS = MappingProxyType({"missed": 0.6, "wrong": 0.15, "invented": 0.4, "filler": 0.3, "repeated": 0.15})
"""Probabilities of a summary's faults: it stops before the last of several salient facts, has a wrong word in a clause,
invents an ending for a post without one, tells a filler, or tells a clause twice. Most references miss the ending, so a
model that imitates them does, too."""
NUM_ASKED = 12
"""Number of words in a reading exercise."""
FLIPPED = MappingProxyType({"preferences_proxy": 0.1, "preferences_gold": 0.02, "preferences_heldout": 0.0})
"""Split -> share of preferences whose label is the wrong one. Accuracy is measured on labels without noise."""

# fmt: off
NAMES = (
    "Tom", "Ana", "Lee", "Mia", "Sam", "Eva", "Ben", "Zoe", "Max", "Ida", "Leo", "Amy",
    "Dan", "Kim", "Jon", "Liv", "Ray", "Sue", "Ned", "Pam", "Gus", "Fay", "Hal", "Joy",
)
RELATIONS = ("friend", "boss", "sister", "brother", "neighbour", "cousin", "mother", "teacher")
DEEDS = ("sold to", "gave to", "lent to", "showed to", "sent to", "stole from", "took from", "hid from")
"""Verb and preposition."""
THINGS = (
    "car", "bike", "phone", "ring", "dog", "cat", "key", "coat",
    "guitar", "laptop", "watch", "ticket", "cake", "letter", "camera", "boat",
)
# fmt: on
LOOKS = ("old", "new", "red", "blue", "small", "big")
TIMES = ("last week", "on monday", "two days ago", "this morning", "in june", "at night")
ENDINGS = ("moved out", "said sorry", "paid it back", "left town", "lost the job", "called the police", "got a lawyer")
FOODS = ("tea", "rice", "soup", "pizza", "bread", "fish")
PLACES = ("bank", "school", "shop", "farm", "zoo", "office")
DAYS = ("cold", "hot", "long", "busy", "quiet", "rainy")
SUBREDDITS = ("family", "work", "legal", "advice")


@dataclass(frozen=True, slots=True)
class Post:
    """One post. A summary may have the clauses of its salient facts, in their order, and of its fillers."""

    subreddit: str
    title: str
    sentences: tuple[str, ...]
    salient: tuple[str, ...]
    fillers: tuple[str, ...]

    @property
    def query(self) -> str:
        """The prompt."""
        text = " ".join(self.sentences)
        return f"SUBREDDIT: r/{self.subreddit}\n\nTITLE: {self.title}\n\nPOST: {text}\n\nTL;DR:"

    @property
    def good_summaries(self) -> list[str]:
        """All good summaries: the order of the facts does not matter."""
        return [join(order) for order in permutations(self.salient)]


def join(clauses: tuple[str, ...] | list[str]) -> str:
    """Return the summary of these clauses."""
    return " and ".join(clauses) + "."


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement of a post: its clause for a summary, and its sentence in the post."""

    clause: str
    sentence: str


def posts(split: str, rng: random.Random) -> Iterator[Post]:
    """Yield posts of one split without end."""
    while True:
        names = rng.sample(NAMES, 8)
        facts, title = _salient_facts(rng, names)
        # the rest of a post of another split is never made
        if split_of([fact.clause for fact in facts]) == split:
            yield _post(rng, facts, title, names)


def _salient_facts(rng: random.Random, names: Sequence[str]) -> tuple[list[Fact], str]:
    """Return the salient facts and the title."""
    num_salient = rng.choice((1, 2, 2, 3))
    deeds = [_deed(rng, names[2 * at], names[2 * at + 1]) for at in range(max(1, num_salient - 1))]
    facts = [fact for fact, _ in deeds]
    # the last fact of several is how it ended, for a person of the story: the name alone does not tell the fact
    if num_salient > 1:
        clause = f"{rng.choice(names[: 2 * len(deeds)])} {rng.choice(ENDINGS)}"
        facts.append(Fact(clause, f"in the end {clause}."))
    return facts, f"my {rng.choice(RELATIONS)} and the {rng.choice(deeds)[1]}"


def _post(rng: random.Random, facts: Sequence[Fact], title: str, names: Sequence[str]) -> Post:
    """Return a post with the facts in their order, among fillers."""
    num_sentences = rng.randint(4, 7)
    fillers = rng.sample(_fillers(rng, names), num_sentences - len(facts))
    places = set(rng.sample(range(num_sentences), len(facts)))
    salient, rest = iter(facts), iter(fillers)
    return Post(
        subreddit=rng.choice(SUBREDDITS),
        title=title,
        sentences=tuple(next(salient if at in places else rest).sentence for at in range(num_sentences)),
        salient=tuple(fact.clause for fact in facts),
        fillers=tuple(filler.clause for filler in fillers),
    )


def _deed(rng: random.Random, who: str, whom: str) -> tuple[Fact, str]:
    """Return a random deed as a fact, and the thing in it."""
    verb, preposition = rng.choice(DEEDS).split()
    thing = rng.choice(THINGS)
    sentence = f"{rng.choice(TIMES)} my {rng.choice(RELATIONS)} {who} {verb} the {rng.choice(LOOKS)} {thing}"
    return Fact(f"{who} {verb} the {thing} {preposition} {whom}", f"{sentence} {preposition} {whom}."), thing


def _fillers(rng: random.Random, names: Sequence[str]) -> list[Fact]:
    """Return six fillers, which name people of the story and others."""
    one, two, three, four = rng.sample(names, 4)
    food, place = rng.choice(FOODS), rng.choice(PLACES)
    return [
        Fact(f"{one} likes {food}", f"{one} likes {food} a lot."),
        Fact(f"{two} works at the {place}", f"my {rng.choice(RELATIONS)} {two} works at the {place}."),
        Fact(f"{three} met {four}", f"{three} met {four} at the {rng.choice(PLACES)}."),
        *(
            Fact(clause, f"{clause}.")
            for clause in (
                f"it was a {rng.choice(DAYS)} day",
                f"we had {rng.choice(FOODS)}",
                f"the {rng.choice(PLACES)} was closed",
            )
        ),
    ]


def split_of(salient: Sequence[str]) -> str:
    """Return the split of the clauses of the salient facts; it depends on no seed."""
    bucket = bucket_of(f"summaries:{sorted(salient)}")
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def noisy_summary(post: Post, rng: random.Random) -> str:
    """Return a summary with faults as people make them: each of `FAULTS` with its probability."""
    happens = {fault: rng.random() < probability for fault, probability in FAULTS.items()}
    clauses = list(post.salient)
    if happens["missed"] and len(clauses) > 1:
        clauses.pop()
    if happens["wrong"]:
        at = rng.randrange(len(clauses))
        clauses[at] = _with_wrong_word(clauses[at], post, rng)
    if happens["invented"] and len(post.salient) == 1:
        clauses.append(f"{clauses[0].split()[0]} {rng.choice(ENDINGS)}")
    if happens["filler"] and post.fillers:
        clauses.insert(rng.randint(0, len(clauses)), rng.choice(post.fillers))
    if happens["repeated"]:
        clauses.append(rng.choice(clauses))
    return join(clauses)


def _with_wrong_word(clause: str, post: Post, rng: random.Random) -> str:
    """Return the clause with a name, thing or ending in it that the post does not have."""
    known, old = rng.choice([(known, word) for known in (NAMES, THINGS, ENDINGS) for word in known if word in clause])
    return clause.replace(old, rng.choice([word for word in known if word not in post.query]), 1)


def quality(post: Post, summary: str) -> float:
    """Return the quality of a summary by the rule (see the module); 1 is a good one."""
    text = summary.strip().removesuffix(".")
    clauses = text.split(" and ")
    told = set(clauses) & set(post.salient)
    wrong = [clause for clause in clauses if clause not in post.salient and clause not in post.fillers]
    extra = len(clauses) - len(told) - len(wrong)
    return len(told) / len(post.salient) - 0.5 * len(wrong) - 0.25 * extra


def reading_answers(post: Post, rng: random.Random) -> str:
    """Return a reading exercise with its answers (` Tom yes boat no`): words, and whether the post has each.

    The words are names, things and endings, which a summary may get wrong. About half of them are in the post.
    """
    words = [*NAMES, *THINGS, *ENDINGS]
    known = [word for word in words if f" {word}" in post.query]
    unknown = [word for word in words if word not in known]
    asked = [rng.choice(((known, "yes"), (unknown, "no"))) for _ in range(NUM_ASKED)]
    return "".join(f" {rng.choice(pool)} {answer}" for pool, answer in asked)


def _summary_rows(split: str, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"summaries:{split}:{seed}")
    made, rows = posts(split, rng), []
    for _ in range(NUM_ROWS[split]):
        post = next(made)
        summary = noisy_summary(post, rng)
        rows.append(
            {
                "subreddit": post.subreddit,
                "title": post.title,
                "post": " ".join(post.sentences),
                "query": post.query,
                "reference_response": f" {summary}{EOS}",
                "summary": f" {summary}",
                "good_summaries": post.good_summaries,
            }
        )
    return rows


def _preference_rows(split: str, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"summaries:{split}:{seed}")
    made, rows = posts(split, rng), []
    while len(rows) < NUM_ROWS[split]:
        post = next(made)
        pair = [noisy_summary(post, rng) for _ in range(2)]
        better, worse = sorted(pair, key=lambda text: (-quality(post, text), len(text.split())))
        if quality(post, better) == quality(post, worse) and len(better.split()) == len(worse.split()):
            continue  # the rule does not decide
        if rng.random() < FLIPPED[split]:
            better, worse = worse, better
        rows.append({"query": post.query, "chosen": f" {better}", "rejected": f" {worse}"})
    return rows


def _reading_rows(split: str, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"reading:{split}:{seed}")
    made = islice(posts(split, rng), NUM_ROWS[split])
    return [{"query": post.query, "answers": reading_answers(post, rng)} for post in made]


def prompts(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return prompts of `validation` and `train`, the same for every seed."""
    heldout = distinct_prompts("tldr", "heldout", map(prompt_of, _summary_rows("validation", 0)), num_heldout)
    return heldout + distinct_prompts("tldr", "train", map(prompt_of, _summary_rows("train", 0)), num_train)


def prompt_of(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of a prompt, and the data of its rewards."""
    return row["query"], {"reference": row["reference_response"].removesuffix(EOS), "good": row["good_summaries"]}


TABLES: Mapping[str, Mapping[str, Callable[[int], list[dict[str, Any]]]]] = MappingProxyType(
    {
        "summaries_data": {split: partial(_summary_rows, split) for split in SPLITS if split not in FLIPPED},
        "summary_preferences_data": {split: partial(_preference_rows, split) for split in FLIPPED},
        "reading_data": {split: partial(_reading_rows, split) for split in ("preferences_gold", "preferences_heldout")},
    }
)
"""Data set -> split -> the function that makes its rows from a seed.

Summaries: posts with a reference (`reference_response` is as in the data set of the paper, `summary` has no end of
sequence) and all good summaries. Preferences: posts with a chosen and a rejected summary. Reading: posts with exercises
(`reading_answers`), for a judge that checks words against the post.
"""
