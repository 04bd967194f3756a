"""What a classifier minimises, by hand; and what is measured where something cannot be read."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from train.config import Loss, load_config
from train.data.stream import TooManyDamaged, seed_everything
from train.tasks.classify import Classify, create_criterion


def loss_of(**options: object) -> tuple[object, torch.nn.Module]:
    return create_criterion(Loss.model_validate(options), num_classes=5)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 3, 3, 1])


def test_label_smoothing(logits: torch.Tensor) -> None:
    mixup, criterion = loss_of(smoothing=0.2)
    assert mixup is None
    targets = F.one_hot(LABELS, 5) * 0.8 + 0.2 / 5
    expected = -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(criterion(logits, LABELS), expected)


def test_mixed_targets_are_the_shares_of_both_classes(logits: torch.Tensor) -> None:
    mixup, criterion = loss_of(mixup=0.8, smoothing=0.1)
    seed_everything(1)
    share = float(np.random.beta(0.8, 0.8))  # noqa: NPY002 (as timm draws it)
    seed_everything(1)
    np.random.rand()  # noqa: NPY002 (whether to mix)
    share = float(np.random.beta(0.8, 0.8))  # noqa: NPY002
    seed_everything(1)
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8).clone()
    mixed, targets = mixup(images, LABELS)  # type: ignore[operator]
    torch.testing.assert_close(mixed[:, 0, 0, 0], share * torch.arange(4.0) + (1 - share) * torch.arange(3.0, -1, -1))
    smooth = F.one_hot(LABELS, 5) * 0.9 + 0.1 / 5
    torch.testing.assert_close(targets, share * smooth + (1 - share) * smooth.flip(0))
    torch.testing.assert_close(criterion(logits, targets), -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean())


def test_binary_cross_entropy_with_both_classes_present(logits: torch.Tensor) -> None:
    _, criterion = loss_of(name="binary_cross_entropy", mixup=0.8, target_threshold=0.0)
    targets = torch.tensor([[0.3, 0.7, 0, 0, 0], [0, 0, 1, 0, 0], [0.5, 0, 0, 0.5, 0], [0, 0, 0, 0, 1.0]])
    expected = F.binary_cross_entropy_with_logits(logits, (targets > 0).float())
    torch.testing.assert_close(criterion(logits, targets), expected)
    _, criterion = loss_of(name="binary_cross_entropy", mixup=0.8)
    torch.testing.assert_close(criterion(logits, targets), F.binary_cross_entropy_with_logits(logits, targets))


def test_binary_cross_entropy_of_labels(logits: torch.Tensor) -> None:
    _, criterion = loss_of(name="binary_cross_entropy", smoothing=0.1)
    targets = F.one_hot(LABELS, 5) * 0.9 + 0.1 / 5
    torch.testing.assert_close(criterion(logits, LABELS), F.binary_cross_entropy_with_logits(logits, targets))


def test_damaged_test_images_are_left_out_and_counted(image_folders: object) -> None:
    options = [f"data.path={image_folders}", "data.image_size=32", "trainer.device=cpu", "trainer.num_workers=0"]
    model = "model={name: relpos2d_vit_tiny_patch16_224, patch_size: 16, embed_dim: 24, depth: 1, num_heads: 3}"
    task = Classify(load_config("classify/image_folder", [*options, model]))
    (image_folders / "val" / "a" / "1.png").write_bytes(b"no image")  # type: ignore[operator]
    task.model.train()
    with pytest.warns(UserWarning, match=r"1.png: no readable image .* left out of the test, 1 of 10 allowed"):
        metrics, records = task.evaluate(task.model, Accelerator(cpu=True))
    assert task.model.training
    assert (metrics["num_examples"], metrics["num_damaged"]) == (7, 1)
    assert [record["index"] for record in records] == [0, 2, 3, 4, 5, 6, 7]
    assert metrics["accuracy"] == sum(record["label"] == record["prediction"] for record in records) / 7
    task.max_damaged = 0
    with pytest.raises(TooManyDamaged, match=r"1 damaged examples, data.max_damaged = 0 are allowed: .*1.png"):
        task.evaluate(task.model, Accelerator(cpu=True))
