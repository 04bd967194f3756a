"""The CTC loss on a GPU, where another implementation could be picked behind the scenes, is that of the CPU in float64."""

import pytest
import torch

from relpos2d.models import ConformerCTC
from relpos2d.models.ctc import ctc_losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_l3_the_targets_type_and_device_do_not_matter(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, 30, generator=generator, dtype=torch.float64)
    num_frames, num_tokens = (
        torch.tensor([40, 31, 7, 12, 40]),
        torch.tensor([12, 9, 12, 0, 1]),
    )  # the third is too short
    tokens = torch.randint(1, 30, (5, 12), generator=generator)

    def loss_and_gradient(x: torch.Tensor, where: str, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        losses = ctc_losses(x, num_frames.to(where), tokens.to(where, kind), num_tokens.to(where))
        (losses * torch.arange(1, 6, device=losses.device)).sum().backward()
        assert x.grad is not None
        return losses.detach().cpu().double(), x.grad.cpu().double()

    expected = loss_and_gradient(logits.clone(), "cpu", torch.int64)
    found = loss_and_gradient(logits.float().cuda(), device, dtype)
    assert found[0][2] == 0
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_a_clip_alone_and_in_a_padded_batch() -> None:
    model = ConformerCTC(30, 8000, encoding="transformer_xl", embed_dim=32, depth=2, num_heads=2).cuda().eval()
    samples = torch.randn(2, 12000, device="cuda") * 0.1
    lengths = torch.tensor([12000, 5000], device="cuda")
    with torch.no_grad():
        both, alone = model(samples, lengths), model(samples[1:, :5000], lengths[1:])
    count = int(alone.num_frames)
    torch.testing.assert_close(both.log_probs[1, :count], alone.log_probs[0], rtol=1e-3, atol=1e-3)
