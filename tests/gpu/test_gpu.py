"""Everything that is held true on the CPU and could differ on a GPU. `make test-gpu` runs exactly these."""

import copy

import pytest
import timm
import torch

import relpos2d
from relpos2d import Grid, attend, create_encoding, list_encodings, swap

pytestmark = pytest.mark.gpu

NAMES = [info.name for info in list_encodings()]
# the explicit backend in float32 against the fused kernel in the dtype itself, as a relative RMS error
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 1e-2}


def build(name: str, positions: Grid, dtype: torch.dtype) -> relpos2d.Encoding:
    encoding = create_encoding(name, num_heads=3, head_dim=24, positions=positions, device="cuda")
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(std=0.1)
    return encoding.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fused_equals_explicit(name: str, dtype: torch.dtype) -> None:
    positions = Grid(5, 9, num_prefix_tokens=1)
    encoding = build(name, positions, dtype)
    reference = copy.deepcopy(encoding).float()
    qkv = [
        torch.randn(2, 3, positions.num_tokens, 24, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    ]
    qkv32 = [x.detach().float().requires_grad_() for x in qkv]
    weight = torch.randn(2, 3, positions.num_tokens, 24, device="cuda")

    out = attend(*qkv, encoding, positions)
    expected = attend(*qkv32, reference, positions, backend="explicit")
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()

    assert out.dtype == dtype
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(qkv, qkv32, strict=True))]
    pairs += [
        (a.grad, b.grad)
        for a, b in zip(encoding.parameters(), reference.parameters(), strict=True)
        if b.grad is not None
    ]
    for got, wanted in pairs:
        assert got is not None
        assert wanted is not None
        assert (got.float() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm() + 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_swapped_model_trains_in_bfloat16_autocast(source: str, name: str) -> None:
    depth = {"depth": 2} if "vit" in source else {"depths": (2, 2)}
    model = timm.create_model(source, img_size=64, num_classes=5, **depth).cuda()
    model = swap(model, name)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 3, 64, 64, device="cuda")).float().square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["table", "cpb", "rope_mixed"])
def test_compiled_block_equals_eager(name: str) -> None:
    model = swap(timm.create_model("swin_tiny_patch4_window7_224", img_size=112, depths=(2, 2)).cuda().eval(), name)
    block = model.layers[0].blocks[1]
    x = torch.randn(2, 28, 28, 96, device="cuda")
    with torch.no_grad():
        expected = block(x)
        got = torch.compile(block, fullgraph=True)(x)
    assert (got - expected).abs().max() <= 2e-3 * expected.abs().max()


def test_parity_with_timm_on_the_device() -> None:
    for source, name in (("swin_tiny_patch4_window7_224", "table"), ("swinv2_tiny_window8_256", "cpb")):
        model = timm.create_model(source, img_size=(96, 160), depths=(2, 2)).cuda().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        x = torch.randn(2, 3, 96, 160, device="cuda", dtype=torch.float64)
        expected = model(x)
        got = swap(model, name)(x)
        assert (got - expected).abs().max() <= 1e-10 * expected.abs().max()
