"""Questions about real sentences that only the order of the words answers: are they as written, and who is it that acts?"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from train.data.news import Article, read_news, split_news
from train.data.texts import Labelled, LabelledExample, TextData, first_of_each, pad
from train.data.tokenize import SEP, SPECIAL_TOKENS, encode_texts

CLASSES = {"intact": ("intact", "shuffled"), "actor": ("acts", "acted on")}
MIN_WORDS, MAX_WORDS = 6, 24
NAMES = ("alice", "bob")

ACTING = """
    said says told tells added warned claimed insisted admitted announced confirmed accused beat beats defeated signed
    joined won wins lost scored led leads made makes took takes gave gives called asked urged met faced faces hit
    launched released bought sold sued backed blamed criticised praised denied rejected replaced succeeded played
    plays directed believes believed thinks wants wanted has had is was will would could can should may might does did
    also plans planned agreed began became came went ran stars starred wrote sang hopes hoped expects expected argued
    argues suggested revealed reported described explained remains remained returned finished opened ended set put saw
    got kept held broke cut paid received refused decided failed
"""  # what may follow the name of one who acts
TIMES = """
    monday tuesday wednesday thursday friday saturday sunday january february march april may june july august september october
    november december christmas i
"""  # with a capital letter, and still no name
VERBS, NO_NAMES = frozenset(ACTING.split()), frozenset(TIMES.split())

WORD = re.compile(r"[^\W_]+(?:['\u2019.,&-][^\W_]+)*")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"']?\s+(?=[\"']?[A-Z0-9£$])|\n+")


class Order(TextData):
    """Two kinds of questions, made of the same sentences of the BBC's articles, in lower case and without punctuation.

    `intact`: is this sentence as it was written, or are its words shuffled? `actor`: of a sentence with two different names, one
    directly before a verb, that one becomes alice and the other bob, or the other way round, and one of them is asked for:
    "alice [SEP] ...". Does she stand before the verb (acts), or does the other one (acted on)? Every sentence comes in all its
    forms equally often, so that its words alone say nothing: whoever sees these without their order is right half of the time in
    each question. Words that are none of the most frequent are [UNK].

    Sentences of training articles train, those of test articles test, and none is in both. Training example i is the same for the
    same (seed, i); the test examples do not depend on the seed, and hold the forms of a sentence in equal numbers: two of `intact`,
    four of `actor`. They are fewer than `num_test` where the sentences do not suffice. Sentences of more than `max_length` tokens,
    the question included, are left out. `path` as for news.
    """

    name: Literal["order"]
    path: str | None = None
    question: Literal["both", "intact", "actor"] = "both"
    tokenizer: Literal["words"] = "words"
    vocab_size: int | None = Field(512, ge=32)
    lowercase: Literal[True] = True
    max_length: int = Field(32, ge=8)
    num_train: PositiveInt = 100_000
    num_test: PositiveInt = 2_000

    def load(self, seed: int) -> Labelled:
        questions = ("intact", "actor") if self.question == "both" else (self.question,)
        train_articles, test_articles, _ = split_news(read_news(self.path))
        capitals = capital_words(train_articles)
        train, test = (sentences(articles, capitals) for articles in (train_articles, test_articles))
        known = {tuple(sentence.words) for sentence in train}
        test = [sentence for sentence in test if tuple(sentence.words) not in known]
        self.refuse_empty("training", [" ".join(sentence.words) for sentence in train])
        texts = [" ".join(sentence.words) for sentence in train]
        texts += [" ".join(named(sentence, NAMES)) for sentence in train if sentence.names is not None]
        tokenizer = self.train_tokenizer(texts)
        tokenizer.encode_special_tokens = False  # the [SEP] of a text is meant
        classes = tuple(name for question in questions for name in CLASSES[question])
        pools = [Pool(split, tokenizer, self.max_length) for split in (train, test)]
        for split, pool in zip(("training", "test"), pools, strict=True):
            for question in questions:
                if not pool.numbers[question]:
                    raise ValueError(f"data.question = {self.question!r}: no {split} sentence for {question}")
        return Labelled(
            train=DrawnQuestions(pools[0], questions, self.num_train, seed, self.max_length),
            test=FixedQuestions(pools[1], questions, self.num_test, self.max_length),
            classes=classes,
            tokenizer=tokenizer,
            max_length=self.max_length,
            groups=tuple(question for question in questions for _ in CLASSES[question]),
        )


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence in lower case, and, where two names are in it, where these stand: (first, one past the last word),
    the acting one first."""

    words: tuple[str, ...]
    names: tuple[tuple[int, int], tuple[int, int]] | None = None


