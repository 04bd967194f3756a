"""ViT: where its tokens stand, with prefix tokens, images of any size, dropped patches, masks and checkpointing."""

from typing import Any

import pytest
import torch
from torch import nn

from relpos2d import Grid, Points, swap
from tests.backbones.builders import RELATIVE, VITS, build, draw, images, swapped
from tests.oracles import gradients, pair_attention
from tests.tolerances import assert_close

PREFIXES: dict[int, dict[str, Any]] = {
    0: {"class_token": False, "global_pool": "avg"},
    1: {},
    5: {"reg_tokens": 4},
}
IMAGE = (48, 80)


@pytest.mark.parametrize("num_prefix", PREFIXES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_equals_a_loop_over_pairs(num_prefix: int, qk_norm: bool) -> None:
    model = swapped("vit", "table", img_size=IMAGE, dtype=torch.float64, qk_norm=qk_norm, **PREFIXES[num_prefix])
    attention = model.blocks[0].attn
    encoding = attention.encoding
    assert encoding.positions == Grid(3, 5, num_prefix_tokens=num_prefix)
    x = torch.randn(2, num_prefix + 15, 48, dtype=torch.float64)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
    q, k = attention.q_norm(q), attention.k_norm(k)

    def number(b: int, h: int, i: int, j: int) -> torch.Tensor:
        if i < num_prefix and j < num_prefix:
            return encoding.prefix_bias[2, h]
        if i < num_prefix:
            return encoding.prefix_bias[0, h]
        if j < num_prefix:
            return encoding.prefix_bias[1, h]
        (qy, qx), (ky, kx) = divmod(i - num_prefix, 5), divmod(j - num_prefix, 5)
        return encoding.relative_position_bias_table[(qy - ky + 2) * 9 + qx - kx + 4, h]

    expected = attention.proj(pair_attention(q, k, v, 0.25, number).transpose(1, 2).flatten(2))
    actual = attention(x, Grid(3, 5, num_prefix_tokens=num_prefix))
    assert_close(actual, expected)
    parameters = [p for p in attention.parameters() if p.requires_grad]
    for mine, theirs in zip(gradients(actual, parameters), gradients(expected, parameters), strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("num_prefix", PREFIXES)
@pytest.mark.parametrize("encoding", [name for name in RELATIVE if name != "none"])
def test_prefix_tokens_have_no_place(num_prefix: int, encoding: str) -> None:
    """Without any embedding, the order of the prefix tokens is nothing, that of the patches something."""
    model = swapped("vit", encoding, img_size=IMAGE, dtype=torch.float64, absolute="remove", **PREFIXES[num_prefix])
    attention, grid = model.blocks[0].attn, Grid(3, 5, num_prefix_tokens=num_prefix)
    x = torch.randn(1, grid.num_tokens, 48, dtype=torch.float64)
    out = attention(x, grid)
    order = [*reversed(range(num_prefix)), *range(num_prefix, grid.num_tokens)]
    assert_close(attention(x[:, order], grid)[:, order], out)
    order = [*range(num_prefix), num_prefix + 1, num_prefix, *range(num_prefix + 2, grid.num_tokens)]
    assert (attention(x[:, order], grid)[:, order] - out).abs().max() > 1e-6


@pytest.mark.parametrize("encoding", ["rope_mixed", "alibi", "sincos"])
@pytest.mark.parametrize("family", VITS)
def test_any_image_size(encoding: str, family: str) -> None:
    """A model that takes any image does at each size what a model made for that size does."""
    dynamic = swapped(family, encoding, img_size=(64, 64), dynamic_img_size=True, absolute="remove")
    for size in ((48, 80), (64, 64), (80, 32)):
        fixed = swapped(family, encoding, img_size=size, absolute="remove")
        fixed.load_state_dict(dynamic.state_dict())
        assert_close(dynamic(images(*size)), fixed(images(*size)))
        assert dynamic.blocks[0].positions.shape == (size[0] // 16, size[1] // 16)


def test_a_table_read_beyond_its_window_holds_its_edge() -> None:
    model = swapped("vit", "table", img_size=(32, 32), dynamic_img_size=True)
    encoding = model.blocks[0].attn.encoding
    bias = encoding.bias(Grid(1, 5), Grid(1, 5))[:, 0]
    assert torch.equal(bias[:, 1], bias[:, 4])
    assert not torch.equal(bias[:, 0], bias[:, 1])
    assert model(images(48, 80)).isfinite().all()


@pytest.mark.parametrize("encoding", ["table", "rope_mixed", "cpb", ["alibi", "rope_axial"]])
@pytest.mark.parametrize("num_prefix", PREFIXES)
def test_patch_dropout_keeps_the_places(encoding: Any, num_prefix: int) -> None:
    """Tokens that remain see one another as they do in the whole image from which nobody sees the others."""
    options = {"img_size": IMAGE, "dtype": torch.float64, "patch_drop_rate": 0.4, **PREFIXES[num_prefix]}
    model = swapped("vit", encoding, **options)
    image = images(*IMAGE, dtype=torch.float64)
    kept: list[torch.Tensor] = []
    model.drop_patches.register_forward_hook(lambda module, args, output: kept.append(output[1]))
    dropped = model.train().forward_features(image)
    assert isinstance(model.blocks[0].positions, Points)
    assert kept[0].shape == (2, 9)
    tokens = torch.cat((torch.arange(num_prefix).expand(2, -1), kept[0] + num_prefix), dim=1)
    seen = torch.zeros(2, num_prefix + 15, dtype=torch.bool).scatter(1, tokens, True)
    whole = model.eval().forward_features(image, attn_mask=seen[:, None, None])
    assert model.blocks[0].positions == Grid(3, 5, num_prefix_tokens=num_prefix)
    assert_close(dropped, whole.gather(1, tokens.unsqueeze(-1).expand(-1, -1, 48)))


def test_patch_dropout_survives_a_second_swap_and_checkpointing() -> None:
    model = swap(swapped("vit", "table", img_size=IMAGE, patch_drop_rate=0.4), "rope_mixed").train()
    assert model.drop_patches.prob == 0.4
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        results.append(gradients(model(images(*IMAGE)), list(model.parameters())))
        assert isinstance(model.blocks[0].positions, Points)
    for plain, again in zip(*results, strict=True):
        assert_close(again, plain)


@pytest.mark.parametrize("kind", ["bool", "float", "per sample", "causal"])
def test_masks_mean_what_they_mean_in_timm(kind: str) -> None:
    timm_model = build("vit", img_size=IMAGE, dtype=torch.float64)
    model = swap(build("vit", img_size=IMAGE, dtype=torch.float64), "none")
    image = images(*IMAGE, dtype=torch.float64)
    mask = (torch.rand(16, 16) > 0.4) | torch.eye(16, dtype=torch.bool)
    options: dict[str, Any] = {
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": torch.randn(16, 16, dtype=torch.float64)},
        "per sample": {"attn_mask": torch.stack((mask, mask.T))[:, None]},
        "causal": {"is_causal": True},
    }[kind]
    expected = timm_model(image, **options)
    assert_close(model(image, **options), expected)
    assert (model(image) - expected).abs().max() > 1e-6
    mine = model.forward_intermediates(image, intermediates_only=True, **options)
    theirs = timm_model.forward_intermediates(image, intermediates_only=True, **options)
    assert_close(torch.stack(mine), torch.stack(theirs))
    again = swapped("vit", "rope_mixed", img_size=IMAGE, dtype=torch.float64)
    assert (again(image, **options) - again(image)).abs().max() > 1e-6


def test_causal_means_the_order_of_tokens() -> None:
    model = swapped("vit", "table", img_size=IMAGE, dtype=torch.float64)
    image = images(*IMAGE, dtype=torch.float64)
    lower = torch.ones(16, 16, dtype=torch.bool).tril()
    assert_close(model(image, is_causal=True), model(image, attn_mask=lower))


@pytest.mark.parametrize("family", VITS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_absolute_embedding_fades(family: str, dynamic: bool) -> None:
    options = {"img_size": IMAGE, "dtype": torch.float64, "dynamic_img_size": dynamic}
    kept = swapped(family, "rope_axial", absolute="keep", **options)
    removed = swapped(family, "rope_axial", absolute="remove", **options)
    fading = swapped(family, "rope_axial", absolute="fade", **options)
    for model in (removed, fading):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(dict(kept.named_parameters())[name])
    image = images(*IMAGE, dtype=torch.float64)
    assert float(fading.absolute_strength) == 1.0
    assert_close(fading(image), kept(image))
    fading.absolute_strength.fill_(0.0)
    assert_close(fading(image), removed(image))
    fading.absolute_strength.fill_(0.25)
    with torch.no_grad():
        kept.pos_embed.mul_(0.25)
    assert_close(fading(image), kept(image))
    assert (fading(image) - removed(image)).abs().max() > 1e-6
    fading.train()
    pos_embed = gradients(fading(image), [fading.pos_embed])[0]
    assert pos_embed.abs().max() > 0

    # the strength is saved, and weights of timm leave it alone
    copy = swapped(family, "rope_axial", absolute="fade", seed=5, **options)
    copy.load_state_dict(fading.state_dict())
    assert float(copy.absolute_strength) == 0.25
    copy.load_state_dict(build(family, **options).state_dict())
    assert float(copy.absolute_strength) == 0.25


@pytest.mark.parametrize("family", VITS)
@pytest.mark.parametrize("encoding", ["sincos", "learned", ["learned", "rope_mixed"]])
@pytest.mark.parametrize("absolute", ["keep", "fade"])
def test_timm_weights_load_into_a_model_with_two_embeddings(family: str, encoding: Any, absolute: str) -> None:
    timm_model = build(family, img_size=IMAGE, seed=1)
    model = swapped(family, encoding, img_size=IMAGE, seed=2, absolute=absolute)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(timm_model.state_dict(), strict=True)
    assert torch.equal(model.pos_embed, timm_model.pos_embed)
    for name, parameter in model.named_parameters():
        if "encoding" in name:
            assert torch.equal(parameter, own[name]), name


@pytest.mark.parametrize("encoding", ["none", "table", "cpb", "rope_mixed", "learned"])
def test_checkpointing_with_two_sizes_in_one_backward(encoding: str) -> None:
    model = swapped("vit", encoding, img_size=IMAGE, dtype=torch.float64, dynamic_img_size=True, reg_tokens=2)
    parameters = list(model.parameters())
    first, second = images(*IMAGE, dtype=torch.float64), images(80, 32, dtype=torch.float64)

    def both() -> list[torch.Tensor]:
        outputs = torch.cat((model(first), model(second)))
        return gradients(outputs, parameters)

    expected = both()
    runs: list[int] = []
    handle = model.blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))
    model.set_grad_checkpointing(True)
    actual = both()
    assert len(runs) == 4, "each block runs again for each of the two images"
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close(mine, theirs)
    runs.clear()
    model.set_grad_checkpointing(False)
    both()
    assert len(runs) == 2
    handle.remove()


def test_checkpointing_turned_on_before_the_swap_stays_on() -> None:
    model = build("vit", img_size=IMAGE)
    model.set_grad_checkpointing(True)
    swap(model, "rope_mixed")
    draw(model, 2)
    runs: list[int] = []
    model.blocks[1].register_forward_hook(lambda *_: runs.append(1))
    model.blocks[1].attn.register_forward_hook(lambda *_: runs.append(1))
    model(images(*IMAGE)).sum().backward()
    assert len(runs) == 3
    swap(model, "table")
    runs.clear()
    model(images(*IMAGE)).sum().backward()
    assert len(runs) == 3


def test_both_heads_of_a_distilled_model() -> None:
    timm_model = build("distilled", img_size=IMAGE, dtype=torch.float64).train()
    model = swap(build("distilled", img_size=IMAGE, dtype=torch.float64), "none").train()
    timm_model.set_distilled_training(True)
    model.set_distilled_training(True)
    image = images(*IMAGE, dtype=torch.float64)
    for mine, theirs in zip(model(image), timm_model(image), strict=True):
        assert_close(mine, theirs)
    assert model.blocks[0].positions == Grid(3, 5, num_prefix_tokens=2)


def test_gated_attention() -> None:
    """timm's option for attention of its own, which no registered ViT sets."""
    timm_model = build("vit", img_size=IMAGE, dtype=torch.float64)
    model = build("vit", img_size=IMAGE, dtype=torch.float64)
    for one in (timm_model, model):
        torch.manual_seed(11)
        for block in one.blocks:
            block.attn.gate = nn.Linear(48, 48, dtype=torch.float64)
    swap(model, "none")
    image = images(*IMAGE, dtype=torch.float64)
    assert_close(model(image), timm_model(image))
