"""swap() itself: what it keeps, what it refuses, and what it says it did."""

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from relpos2d import SwapReport, swap
from relpos2d.encoding import Combined, Encoding
from tests.backbones.builders import (
    ABSOLUTE,
    ENCODINGS,
    NATIVE,
    RELATIVE,
    SMALL,
    VITS,
    WINDOWED,
    build,
    draw,
    images,
    swapped,
)
from tests.tolerances import assert_close

FAMILIES = (*VITS, *WINDOWED)
IMAGE = (64, 96)


def small(family: str, **kwargs: Any) -> Any:
    return build(family, img_size=IMAGE, **kwargs)


def attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "qkv", None), nn.Linear)]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a swap might touch."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "parameters": {name: id(p) for name, p in model.named_parameters()},
        "buffers": {name: id(b) for name, b in model.named_buffers()},
        "training": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
    }


# Every encoding into every family ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_goes_into_every_family(family: str, encoding: str) -> None:
    without = swapped(family, "none", img_size=IMAGE, **({"absolute": "remove"} if family in VITS else {}))
    model = swapped(family, encoding, img_size=IMAGE, **({"absolute": "remove"} if family in VITS else {}))
    image = images(*IMAGE)
    out = model(image)
    assert out.shape == (2, 5)
    assert out.isfinite().all()
    names = {attention.encoding.name for attention in attentions(model)}
    assert names == {encoding if encoding in RELATIVE else "none"}
    assert model.swap_report.num_attentions == len(attentions(model))
    if encoding != "none":
        # the positions are felt: another order of patches gives more than what a model without positions gives
        turned = image.roll((16, 32), dims=(2, 3))
        if family in VITS:
            assert_close(without(turned), without(image))
        assert (model(turned) - out).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_list_is_a_sum(family: str) -> None:
    model = swapped(family, ["sincos", "table", {"name": "rope_mixed", "theta": 5.0}], img_size=IMAGE)
    for attention in attentions(model):
        assert isinstance(attention.encoding, Combined)
        assert [part.name for part in attention.encoding] == ["table", "rope_mixed"]
    home = model if family in VITS else model.patch_embed
    assert home.encoding.name == "sincos"
    assert model.swap_report.encoding == ["sincos", "table", {"name": "rope_mixed", "theta": 5.0}]
    image = images(*IMAGE)
    before = model(image)
    for name in ("table", "rope_mixed", "sincos"):
        changed = copy.deepcopy(model)
        for module in changed.modules():
            if isinstance(module, Encoding) and module.name == name:
                module.set_strength(0.0)
        assert (changed(image) - before).abs().max() > 1e-4


def test_options_reach_the_encoding() -> None:
    model = swap(small("vit"), "rope_axial", theta=7.0, layout="half")
    assert all((a.encoding.theta, a.encoding.layout) == (7.0, "half") for a in attentions(model))
    model = swap(small("vit"), {"name": "rope_axial", "theta": 3.0}, theta=8.0)
    assert all(a.encoding.theta == 8.0 for a in attentions(model))
    with pytest.raises(ValueError, match=r"give the options \['theta'\] to the members of the list, one by one"):
        swap(small("vit"), ["rope_axial", "table"], theta=7.0)


# What a swap keeps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_all_other_weights_stay(family: str) -> None:
    model = small(family)
    before = {id(p): (name, p.detach().clone()) for name, p in model.named_parameters()}
    swap(model, "rope_axial")
    report = model.swap_report
    after = {id(p): p for p in model.parameters()}
    positions = {n for n, _ in before.values() if "relative_position_bias_table" in n or "cpb_mlp" in n}
    assert {name for key, (name, _) in before.items() if key not in after} == positions == set(report.removed)
    assert set(report.kept) == {name for name, _ in before.values()} - positions
    assert report.added == []
    for key, (name, values) in before.items():
        if key in after:
            assert torch.equal(after[key], values), name