class Form(NamedTuple):
    """Which question is asked about which sentence, and how that is changed."""

    question: str
    number: int
    changed: bool  # shuffled, or bob is the one who acts
    other: bool = False  # asks for bob
    order: tuple[int, ...] = ()  # of the words, where they are shuffled


class Pool:
    """Sentences with their words as tokens, and the numbers of those that each question can be asked about."""

    def __init__(self, sentences: Sequence[Sentence], tokenizer: Tokenizer, max_length: int):
        self.sentences = sentences
        vocabulary = sorted({word for sentence in sentences for word in sentence.words} | set(NAMES))
        self.tokens_of = dict(zip(vocabulary, encode_texts(tokenizer, vocabulary), strict=True))
        self.tokens_of[SPECIAL_TOKENS[SEP]] = [SEP]
        self.numbers: dict[str, list[int]] = {"intact": [], "actor": []}
        for number, sentence in enumerate(sentences):
            num_tokens = [len(self.tokens_of[word]) for word in sentence.words]
            if sum(num_tokens) <= max_length and len(set(sentence.words)) > 1:
                self.numbers["intact"].append(number)
            if sentence.names is not None and len(named(sentence, NAMES)) + 2 <= max_length:
                self.numbers["actor"].append(number)

    def words(self, form: Form) -> list[str]:
        """The words that are shown, the question in front where there is one."""
        sentence = self.sentences[form.number]
        if form.question == "intact":
            return [sentence.words[i] for i in form.order] if form.changed else list(sentence.words)
        words = named(sentence, NAMES[::-1] if form.changed else NAMES)
        return [NAMES[int(form.other)], SPECIAL_TOKENS[SEP], *words]

    def label(self, form: Form, questions: Sequence[str]) -> int:
        """The number of the class; alice acts unless the names were exchanged."""
        wrong = form.changed if form.question == "intact" else form.changed != form.other
        return 2 * questions.index(form.question) + int(wrong)

    def example(self, form: Form, questions: Sequence[str], max_length: int) -> LabelledExample:
        tokens = [token for word in self.words(form) for token in self.tokens_of[word]]
        return *pad(torch.tensor(tokens), max_length), self.label(form, questions)


class Questions(Dataset[LabelledExample]):
    """Questions that are made when they are asked for."""

    def __init__(self, pool: Pool, questions: Sequence[str], num_examples: int, max_length: int):
        self.pool, self.questions, self.num_examples, self.max_length = pool, questions, num_examples, max_length

    def form(self, index: int) -> Form:
        raise NotImplementedError(type(self).__name__)

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> LabelledExample:
        if not 0 <= index < self.num_examples:
            raise IndexError(f"question {index} of {self.num_examples}")
        return self.pool.example(self.form(index), self.questions, self.max_length)

    @property
    def texts(self) -> list[str]:
        return [" ".join(self.pool.words(self.form(index))) for index in range(self.num_examples)]

    @property
    def labels(self) -> list[int]:
        return [self.pool.label(self.form(index), self.questions) for index in range(self.num_examples)]


class DrawnQuestions(Questions):
    """For training: question i of a seed is always the same."""

    def __init__(self, pool: Pool, questions: Sequence[str], num_examples: int, seed: int, max_length: int):
        super().__init__(pool, questions, num_examples, max_length)
        self.seed = seed

    def form(self, index: int) -> Form:
        rng = np.random.default_rng([0, self.seed, index])
        question = self.questions[int(rng.integers(len(self.questions)))]
        numbers = self.pool.numbers[question]
        number = numbers[int(rng.integers(len(numbers)))]
        changed, other = (bool(bit) for bit in rng.integers(2, size=2))
        if question == "actor":
            return Form(question, number, changed, other)
        return Form(question, number, changed, order=shuffled(rng, self.pool.sentences[number]) if changed else ())


