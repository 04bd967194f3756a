"""Texts of the Hugging Face hub, or of a local folder that its `datasets` package can read."""

from typing import Any, Literal

from pydantic import Field, model_validator

from train.data.hub import Hub, class_names, import_datasets, label_column, numbers
from train.data.texts import Damage, DamagedText, Labelled, OwnTexts, PairRows, Pairs, Rows, Running, refuse_unused

MAX_TARGET_LENGTH = 64


class TextHub(OwnTexts):
    """A data set by its name on the hub, or a folder: one made by `save_to_disk`, or of parquet, json or text files.

    `subset` and `revision` as the hub has them; `train` and `val` are splits. `use: labels` reads the columns `text_key` and
    `label_key`, the latter being found where only one can be meant; `use: running` reads `text_key`, a document a row; `use: pairs`
    reads `source_key` and `target_key`, and cuts targets at `max_target_length` (64 tokens unless given).
    """

    name: Literal["text_hub"]
    path: str = Field(min_length=1)
    subset: str | None = None
    revision: str | None = None
    train: str = "train"
    val: str = "validation"
    use: Literal["labels", "running", "pairs"] = "labels"
    text_key: str | None = None
    label_key: str | None = None
    source_key: str | None = None
    target_key: str | None = None
    max_target_length: int | None = Field(None, ge=3)

    @model_validator(mode="after")
    def options_have_a_use(self) -> "TextHub":
        refuse_unused(
            self.use,
            [
                ("text_key", self.text_key, "labels or running"),
                ("label_key", self.label_key, "labels"),
                ("source_key", self.source_key, "pairs"),
                ("target_key", self.target_key, "pairs"),
                ("max_target_length", self.max_target_length, "pairs"),
                ("too_long", "refuse" if self.too_long == "refuse" else None, "labels or pairs"),
            ],
        )
        return self

    def load(self, seed: int) -> Labelled | Running | Pairs:
        hub = Hub(name="hub", path=self.path, subset=self.subset, revision=self.revision)
        tables = [(hub.read(split), f"{self.path}[{split}]") for split in (self.train, self.val)]
        damage = Damage(self.max_damaged)
        if self.use == "running":
            texts = [column(table, where, "text_key", self.text_key or "text") for table, where in tables]
            kept = [
                [text for text, good in zip(texts[i], filled(where, texts[i], damage), strict=True) if good]
                for i, (_, where) in enumerate(tables)
            ]
            return self.running(kept[0], kept[1], self.path)
        if self.use == "pairs":
            pairs = [self.pair_rows(table, where, damage) for table, where in tables]
            return self.pairs(pairs[0], pairs[1], self.max_target_length or MAX_TARGET_LENGTH, self.too_long)
        classes = class_names(tables[0][0], self.label_key)
        rows = [self.labelled_rows(table, where, classes, damage) for table, where in tables]
        return self.labelled(rows[0], rows[1], classes, self.too_long)

    def labelled_rows(self, table: Any, where: str, classes: tuple[str, ...], damage: Damage) -> Rows:
        texts = column(table, where, "text_key", self.text_key or "text")
        labels = numbers(table, label_column(table, self.label_key), classes, where).tolist()
        good = [i for i, is_good in enumerate(filled(where, texts, damage)) if is_good]
        return Rows([f"{where}[{i}]" for i in good], [texts[i] for i in good], [labels[i] for i in good])

    def pair_rows(self, table: Any, where: str, damage: Damage) -> PairRows:
        sources = column(table, where, "source_key", self.source_key or "source")
        targets = column(table, where, "target_key", self.target_key or "target")
        both = [
            source if source and not is_blank(target) else target
            for source, target in zip(sources, targets, strict=True)
        ]
        good = [i for i, is_good in enumerate(filled(where, both, damage)) if is_good]
        return PairRows([f"{where}[{i}]" for i in good], [sources[i] for i in good], [targets[i] for i in good])


def column(table: Any, where: str, option: str, key: str) -> list[Any]:
    """The texts of a column.

    Raises:
        ValueError: there is no such column, or it holds no texts.
    """
    datasets = import_datasets()
    feature = table.features.get(key)
    if not isinstance(feature, datasets.Value) or feature.dtype not in ("string", "large_string"):
        columns = ", ".join(f"{name} ({found})" for name, found in table.features.items())
        raise ValueError(f"data.{option} = {key!r}: no such column of texts in {where}; there are {columns}")
    return table.select_columns([key]).with_format("arrow")[:][key].to_pylist()


def is_blank(text: str | None) -> bool:
    return text is None or not text.strip()


def filled(where: str, texts: list[Any], damage: Damage) -> list[bool]:
    """Which texts are more than blanks; the others are counted as damaged."""
    good = [not is_blank(text) for text in texts]
    for index, is_good in enumerate(good):
        if not is_good:
            damage.add(DamagedText(f"{where}[{index}]", "the text is empty"))
    return good
