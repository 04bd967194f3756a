"""A recogniser from recordings to error rates: what it minimises, what it counts, and that it learns clips by heart."""

import contextlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
from accelerate import Accelerator
from torch import Tensor

from relpos2d.models.ctc import ctc_losses, greedy
from tests.refusals import refuses
from tests.train.test_resume import assert_same
from tests.train.tones import SAMPLE_RATE, Clip, speech_run, spoken, tone_clips, write_manifest, write_wav
from train import evaluate, transcribe
from train.__main__ import main
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.data.recordings import UNUSABLE
from train.error_rates import char_errors, word_errors
from train.restore import restore
from train.tasks import speech_recognition
from train.tasks.speech_recognition import SpeechRecognition, evaluation_size, warn_of_short

SHORT = "trainer={max_steps: 4, batch_size: 4, log_every: 1, eval_every: 4, save_every: 2, device: cpu}"


def create(folder: Path, *options: str, clips: Sequence[Clip] | None = None, test: Sequence[Clip] | None = None) -> Any:
    """The task on a few clips, untrained."""
    name, *given = speech_run(folder, tone_clips(5) if clips is None else clips, test)
    return SpeechRecognition(load_config(name, [*given, "trainer.batch_size=3", *options]))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return create(tmp_path_factory.mktemp("task"), "model.intermediate_layers=[1]")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch_of(task: Any, *indices: int) -> Any:
    return task.train_data.collate([task.train_data[index] for index in indices])


def cut(batch: Any, row: int, num_samples: int) -> Any:
    """The batch with a row of which only the beginning is left."""
    samples, lengths, tokens, num_tokens = batch
    lengths = lengths.clone()
    lengths[row] = num_samples
    return samples, lengths, tokens, num_tokens


def test_eight_clips_are_learnt_by_heart(tone_run: Path) -> None:
    metrics = json.loads((tone_run / "metrics.json").read_text())
    assert (metrics["cer"], metrics["wer"], metrics["cer_low"], metrics["wer_high"]) == (0, 0, 0, 0)
    assert (metrics["cer_de"], metrics["cer_en"]) == (0, 0)
    assert (metrics["num_examples"], metrics["num_too_short"], metrics["num_damaged"]) == (8, 0, 0)
    assert metrics["loss"] < 0.5


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_eight_real_prompts_are_learnt_by_heart(tmp_path: Path) -> None:
    data = load_config("speech/prompts", ["data.speed=[1.0]"]).data.load(0).train
    for split in ("train", "val"):
        lines = []
        for index in [index for index, seconds in enumerate(data.durations) if 0.8 < seconds < 1.6][:8]:
            soundfile.write(tmp_path / f"{index}.wav", data[index][0].numpy(), data.sample_rate)
            lines.append(json.dumps({"path": f"{index}.wav", "text": data.texts[index]}) + "\n")
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    options = [
        f"data={{name: speech_jsonl, path: {tmp_path}, sample_rate: 8000, speed: [1.0]}}",
        "model={name: conformer_ctc, embed_dim: 64, depth: 2, num_heads: 2, ff_ratio: 2.0, num_mels: 40, normalize: fixed, "
        "subsampling_channels: 16, dropout: 0.0}",
        "trainer={max_steps: 80, batch_size: 8, eval_every: 80, save_every: 80, device: cpu}",
        "optimizer.lr=4e-3",
        "schedule.warmup_steps=20",
    ]
    assert main(["speech/prompts_tiny", *options, f"output={tmp_path / 'run'}"]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["cer"], metrics["num_examples"], metrics["num_too_short"]) == (0, 8, 0)


def test_a_run_fills_its_folder(tone_run: Path) -> None:
    names = {path.name for path in tone_run.iterdir()}
    assert {"config.yaml", "data.json", "tokenizer.json", "predictions.jsonl", "curves.png", "alignment.png"} <= names
    about = json.loads((tone_run / "data.json").read_text())
    assert (about["sample_rate"], about["max_duration"]) == (SAMPLE_RATE, 4.0)
    assert about["vocab_size"] == len(json.loads((tone_run / "tokenizer.json").read_text())["model"]["vocab"])