class FixedQuestions(Questions):
    """For testing: as many sentences as needed for each question, and all forms of each."""

    def __init__(self, pool: Pool, questions: Sequence[str], num_examples: int, max_length: int):
        rng = np.random.default_rng(1)
        self.forms: list[Form] = []
        for question in questions:
            num_forms = 2 if question == "intact" else 4
            wanted = max(1, num_examples // (num_forms * len(questions)))
            for number in rng.permutation(pool.numbers[question])[:wanted].tolist():
                if question == "intact":
                    order = shuffled(rng, pool.sentences[number])
                    self.forms += [Form(question, number, False), Form(question, number, True, order=order)]
                else:
                    self.forms += [
                        Form(question, number, swap, other) for swap in (False, True) for other in (False, True)
                    ]
        super().__init__(pool, questions, len(self.forms), max_length)

    def form(self, index: int) -> Form:
        return self.forms[index]


def shuffled(rng: np.random.Generator, sentence: Sentence) -> tuple[int, ...]:
    """An order of the words that reads differently."""
    while True:
        order = tuple(rng.permutation(len(sentence.words)).tolist())
        if tuple(sentence.words[i] for i in order) != sentence.words:
            return order


def named(sentence: Sentence, names: Sequence[str]) -> list[str]:
    """The words with the one who acts and the other one under these names."""
    assert sentence.names is not None
    words = list(sentence.words)
    for (start, end), name in sorted(zip(sentence.names, names, strict=True), reverse=True):
        words[start:end] = [name]
    return words


def sentences(articles: Sequence[Article], capitals: set[str]) -> list[Sentence]:
    """The sentences of 6 to 24 words, each once, titles left out."""
    texts = [text for article in articles for text in SENTENCE_END.split(article.body)]
    found = [to_sentence(text, capitals) for text in texts if text]
    return first_of_each(
        (sentence for sentence in found if MIN_WORDS <= len(sentence.words) <= MAX_WORDS),
        lambda sentence: sentence.words,
    )


def capital_words(articles: Sequence[Article]) -> set[str]:
    """Words that are written with a capital letter more often than without, in lower case; sentences begin with one anyway."""
    large: Counter[str] = Counter()
    small: Counter[str] = Counter()
    for article in articles:
        for text in SENTENCE_END.split(article.body):
            for position, match in enumerate(WORD.finditer(text)):
                word = match[0]
                if word[0].islower():
                    small[word] += 1
                elif position and word[0].isupper():
                    large[word.lower()] += 1
    return {word for word, count in large.items() if count > small[word]}


def to_sentence(text: str, capitals: set[str]) -> Sentence:
    """A sentence, with its names if there are two that fit: of all runs of words with capital letters just one stands directly
    before a verb, and of the others there is one that shares no word with it."""
    matches = list(WORD.finditer(text))
    words = tuple(match[0].lower() for match in matches)
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return Sentence(words)
    runs: list[tuple[int, int]] = []
    for i, match in enumerate(matches):
        is_name = match[0][0].isupper() and words[i] in capitals and words[i] not in NO_NAMES
        if not is_name:
            continue
        if runs and runs[-1][1] == i and text[matches[i - 1].end() : match.start()] == " ":
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    acting = [
        (start, end)
        for start, end in runs
        if end < len(words) and words[end] in VERBS and text[matches[end - 1].end() : matches[end].start()] == " "
    ]
    if len(acting) != 1:
        return Sentence(words)
    counts = Counter(words)
    fitting = [
        (start, end)
        for start, end in runs
        if all(counts[word] == 1 and not word.endswith(("'s", "\u2019s")) for word in words[start:end])
    ]
    others = [run for run in fitting if run != acting[0]]
    if acting[0] not in fitting or not others or not counts.keys().isdisjoint(NAMES):
        return Sentence(words)
    return Sentence(words, (acting[0], others[0]))
