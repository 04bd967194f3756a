"""Detectors on a GPU: what the CPU finds in float64, in padded batches and in bf16 training."""

import pytest
import torch

from relpos2d.models.detection import DETECTORS
from tests.models.detectors import detector, target

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("encoding", ["table", "rope_mixed"])
def test_maps_are_those_of_the_cpu(encoding: str) -> None:
    model = detector("retinanet", encoding=encoding, out_indices=(0, 1)).eval()
    images = [torch.rand(3, 50, 70), torch.rand(3, 90, 40)]
    with torch.no_grad():
        expected = model.double().backbone(model.transform([image.double() for image in images])[0].tensors)
        model = model.float().cuda()
        found = model.backbone(model.transform([image.cuda() for image in images])[0].tensors)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name].double().cpu(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", DETECTORS)
def test_a_step_in_bf16(name: str) -> None:
    model = detector(name).cuda().train()
    images = [torch.rand(3, 50, 70, device="cuda"), torch.rand(3, 90, 40, device="cuda")]
    masks = name == "mask_rcnn"
    targets = [
        target([[5.0, 5, 30, 40], [20, 10, 60, 44]], [3, 1], (50, 70) if masks else None),
        target([], [], (90, 40) if masks else None),
    ]
    with torch.autocast("cuda", torch.bfloat16):
        losses = model(images, [{key: value.cuda() for key, value in one.items()} for one in targets])
    total = sum(value.float() for value in losses.values())
    total.backward()
    assert torch.isfinite(total)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        assert {found["boxes"].device.type for found in model(images)} == {"cuda"}