def test_records_say_what_was_heard_and_how_wrong_it_is(tone_run: Path) -> None:
    records = read_lines(tone_run / "predictions.jsonl")
    clips = tone_clips(8, seed=3)
    clips = [*clips[1::2], *clips[0::2]]  # de before en
    assert [record["index"] for record in records] == list(range(8))
    assert [record["text"] for record in records] == [clip.text for clip in clips]
    assert [record["language"] for record in records] == ["de"] * 4 + ["en"] * 4
    for record, clip in zip(records, clips, strict=True):
        assert record["seconds"] == pytest.approx(clip.seconds)
        assert record["name"].endswith(".wav")
        assert record["num_frames"] == math.ceil(math.ceil(len(clip.samples) / 80) / 4)
        assert record["num_tokens"] == record["num_chars"] == len(clip.text)
        doubles = sum(a == b for a, b in zip(clip.text, clip.text[1:], strict=False))
        assert record["num_needed"] == len(clip.text) + doubles
        pair = ([record["text"]], [record["prediction"]])
        assert char_errors(*pair) == [(record["char_errors"], record["num_chars"])]
        assert word_errors(*pair) == [(record["word_errors"], record["num_words"])]
    total = sum(record["loss"] for record in records) / sum(record["num_tokens"] for record in records)
    assert json.loads((tone_run / "metrics.json").read_text())["loss"] == pytest.approx(total)