@pytest.mark.parametrize("family", FAMILIES)
def test_training_flags_of_every_module_stay(family: str) -> None:
    model = small(family).train()
    block = attentions(model)[0]
    block.eval()
    model.patch_embed.eval()
    before = {name: module.training for name, module in model.named_modules()}
    swap(model, ["table", "sincos"])
    after = {name: module.training for name, module in model.named_modules()}
    assert {name: after[name] for name in before if name in after} == {n: f for n, f in before.items() if n in after}
    assert not block.encoding.training
    assert all(module.training for module in attentions(model)[1].encoding.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_requires_grad_stays(family: str) -> None:
    model = small(family)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    swap(model, NATIVE.get(family, "learned"))
    assert not any(p.requires_grad for p in model.parameters())
    swap(model, "rope_mixed")
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if name.endswith("encoding.freqs")}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_dtype_stays(family: str, encoding: str) -> None:
    model = swap(small(family, dtype=torch.bfloat16), encoding)
    floating = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    assert {t.dtype for t in floating} == {torch.bfloat16}
    assert model(images(*IMAGE, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_meta_device_stays(family: str, encoding: str) -> None:
    with torch.device("meta"):
        name, sizes = SMALL[family]
        model = timm.create_model(name, img_size=IMAGE, **sizes)
    swap(model, encoding)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_hooks_stay(family: str) -> None:
    model = small(family)
    seen: list[str] = []
    attention = attentions(model)[0]
    attention.register_forward_hook(lambda *_: seen.append("attention"))
    attention.register_forward_pre_hook(lambda *_: seen.append("before attention"))
    block = model.blocks[1] if family in VITS else model.layers[0].blocks[1]
    block.register_forward_hook(lambda *_: seen.append("block"))
    model.register_forward_hook(lambda *_: seen.append("model"))
    swap(model, "rope_mixed")
    model(images(*IMAGE))
    assert seen == ["before attention", "attention", "block", "model"]


def test_a_swap_returns_the_model_itself() -> None:
    model = small("vit")
    assert swap(model, "alibi") is model
    assert isinstance(model, timm.models.vision_transformer.VisionTransformer)


# A second swap -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", ["cpb", "table", ["rope_mixed", "sincos"], "none", "learned"])
def test_a_second_swap_replaces_the_first(family: str, first: Any) -> None:
    kept = {"absolute": "keep"} if family in VITS else {}
    twice = swap(swap(small(family), first, **kept), "alibi", **kept)
    once = swap(small(family), "alibi", **kept)
    assert twice.state_dict().keys() == once.state_dict().keys()
    image = images(*IMAGE)
    assert torch.equal(twice(image), once(image))
    assert {name: type(m) for name, m in twice.named_modules()} == {name: type(m) for name, m in once.named_modules()}


@pytest.mark.parametrize("family", WINDOWED)
def test_the_native_parameters_survive_a_sum(family: str) -> None:
    native = NATIVE[family]
    model, image = small(family), images(*IMAGE)
    before = model(image)
    swap(model, [native, "rope_axial"])
    assert model.swap_report.taken_over
    swap(model, native)
    assert model.swap_report.taken_over
    assert_close(model(image), before)


@pytest.mark.parametrize("family", WINDOWED)
def test_the_native_parameters_survive_a_resize(family: str) -> None:
    native = NATIVE[family]
    model = swap(small(family), native)
    before = model(images(*IMAGE))
    model.set_input_size((96, 160))
    resized = model(images(96, 160))
    swap(model, native)
    assert model.swap_report.taken_over
    assert model.swap_report.same_function
    assert torch.equal(model(images(96, 160)), resized)
    model.set_input_size(IMAGE)
    assert torch.equal(model(images(*IMAGE)), before)


def test_learned_positions_survive_a_resize() -> None:
    model = swap(small("vit"), "learned")
    model.set_input_size((96, 160))
    resized = model(images(96, 160))
    swap(model, ["learned", {"name": "rope_axial", "strength": 0.0}])
    assert model.swap_report.taken_over == ["pos_embed"]
    assert_close(model(images(96, 160)), resized)


# Refusals ------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("vit", "rope_mixd", {}, r"unknown encoding 'rope_mixd'; did you mean 'rope_mixed'\?"),
    ("vit", "", {}, "unknown encoding ''"),
    ("vit", [], {}, "an empty list is no encoding; use 'none'"),
    ("vit", ["table", "alibbi"], {}, r"did you mean 'alibi'\?"),
    ("vit", "rope_mixed", {"thetta": 2.0}, r"'rope_mixed' has no option 'thetta'; did you mean 'theta'\?"),
    ("vit", "rope_mixed", {"theta": -2.0}, "theta=-2.0 must be positive"),
    ("vit", "rope_mixed", {"strength": 1.5}, "strength=1.5 must be between 0"),
    ("vit", "rope_mixed", {"absolute": "gone"}, "absolute='gone' must be one of keep, fade, remove"),
    ("vit", "table", {"mask_padding": True}, "mask_padding is for windows; a VisionTransformer has none"),
    ("distilled", "rope_axial", {"layout": "pairs"}, "layout='pairs' must be one of interleaved, half"),
    ("swin", "table", {"resize": "nearest"}, "resize='nearest' must be one of timm, bicubic, clamp"),
    ("swin", ["sincos", "tabel"], {}, r"did you mean 'table'\?"),
    ("swin", "rope_mixed", {"absolute": "remove"}, "a swin model has no absolute position embedding"),
    ("swinv2", "rope_mixed", {"absolute": "fade"}, "a swinv2 model has no absolute position embedding"),
    ("swinv2", "cpb", {"hidden_dim": 0}, "hidden_dim=0 must be at least 1"),
    ("swinv2", 3, {}, "must be a name, a mapping with a name, or a list of these"),
    ("vit", [["table"], 4], {}, r"\['table'\] in \[\['table'\], 4\] must be a name or a mapping with a name"),
]


@pytest.mark.parametrize(("family", "encoding", "options", "message"), REFUSED)
@pytest.mark.parametrize("swapped_before", [False, True])
def test_a_refused_swap_leaves_the_model_untouched(
    family: str, encoding: Any, options: dict[str, Any], message: str, swapped_before: bool
) -> None:
    model = small(family)
    if swapped_before:
        swap(model, ["sincos", "table"])
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        swap(model, encoding, **options)
    assert snapshot(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_head_sizes_are_refused(family: str) -> None:
    heads = {"embed_dim": 30} if family in VITS else {"embed_dim": 30, "num_heads": (3, 6, 12, 24)}
    model = small(family, **heads)
    before = snapshot(model)
    with pytest.raises(ValueError, match="head_dim=10 must be a multiple of 4"):
        swap(model, "rope_axial")
    with pytest.raises(ValueError, match="head_dim=10 must be a multiple of 4"):
        swap(model, ["table", "rope_mixed"])
    assert snapshot(model) == before
    swap(model, "table")(images(*IMAGE))


def test_fade_needs_something_to_fade() -> None:
    with pytest.raises(ValueError, match="absolute='fade', but the model has no absolute position embedding"):
        swap(small("vit", pos_embed="none"), "rope_mixed", absolute="fade")
    with pytest.raises(ValueError, match=r"absolute='fade' needs pos_drop_rate=0, the model has 0\.25"):
        swap(small("vit", pos_drop_rate=0.25), "rope_mixed", absolute="fade")


class Wrapped(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body


FOREIGN = {
    "resnet18": lambda: timm.create_model("resnet18"),
    "parallel blocks": lambda: timm.create_model(
        "vit_tiny_patch16_224", depth=1, img_size=32, block_fn=ParallelScalingBlock
    ),
    "vit_relpos": lambda: timm.create_model("vit_relpos_small_patch16_224", depth=1),
    "differential attention": lambda: timm.create_model(
        "vit_tiny_patch16_224", depth=1, img_size=32, num_heads=2, embed_dim=32, attn_layer="diff"
    ),
    "swinv2_cr": lambda: timm.create_model("swinv2_cr_tiny_224", depths=(1, 1, 1, 1), embed_dim=24),
    "beit": lambda: timm.create_model("beit_base_patch16_224", depth=1, embed_dim=48, num_heads=3),
    "eva": lambda: timm.create_model("eva02_tiny_patch14_224", depth=1, embed_dim=48, num_heads=3),
    "a wrapped ViT": lambda: Wrapped(small("vit")),
    "a wrapped Swin": lambda: Wrapped(small("swin")),
    "a stage of Swin": lambda: small("swin").layers[0],
    "a stage of Swin V2": lambda: nn.Sequential(small("swinv2")),
    "a linear layer": lambda: nn.Linear(3, 4),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_that_cannot_be_swapped_says_which_can(name: str) -> None:
    model = FOREIGN[name]()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"families that can be swapped: vit_\*.*swinv2_\*.*; swin_\*") as error:
        swap(model, "none")
    assert type(model).__name__ in str(error.value)
    assert snapshot(model) == before


# The report ----------------------------------------------------------------------------------------------------------

QUIET_ROPE = {"name": "rope_mixed", "strength": 0.0}
QUIET_ALIBI = {"name": "alibi", "strength": 0.0}

#: family, encodings swapped in one after the other, options of the last swap, and whether it keeps the function
SAME: list[tuple[str, list[Any], dict[str, Any], bool]] = [
    ("vit", ["none"], {}, True),
    ("vit", ["none"], {"absolute": "remove"}, False),
    ("vit", ["none"], {"absolute": "fade"}, True),
    ("vit", ["rope_mixed"], {}, False),
    ("vit", [QUIET_ROPE], {}, True),
    ("vit", [QUIET_ROPE], {"absolute": "fade"}, True),
    ("vit", [QUIET_ROPE], {"absolute": "remove"}, False),
    ("vit", [[QUIET_ROPE, QUIET_ALIBI]], {}, True),
    ("vit", [[QUIET_ROPE, "alibi"]], {}, False),
    ("vit", ["learned"], {}, True),
    ("vit", ["learned"], {"absolute": "keep"}, False),
    ("vit", ["learned"], {"strength": 0.0}, False),
    ("vit", [{"name": "sincos", "strength": 0.0}], {"absolute": "keep"}, True),
    ("vit", ["sincos"], {}, False),
    ("vit", [["learned", QUIET_ROPE]], {}, True),
    ("vit", [["learned", "sincos"]], {}, False),
    # in a sum the embedding has no vectors for prefix tokens, so one that has them is not taken over
    ("vit", [["learned", {"name": "sincos", "strength": 0.0}]], {}, False),
    ("deit3", [["learned", {"name": "sincos", "strength": 0.0}]], {}, True),
    ("vit", ["rope_mixed", "none"], {}, False),
    ("vit", ["rope_mixed", QUIET_ROPE], {}, False),
    ("vit", [QUIET_ROPE, "none"], {}, True),
    ("vit", ["learned", "learned"], {}, True),
    ("vit", ["learned", "none"], {}, False),
    ("vit", [["learned", "alibi"], "learned"], {}, False),
    ("vit", [["sincos", "none"], "none"], {}, False),
    ("deit3", ["learned"], {}, True),
    ("deit3", ["sincos"], {}, False),
    ("distilled", ["learned"], {}, True),
    ("distilled", ["none"], {"absolute": "remove"}, False),
    *[
        case
        for family, native in NATIVE.items()
        for case in [
            (family, [native], {}, True),
            (family, [native], {"strength": 0.5}, False),
            (family, [native], {"mask_padding": True}, False),
            (family, ["none"], {}, False),
            (family, [QUIET_ROPE], {}, False),
            (family, [[native, QUIET_ROPE]], {}, True),
            (family, [[native, "rope_mixed"]], {}, False),
            (family, [[native, "sincos"]], {}, False),
            (family, [[native, {"name": "sincos", "strength": 0.0}]], {}, True),
            (family, [[native, "rope_mixed"], native], {}, False),
            (family, [[native, "sincos"], native], {}, False),
            (family, [[native, QUIET_ROPE], native], {}, True),
            (family, [{"name": native, "strength": 0.5}, native], {}, False),
            (family, ["none", native], {}, False),
            (family, ["none", "none"], {}, True),
            (family, ["none", QUIET_ROPE], {}, True),
            (family, ["alibi", "none"], {}, False),
        ]
    ],
]


@pytest.mark.parametrize(("family", "encodings", "options", "same"), SAME)
def test_same_function_is_the_truth(family: str, encodings: list[Any], options: dict[str, Any], same: bool) -> None:
    image = images(60, 92) if family in WINDOWED else images(*IMAGE)
    model = build(family, img_size=tuple(image.shape[2:]))
    for encoding in encodings[:-1]:
        swap(model, encoding)
    before = model(image)
    report = swap(model, encodings[-1], **options).swap_report
    difference = (model(image) - before).abs().max()
    assert report.same_function == same
    if same:
        assert difference < 1e-4
    else:
        assert difference > 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", [name for name in RELATIVE])
def test_strength_zero_is_no_encoding_bit_for_bit(family: str, encoding: str) -> None:
    without = swap(small(family), "none")
    model = swap(small(family), encoding, strength=0.0)
    draw(model, seed=1)
    draw(without, seed=1)
    for name, parameter in without.named_parameters():
        dict(model.named_parameters())[name].data.copy_(parameter)
    image = images(*IMAGE)
    if encoding in ("rope_axial", "rope_mixed", "none"):
        assert torch.equal(model(image), without(image))
    else:
        assert_close(model(image), without(image))


def test_mask_padding_given_up_changes_the_function() -> None:
    model = swap(build("swin", img_size=(60, 92)), "table", mask_padding=True)
    before = model(images(60, 92))
    swap(model, "table")
    assert not model.swap_report.same_function
    assert (model(images(60, 92)) - before).abs().max() > 1e-5


def test_a_faded_embedding_restored_changes_the_function() -> None:
    model = swap(small("vit"), "none", absolute="fade")
    model.absolute_strength.fill_(0.5)
    before = model(images(*IMAGE))
    assert not swap(model, "none").swap_report.same_function
    assert (model(images(*IMAGE)) - before).abs().max() > 1e-5


def test_the_report_lists_what_happened() -> None:
    report = swap(small("swin"), [{"name": "table", "strength": 0.5}, "rope_mixed", "learned"]).swap_report
    assert isinstance(report, SwapReport)
    tables = [f"layers.{i}.blocks.{j}.attn" for i, depth in enumerate((2, 2, 1, 1)) for j in range(depth)]
    assert report.family == "swin"
    assert report.absolute == "none to keep"
    assert report.taken_over == ["relative_position_bias_table"]
    assert {f"{path}.relative_position_bias_table" for path in tables} <= set(report.kept)
    assert report.removed == []
    assert set(report.added) == {"patch_embed.encoding.pos_embed"} | {f"{p}.encoding.parts.1.freqs" for p in tables}
    assert report.strength == {"combined": 1.0, "table": 0.5, "rope_mixed": 1.0, "learned": 1.0}
    text = str(report)
    for part in ("6 attentions (swin)", "changed", "table 0.5", "none to keep", "relative_position_bias_table", "7 ("):
        assert part in text
    report = swap(small("vit"), "none", absolute="remove").swap_report
    assert (report.absolute, report.removed, report.added) == ("remove", ["pos_embed"], [])
    assert "the same as before" in str(swap(small("vit"), "none").swap_report)
    assert swap(small("vit", pos_embed="none"), "alibi").swap_report.absolute == "none to keep"
    assert set(ABSOLUTE) == {"sincos", "learned"}


# Feature extractors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_feature_extractors_can_be_swapped(family: str) -> None:
    indices = (0, 1) if family in VITS else (0, 1, 3)
    native = NATIVE.get(family, "none")
    options: dict[str, Any] = {"features_only": True, "out_indices": indices, "dtype": torch.float64}
    plain, image = small(family, **options), images(*IMAGE, dtype=torch.float64)
    model = swap(small(family, **options), native)
    assert model.swap_report.same_function
    for mine, theirs in zip(model(image), plain(image), strict=True):
        assert_close(mine, theirs, torch.float32)
    model.load_state_dict(plain.state_dict())
    swap(model, ["rope_mixed", "learned"])
    assert all((m - t).abs().max() > 1e-4 for m, t in zip(model(image), plain(image), strict=True))
