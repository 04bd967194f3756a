"""Tiny texts for the tests of the trainer, written as jsonl, and the options of runs on them that take a second."""

import json
from pathlib import Path

import numpy as np

PEOPLE, DEEDS = ("anna", "bert", "carl", "dora"), ("sees", "calls", "helps", "beats")
PLACES = ("in the garden", "at the station", "on the hill", "near the river")

TINY = "embed_dim: 24, depth: 2, num_heads: 3"
SHORT = (
    "trainer={max_steps: 4, batch_size: 8, log_every: 1, eval_every: 4, save_every: 2, device: cpu}",
    "schedule.warmup_steps=1",
)


def sentences(count: int, seed: int) -> list[tuple[str, str, str]]:
    """(sentence, who acts, what is done)."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        actor, other = rng.choice(PEOPLE, size=2, replace=False).tolist()
        deed, place = str(rng.choice(DEEDS)), str(rng.choice(PLACES))
        found.append((f"{actor} {deed} {other} {place}.", actor, deed))
    return found


def write_jsonl(folder: Path, use: str) -> list[str]:
    """Writes train.jsonl and val.jsonl into a new folder; returns the options that make a config read them."""
    folder.mkdir(parents=True)
    for split, count in (("train", 64), ("val", 20)):
        lines = []
        for text, actor, deed in sentences(count, seed=len(split)):
            if use == "labels":
                lines.append({"text": text, "label": actor})
            elif use == "running":
                lines.append({"text": text})
            else:
                lines.append({"source": text, "target": f"{actor} {deed}"})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = "vocab_size: 300, max_length: 24" + (", max_target_length: 12" if use == "pairs" else "")
    files = f"train: {folder / 'train.jsonl'}, val: {folder / 'val.jsonl'}"
    return [f"data={{name: text_jsonl, {files}, use: {use}, {sizes}}}"]