@pytest.mark.parametrize("options", [[], ["trainer.batch_size=1"], ["decoding={name: beam, lexicon: train}"]])
def test_l6_evaluation_gives_the_same_numbers_in_any_batch(
    tone_run: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(tone_run), "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    metrics = json.loads((tone_run / "metrics.json").read_text())
    common = {key for key in found.keys() & metrics.keys() if isinstance(found[key], float | int)}
    assert {"cer", "wer_high", "cer_de", "loss", "num_too_short"} <= common
    assert {key: found[key] for key in common} == pytest.approx({key: metrics[key] for key in common}, rel=1e-4)


def test_the_loss_is_nats_per_token_of_the_clips_that_fit(task: Any) -> None:
    task.model.eval()
    batch = cut(batch_of(task, 0, 1, 2), row=1, num_samples=800)
    samples, num_samples, tokens, num_tokens = batch
    with torch.no_grad():
        loss, scalars = task.loss(task.model, batch)
        output = task.model(samples, num_samples)
    losses = ctc_losses(output.log_probs, output.num_frames, tokens, num_tokens)
    assert losses[1] == 0
    assert float(scalars["too_short"]) == 1
    assert float(loss) == pytest.approx(float((losses[0] + losses[2]) / (num_tokens[0] + num_tokens[2])))


def test_layers_in_the_middle_have_their_share(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert task.intermediate == 0.3
    task.model.train()
    batch = batch_of(task, 0, 1)
    with torch.no_grad():
        output = task.model(*batch[:2])
    assert len(output.intermediate) == 1
    last, middle = (
        ctc_losses(log_probs, output.num_frames, *batch[2:]).sum() / batch[3].sum()
        for log_probs in (output.log_probs, *output.intermediate)
    )
    for share in (0.3, 0.6):
        monkeypatch.setattr(task, "intermediate", share)
        with torch.no_grad():
            loss, _ = task.loss(task.model, batch)
        assert float(loss) == pytest.approx(float((1 - share) * last + share * middle), rel=1e-5)


def test_l1_a_batch_of_clips_that_are_all_too_short_is_no_error(task: Any) -> None:
    task.model.train()
    samples, num_samples, tokens, num_tokens = batch_of(task, 0, 1)
    loss, scalars = task.loss(task.model, (samples, torch.full_like(num_samples, 400), tokens, num_tokens))
    assert float(loss.detach()) == 0
    assert float(scalars["too_short"]) == 2
    task.model.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in task.model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    task.model.zero_grad()


class Listening:
    """Stands in for a model in which every four frames of 100 samples are one."""

    sample_rate = 1000

    def num_output_frames(self, num_samples: Tensor) -> Tensor:
        return -(-num_samples // 100)


class Split(list[Any]):
    """(name, seconds, tokens) of clips."""

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self]

    @property
    def durations(self) -> list[float]:
        return [seconds for _, seconds, _ in self]

    def tokens(self, index: int) -> Tensor:
        return torch.tensor(self[index][2], dtype=torch.int64)


def test_l1_recordings_that_are_too_short_are_counted_and_named() -> None:
    fits = ("fits", 1.0, [1, 2])
    train = Split([fits, ("double", 0.3, [7, 8, 8]), ("close", 0.22, [7, 8, 9]), ("empty", 0.1, [])])
    test = Split([fits, *((f"t{number}", 0.1, [1, 1]) for number in range(6))])
    with pytest.warns(UserWarning) as caught:  # noqa: PT030 (the whole text is compared)
        warn_of_short(Listening(), train, test, fastest=1.2)
    assert [str(warning.message) for warning in caught] == [
        "1 of 4 training recordings are too short for their texts and teach nothing: double (3 frames, 4 needed); "
        "1 of 4 training recordings are too short for their texts at speed 1.2: close (2 frames, 3 needed); "
        "6 of 7 test recordings are too short for their texts, their loss counts as 0: t0 (1 frames, 3 needed), "
        "t1 (1 frames, 3 needed), t2 (1 frames, 3 needed), t3 (1 frames, 3 needed), t4 (1 frames, 3 needed), ..."
    ]
    warn_of_short(Listening(), Split([fits]), Split([fits]), fastest=1.2)


def test_l1_clips_too_short_for_their_text_do_not_stop_a_run(tmp_path: Path) -> None:
    clips = tone_clips(5)
    short = Clip(spoken("a").samples[:1500], SAMPLE_RATE, "a long text in a short clip", ())
    options = speech_run(tmp_path, [*clips, short], [*clips[:2], short])
    options += ["decoding={name: beam, lexicon: train}", SHORT, "schedule.warmup_steps=1"]
    with pytest.warns(UserWarning, match=r"1 of 6 .* teach nothing: .*\(5 frames, 27 needed\); 1 of 3 test recordings"):
        assert main([*options, f"output={tmp_path / 'run'}"]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["num_too_short"], metrics["num_examples"]) == (1, 3)
    assert math.isfinite(metrics["loss"])
    (record,) = (r for r in read_lines(tmp_path / "run" / "predictions.jsonl") if r["num_frames"] < r["num_needed"])
    assert record["loss"] == 0
    assert record["num_chars"] == 27
    assert max(line["too_short"] for line in read_lines(tmp_path / "run" / "history.jsonl")) == 1


def test_each_of_several_processes_hears_its_share(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, records = task.evaluate(task.model, Accelerator(cpu=True))
    monkeypatch.setattr(speech_recognition, "gathered", lambda records: records)
    parts = []
    for rank in (0, 1, 2):
        process = SimpleNamespace(
            process_index=rank, num_processes=3, device=torch.device("cpu"), autocast=contextlib.nullcontext
        )
        parts += task.evaluate(task.model, process)[1]
    assert [r["index"] for r in parts] == [0, 3, 1, 4, 2]
    for part, record in zip(sorted(parts, key=lambda r: r["index"]), records, strict=True):
        assert part.pop("loss") == pytest.approx(record.pop("loss"), rel=1e-4)
        assert part == record
    assert whole["num_examples"] == 5


def test_a_model_is_left_as_it_was(task: Any) -> None:
    for training in (True, False):
        task.model.train(training)
        task.evaluate(task.model, Accelerator(cpu=True))
        assert task.model.training is training


def test_fixed_statistics_are_those_of_training(tmp_path: Path) -> None:
    options = ("model.normalize=fixed", "data.speed=[0.9, 1.1]")
    states = []
    for number in range(2):
        torch.manual_seed(number)
        mel = create(tmp_path / str(number), *options).model.log_mel
        states.append((mel.mean, mel.std))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])
    task = create(tmp_path / "plain", "model.normalize=fixed")
    mel = task.model.log_mel
    features = torch.cat([mel(samples[None], torch.tensor([len(samples)]))[0][0] for samples, _ in task.train_data])
    torch.testing.assert_close(features.mean(dim=0), torch.zeros(40), atol=1e-4, rtol=0)
    torch.testing.assert_close(features.std(dim=0), torch.ones(40), atol=1e-2, rtol=0)


def test_encodings_with_a_size_have_room_for_the_slowest_recording(tmp_path: Path) -> None:
    task = create(tmp_path, "encoding=learned", "data.speed=[0.8, 1.2]", "data.max_duration=3.0")
    assert task.about.max_duration == pytest.approx(3.75)
    assert task.model.max_length == math.ceil(3.75 / 0.04)
    longest = torch.tensor([round(3.75 * SAMPLE_RATE)])
    assert int(task.model.num_output_frames(longest)) <= task.model.max_length
    given = create(tmp_path / "given", "model.max_length=77")
    assert given.model.max_length == 77


def test_an_evaluation_takes_no_more_than_a_batch() -> None:
    def trainer(**options: Any) -> Any:
        return SimpleNamespace(**{"batch_size": 12, "batch_seconds": None, "accumulate": 1, **options})

    assert evaluation_size(trainer(), longest=99.0) == 12
    assert evaluation_size(trainer(accumulate=4), longest=99.0) == 3
    assert evaluation_size(trainer(batch_seconds=30.0), longest=4.0) == 7
    assert evaluation_size(trainer(batch_seconds=90.0), longest=4.0) == 12
    assert evaluation_size(trainer(batch_seconds=30.0, accumulate=2), longest=4.0) == 3
    assert evaluation_size(trainer(batch_seconds=30.0), longest=99.0) == 1


def test_what_cannot_be_built_is_refused_before_training(tmp_path: Path) -> None:
    with refuses(r"model conformer_ctc with \{'max_length': .*hop=0\.0101 seconds"):
        create(tmp_path, "model.hop=0.0101")
    with refuses(r"decoding\.lexicon = '.*absent': no readable list of words"):
        create(tmp_path, f"decoding={{name: beam, lexicon: {tmp_path / 'absent'}}}")


def test_where_nothing_is_heard_nothing_is_drawn(task: Any, tmp_path: Path) -> None:
    _, records = task.evaluate(task.model, Accelerator(cpu=True))
    task.model.eval()
    for record in records:
        record["prediction"] = ""
    assert task.pictures(tmp_path, records, task.model) == []
    assert list(tmp_path.iterdir()) == []


def test_predictions_are_what_the_model_says(tone_run: Path) -> None:
    restored = restore(tone_run)
    data = restored.config.data.load(0)
    record = read_lines(tone_run / "predictions.jsonl")[2]
    samples, tokens = data.test[2]
    with torch.no_grad():
        output = restored.model(samples[None], torch.tensor([len(samples)]))
    assert greedy(output.log_probs, output.num_frames) == [tokens.tolist()]
    loss = ctc_losses(output.log_probs, output.num_frames, tokens[None], torch.tensor([len(tokens)]))
    assert float(loss) == pytest.approx(record["loss"], rel=1e-4)


def test_tokens_of_bytes_from_training_to_transcript(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untrained one says halves of characters, which are drawn and written with the frames that they have."""
    options = ["data.tokenizer=bpe", "data.vocab_size=300", "optimizer.lr=1e-4", SHORT, "schedule.warmup_steps=1"]
    clips = tone_clips(4)
    assert main([*speech_run(tmp_path, clips), *options, f"output={tmp_path / 'run'}"]) == 0
    assert any("\ufffd" in record["prediction"] for record in read_lines(tmp_path / "run" / "predictions.jsonl"))
    path = write_wav(tmp_path / "a.wav", clips[0])
    for size in ("1", "3"):
        capsys.readouterr()
        assert transcribe.main([str(tmp_path / "run"), str(path), "--beam", size, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"]


def test_no_error_rate_of_nothing(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "batches", lambda *_: iter(()))
    with refuses("there is no test recording that can be read; 5 are damaged"):
        task.evaluate(task.model, Accelerator(cpu=True))


def test_other_recordings_are_evaluated_with_the_letters_of_the_model(
    tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, strange = tone_clips(2, seed=3)[0], spoken("zzz")
    write_manifest(tmp_path / "val.jsonl", [known, strange])
    other = f"data={{name: speech_jsonl, path: {tmp_path}, train: val.jsonl, sample_rate: 8000, max_damaged: 1}}"
    with pytest.warns(UserWarning, match=r"val_1\.wav: its text has the character 'z'"):
        assert evaluate.main([str(tone_run), other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_examples"], found["left_out"]) == (1, {UNUSABLE: 1})
    write_manifest(tmp_path / "val.jsonl", [known])
    assert evaluate.main([str(tone_run), other, "decoding={name: beam, lexicon: train}"]) == 1
    assert "decoding.lexicon = 'train': these data have other training texts" in capsys.readouterr().err


def test_lost_after_two_steps_it_ends_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "model.dropout=0.1",
        "model.num_time_masks=1",
        "model.normalize=fixed",
        "data.speed=[0.9, 1.0, 1.1]",
        SHORT,
        "trainer.batch_seconds=8.0",
        "trainer.ema_decay=0.9",
        "schedule.warmup_steps=1",
    ]
    arguments = [*speech_run(tmp_path, tone_clips(9)), *options, f"output={tmp_path / 'run'}"]
    outcomes: list[Any] = []
    for num_workers in (0, 2):
        assert main([*arguments, f"trainer.num_workers={num_workers}"]) == 0
        last = load_checkpoint(tmp_path / "run" / "checkpoints" / "step_4")
        lines = read_lines(tmp_path / "run" / "history.jsonl")
        history = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        records = read_lines(tmp_path / "run" / "predictions.jsonl")
        outcomes.append(
            {"weights": last.weights, "optimizer": last.optimizer, "history": history, "predictions": records}
        )
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4")
        (tmp_path / "run" / "metrics.json").unlink()
    assert "continues after step 2 of 4" in capsys.readouterr().out
    assert_same(*outcomes)

    manifest = tmp_path / "tones" / "train-en.jsonl"
    lines = read_lines(manifest)
    lines[0]["duration"] -= 0.25
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(arguments) == 1
    assert "seconds of sound, but the run to be continued was begun with" in capsys.readouterr().err
