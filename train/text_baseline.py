"""`python -m train.text_baseline DATA [key=value ...]`: how far TF-IDF and a linear classifier come on a data set of texts."""

import argparse
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from train.config import CONFIGS, list_configs, parse_overrides, read_yaml
from train.data import DATA
from train.data.texts import Labelled
from train.schema import ConfigError, unknown_name, validate
from train.tool import run_command, run_tool


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.text_baseline",
        description="Trains a logistic regression on TF-IDF of words and pairs of words, on the split that the data set has, and "
        "says how many test texts it gets right. What a model of order is worth is what it gets beyond that.",
    )
    parser.add_argument("data", metavar="DATA", help="a file in configs/data without .yaml, such as news")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the data, such as max_length=128")
    parser.add_argument("--words", action="store_true", help="single words alone: a bag, which knows nothing of order")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn for training, where something is")
    parser.add_argument("--json", action="store_true", help="print a line of JSON")
    return run_tool(run, parser.parse_intermixed_args(arguments))


def run(given: argparse.Namespace) -> int:
    data = load(given.data, given.overrides, given.seed)
    started = time.perf_counter()
    result = baseline(data, longest=1 if given.words else 2)
    result = {"data": given.data, **result, "seconds": round(time.perf_counter() - started, 1)}
    if given.json:
        print(json.dumps(result))
        return 0
    print(
        f"{given.data}: {100 * result['accuracy']:.1f} % of {result['num_test']} test texts (standard error "
        f"{100 * result['accuracy_standard_error']:.1f} points), {result['num_train']} training texts, "
        f"{result['num_features']} features, {result['seconds']} s"
    )
    for group, accuracy in result["groups"].items():
        print(f"  {group}: {100 * accuracy:.1f} %")
    return 0


def load(name: str, overrides: Sequence[str], seed: int) -> Labelled:
    """The data set that a training run with these keys would see.

    Raises:
        ConfigError: the keys are wrong.
        ValueError: it is no data set of texts in classes.
    """
    path = CONFIGS / "data" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(name, [unknown_name("data file", name, list_configs("data"), where="data")])
    problems: list[str] = []
    tree = read_yaml(path, problems)
    tree |= {key.removeprefix("data."): value for key, value in parse_overrides(overrides, problems).items()}
    node, wrong = validate(DATA[tree["name"]], tree)
    if problems or wrong or node is None:
        raise ConfigError(name, [*problems, *wrong])
    data: Any = node.load(seed)
    if not isinstance(data, Labelled):
        raise ValueError(f"data = {name!r}: holds no texts in classes")
    return data


def baseline(data: Labelled, longest: int = 2) -> dict[str, Any]:
    """Accuracy, its standard error, and the accuracy of each group of classes, of words up to `longest` in a row."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    train: Any = data.train
    test: Any = data.test
    vectorizer = TfidfVectorizer(
        ngram_range=(1, longest),
        sublinear_tf=True,
        min_df=2 if len(train.labels) > 1000 else 1,
        token_pattern=r"(?u)\S+",
    )
    features = vectorizer.fit_transform(train.texts)
    model = LogisticRegression(C=30.0, max_iter=300).fit(features, train.labels)
    right = model.predict(vectorizer.transform(test.texts)) == test.labels
    accuracy = float(right.mean())
    groups = data.groups or ()
    return {
        "accuracy": accuracy,
        "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / len(right)),
        "num_train": len(train.labels),
        "num_test": len(right),
        "num_features": len(vectorizer.vocabulary_),
        "groups": {
            group: float(right[[groups[label] == group for label in test.labels]].mean())
            for group in dict.fromkeys(groups)
        },
    }


if __name__ == "__main__":
    run_command(main)
