"""timm's conventions on every registered model, with its native and with other encodings."""

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import timm
import torch
from timm.layers import Format
from timm.models import group_parameters
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

import relpos2d
from relpos2d.backbones.registry import SOURCES, register_backbone
from tests.backbones.builders import SMALL, draw, images
from tests.oracles import gradients
from tests.refusals import refuses
from tests.tolerances import assert_close

NAMES = list(SOURCES)
ENCODINGS: dict[str, list[Any]] = {
    "vit": ["none", "table", ["cpb", "rope_mixed", "sincos"]],
    "deit3": ["none", "rope_axial", "learned"],
    "swin": ["table", "rope_mixed", ["table", "cpb", "learned"]],
    "swinv2": ["cpb", "rope_axial", ["table", "alibi", "sincos"]],
}
LARGE = (192, 320)


def family(name: str) -> str:
    return name.split("_")[1]


def is_vit(name: str) -> bool:
    return family(name) in ("vit", "deit3")


CASES = [(name, index) for name in NAMES for index in range(len(ENCODINGS[family(name)]))]
EACH_FAMILY = [(name, index) for name, index in CASES if "small" in name]


def encoding_of(name: str, index: int) -> Any:
    return ENCODINGS[family(name)][index]


def create(name: str, index: int, seed: int = 1, **kwargs: Any) -> Any:
    sizes = SMALL[family(name)][1]
    model = timm.create_model(name, encoding=encoding_of(name, index), num_classes=5, **{**sizes, **kwargs})
    draw(model, seed)
    return model.eval()


@functools.cache
def shared(name: str, index: int) -> Any:
    """A model for 192x320 images that no test changes."""
    return create(name, index, img_size=LARGE)


@functools.cache
def image() -> Tensor:
    return images(*LARGE, batch=1)


def positions(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if "encoding." in name}


def test_ten_models_are_registered() -> None:
    assert sorted(timm.list_models("relpos2d_*")) == sorted(NAMES)
    assert len(NAMES) == 10
    assert set(timm.list_pretrained("relpos2d_*")) == {
        "relpos2d_" + source for name in NAMES for source in timm.list_pretrained(f"{name.removeprefix('relpos2d_')}.*")
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_is_asked_for_the_source_model(name: str) -> None:
    source = name.removeprefix("relpos2d_")
    for pretrained in timm.list_pretrained(f"{source}.*"):
        theirs = timm.get_pretrained_cfg(pretrained)
        ours = timm.get_pretrained_cfg("relpos2d_" + pretrained)
        assert ours.architecture == name
        assert ours.hf_hub_id == theirs.hf_hub_id
        assert ours.hf_hub_id is None or ours.hf_hub_id.startswith("timm/" + source)
        assert (ours.input_size, ours.num_classes, ours.first_conv) == (
            theirs.input_size,
            theirs.num_classes,
            theirs.first_conv,
        )


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if "tiny" in name or "deit3" in name else pytest.mark.long)
    for name in NAMES
])  # fmt: skip
def test_true_size(name: str) -> None:
    model = timm.create_model(name).eval()
    side = 256 if family(name) == "swinv2" else 224
    assert model.pretrained_cfg["architecture"] == name
    assert model.swap_report.same_function
    with torch.no_grad():
        out = model(images(side, side, batch=1))
    assert out.shape == (1, 1000)
    assert out.isfinite().all()
    with torch.device("meta"):
        source = timm.create_model(name.removeprefix("relpos2d_"))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in source.parameters())


@pytest.mark.parametrize(("name", "index"), CASES)
def test_forward_and_backward(name: str, index: int) -> None:
    side = 256 if family(name) == "swinv2" else 224
    assert create(name, index)(images(side, side, batch=1)).shape == (1, 5)

    model = shared(name, index)
    parameters = dict(model.named_parameters())
    grads = dict(zip(parameters, gradients(model(image()), list(parameters.values())), strict=True))
    assert all(g.isfinite().all() for g in grads.values())
    zero = {parameter for parameter, g in grads.items() if not g.any()}
    # the class token has no offset to anything, so where it alone is pooled, the last block's offsets are not felt;
    # a rotation is felt: the keys are turned
    expected = {
        parameter
        for parameter in parameters
        if is_vit(name) and parameter.startswith("blocks.1.") and ("_table" in parameter or "cpb_mlp" in parameter)
    }
    assert zero == expected
    assert bool(expected) == (is_vit(name) and encoding_of(name, index) in ("table", ["cpb", "rope_mixed", "sincos"]))


@pytest.mark.parametrize(("name", "index"), CASES)
def test_features_and_head(name: str, index: int) -> None:
    model = copy.deepcopy(shared(name, index))
    with torch.no_grad():
        features = model.forward_features(image())
        assert features.shape == ((1, 241, 48) if is_vit(name) else (1, 6, 10, 192))
        assert torch.equal(model.forward_head(features), model(image()))
        assert model.forward_head(features, pre_logits=True).shape == (1, model.num_features)
        model.reset_classifier(3)
        assert model(image()).shape == (1, 3)
        model.reset_classifier(0)
        assert torch.equal(model(image()), model.forward_head(features, pre_logits=True))


@pytest.mark.parametrize(("name", "index"), CASES)
def test_features_only_as_timm(name: str, index: int) -> None:
    indices = (0, 1) if is_vit(name) else (0, 1, 2, 3)
    options = {**SMALL[family(name)][1], "img_size": LARGE, "features_only": True, "out_indices": indices}
    plain = timm.create_model(name.removeprefix("relpos2d_"), **options)
    model = timm.create_model(name, encoding=encoding_of(name, index), **options)
    draw(plain, 1)
    draw(model, 1)
    assert model.feature_info.channels() == plain.feature_info.channels()
    assert model.feature_info.reduction() == plain.feature_info.reduction()
    assert model.output_fmt == Format.NCHW
    assert model.swap_report.num_attentions == (2 if is_vit(name) else 6)
    assert model.swap_report.same_function == (index == 0 or encoding_of(name, index) == "learned")
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        mine, theirs = model.eval()(image()), plain.eval()(image())
    if plain.output_fmt == Format.NHWC:
        theirs = [t.permute(0, 3, 1, 2) for t in theirs]
    assert [m.shape for m in mine] == [t.shape for t in theirs]
    if model.swap_report.same_function:
        for m, t in zip(mine, theirs, strict=True):
            assert_close(m / t.std(), t / t.std())
    else:
        assert (mine[-1] - theirs[-1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", [name for name in NAMES if "tiny" in name])
def test_features_of_images_of_any_size(name: str) -> None:
    """Without an option: those of a model made for the size, an image that is not of whole patches filled up with zeros."""
    own, patch = ({"pos_embed": "none"}, 16) if is_vit(name) else ({"window_size": 4}, 4)
    options = {**SMALL[family(name)][1], **own, "features_only": True, "out_indices": (0, 1)}
    model = timm.create_model(name, encoding="rope_mixed", **options)
    draw(model, 1)
    model.eval()
    for height, width in ((96, 160), (61, 90)):
        image = images(height, width, batch=1)
        whole = nn.functional.pad(image, (0, -width % patch, 0, -height % patch))
        fixed = timm.create_model(
            name, encoding="rope_mixed", img_size=whole.shape[2:], dynamic_img_size=False, **options
        )
        fixed.load_state_dict(model.state_dict())
        for mine, theirs in zip(model(image), fixed.eval()(whole), strict=True):
            assert_close(mine, theirs)
    with pytest.raises(AssertionError, match="doesn't match model"):
        fixed(image)


def test_feature_dict_is_channels_first() -> None:
    options = {**SMALL["swin"][1], "img_size": 64, "features_only": True, "out_indices": (1, 2)}
    name = "relpos2d_swin_tiny_patch4_window7_224"
    as_dict = timm.create_model(name, feature_cls="dict", **options).eval()
    as_list = timm.create_model(name, **options).eval()
    as_list.load_state_dict(as_dict.state_dict())
    maps = as_dict(images(64, 64))
    assert [m.shape[1:] for m in maps.values()] == [(48, 8, 8), (96, 4, 4)]
    for mine, theirs in zip(maps.values(), as_list(images(64, 64)), strict=True):
        assert torch.equal(mine, theirs)
    assert type(pickle.loads(pickle.dumps(as_dict))) is type(copy.deepcopy(as_dict)) is type(as_dict)


def test_a_name_of_its_own() -> None:
    """For libraries that hand on nothing but a name."""
    source, options = "relpos2d_vit_tiny_patch16_224", SMALL["vit"][1]
    register_backbone("registry_vit_rope", source, encoding="rope_mixed", theta=4.0, num_classes=3, **options)
    register_backbone("registry_vit_rope", source, encoding="rope_mixed", theta=4.0, num_classes=3, **options)
    assert timm.is_model("registry_vit_rope")
    model = timm.create_model("registry_vit_rope")
    assert model.blocks[1].attn.encoding.name == "rope_mixed"
    assert model.blocks[1].attn.encoding.theta == 4.0
    assert model.pretrained_cfg["architecture"] == source
    assert timm.create_model("registry_vit_rope", num_classes=7).head.out_features == 7
    assert "registry_vit_rope" not in relpos2d.backbones.registry.__all__
    with refuses(r"register_backbone: model='relpos2d_vit_tyny_.*did you mean 'relpos2d_vit_tiny_patch16_224'"):
        register_backbone("registry_vit_other", "relpos2d_vit_tyny_patch16_224")
    with refuses(r"'registry_vit_rope' is taken: it is relpos2d_vit_tiny_patch16_224 with \{'encoding': 'rope_mixed'"):
        register_backbone("registry_vit_rope", source, encoding="table")
    with refuses("name='resnet18' is taken: timm has it"):
        register_backbone("resnet18", source)
    for name in ("", "registry_vit.tag", "hf-hub:a/b", "a/b"):
        with refuses("register_backbone: name=|Model name"):
            register_backbone(name, source)
    assert not timm.is_model("registry_vit_other")


@pytest.mark.parametrize(("name", "index"), CASES)
def test_groups_for_layer_decay(name: str, index: int) -> None:
    model = shared(name, index)
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse))
        layer_of = {parameter: layer for layer, members in groups.items() for parameter in members}
        assert layer_of.keys() == dict(model.named_parameters()).keys()
        for parameter in positions(model):
            home = parameter.split(".attn.")[0] + ".attn.proj.weight" if ".attn." in parameter else None
            assert layer_of[parameter] == layer_of[home or "patch_embed.proj.weight"], parameter
    decayed = param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    assert sum(len(group["params"]) for group in decayed) == len(list(model.parameters()))


@pytest.mark.parametrize(("name", "index"), CASES)
def test_no_weight_decay(name: str, index: int) -> None:
    model = shared(name, index)
    assert positions(model) <= model.no_weight_decay()
    source = timm.create_model(name.removeprefix("relpos2d_"), **SMALL[family(name)][1])
    own = {parameter for parameter, _ in model.named_parameters()}
    assert source.no_weight_decay() & own <= model.no_weight_decay()
    without, within = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    assert (without["weight_decay"], within["weight_decay"]) == (0.0, 0.05)
    names = {id(p): parameter for parameter, p in model.named_parameters()}
    assert positions(model) <= {names[id(p)] for p in without["params"]}
    assert {names[id(p)] for p in within["params"]} & positions(model) == set()
    assert "blocks.0.mlp.fc1.weight" in {names[id(p)].replace("layers.0.", "") for p in within["params"]}


@pytest.mark.parametrize(("name", "index"), CASES)
def test_state_dict_deepcopy_and_pickle(name: str, index: int) -> None:
    model = shared(name, index)
    with torch.no_grad():
        expected = model(image())
        other = create(name, index, seed=2, img_size=LARGE)
        assert not torch.equal(other(image()), expected)
        other.load_state_dict(model.state_dict(), strict=True)
        assert torch.equal(other(image()), expected)
        copied = copy.deepcopy(model)
        restored = pickle.loads(pickle.dumps(model))
        for again in (copied, restored):
            assert type(again) is type(model)
            assert torch.equal(again(image()), expected)
            assert str(again.swap_report) == str(model.swap_report)
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(model(image()), expected)


@pytest.mark.parametrize(("name", "index"), EACH_FAMILY)
@pytest.mark.usefixtures("nan_memory")
def test_from_the_meta_device(name: str, index: int) -> None:
    model = shared(name, index)
    sizes = SMALL[family(name)][1]
    built = timm.create_model(
        name, encoding=encoding_of(name, index), num_classes=5, img_size=LARGE, **sizes, device="meta"
    )
    assert all(t.is_meta for t in (*built.parameters(), *built.buffers()))
    built = built.to_empty(device="cpu").eval()
    built.load_state_dict(model.state_dict(), strict=True)
    reinit_non_persistent_buffers(built)
    assert all(t.isfinite().all() for t in built.state_dict().values())
    with torch.no_grad():
        assert torch.equal(built(image()), model(image()))


@pytest.mark.parametrize(("name", "index"), EACH_FAMILY)
@pytest.mark.usefixtures("nan_memory")
def test_drawn_anew_after_the_meta_device(name: str, index: int) -> None:
    sizes = SMALL[family(name)][1]
    built = timm.create_model(
        name, encoding=encoding_of(name, index), num_classes=5, img_size=LARGE, **sizes, device="meta"
    )
    built = built.to_empty(device="cpu").eval()
    built.init_weights(needs_reset=True)
    reinit_non_persistent_buffers(built)
    unset = {key for key, t in [*built.named_parameters(), *built.named_buffers()] if not t.isfinite().all()}
    assert unset == set()
    with torch.no_grad():
        assert built(image()).isfinite().all()


@pytest.mark.parametrize(("name", "index"), [c for c in EACH_FAMILY if not is_vit(c[0])])
def test_checkpointing_with_two_sizes_in_one_backward(name: str, index: int) -> None:
    stages = {"depths": (2, 1), "num_heads": (3, 6)}
    model = create(name, index, img_size=(64, 96), dynamic_img_size=True, **stages).double()
    first, second = (images(*size, batch=1, dtype=torch.float64) for size in ((64, 96), (96, 32)))
    runs: list[int] = []
    model.layers[0].blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))

    def both() -> list[Tensor]:
        return gradients(torch.cat((model(first), model(second))), list(model.parameters()))

    expected = both()
    runs.clear()
    model.set_grad_checkpointing(True)
    actual = both()
    assert len(runs) == 4
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-10 * theirs.norm()


@pytest.mark.parametrize("name", NAMES)
def test_the_entry_point_says_what_it_is(name: str) -> None:
    entry = timm.model_entrypoint(name)
    assert entry.__name__ == name
    assert name.removeprefix("relpos2d_") in (inspect.getdoc(entry) or "")
    assert timm.is_model(name)


def test_options_go_to_the_encoding_or_to_timm() -> None:
    sizes = SMALL["vit"][1]
    model = timm.create_model(
        "relpos2d_vit_tiny_patch16_224", encoding="rope_mixed", theta=3.0, absolute="fade", drop_rate=0.25, **sizes
    )
    assert model.blocks[0].attn.encoding.theta == 3.0
    assert model.absolute_strength is not None
    assert model.head_drop.p == 0.25
    model = timm.create_model(
        "relpos2d_swin_tiny_patch4_window7_224", strength=0.5, mask_padding=True, window_size=5, **SMALL["swin"][1]
    )
    assert model.layers[0].blocks[0].attn.encoding.name == "table"
    assert float(model.layers[0].blocks[0].attn.encoding.strength) == 0.5
    assert model.layers[0].blocks[0].mask_padding
    assert model.layers[0].blocks[0].window_size == (5, 5)
    model = timm.create_model(
        "relpos2d_swinv2_tiny_window8_256", encoding={"name": "cpb", "hidden_dim": 24}, **SMALL["swinv2"][1]
    )
    assert model.layers[0].blocks[0].attn.encoding.cpb_mlp[0].out_features == 24


VIT, SWIN, SWINV2 = "relpos2d_vit_tiny_patch16_224", "relpos2d_swin_tiny_patch4_window7_224", NAMES[-1]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (VIT, {"img_size": 0}, r"img_size=0 must hold whole numbers of at least 1"),
    (VIT, {"img_size": (224, 0)}, r"img_size=\(224, 0\) must hold whole numbers of at least 1"),
    (VIT, {"img_size": -224}, "img_size=-224 must hold whole numbers"),
    (VIT, {"patch_size": 0}, "patch_size=0 must hold whole numbers"),
    (SWIN, {"window_size": 0}, "window_size=0 must hold whole numbers of at least 1"),
    (SWIN, {"window_size": (7, 0)}, r"window_size=\(7, 0\) must hold whole numbers of at least 1"),
    (SWIN, {"window_size": ((7, 7), (7, -1), (7, 7), (7, 7))}, "must hold whole numbers of at least 1"),
    (SWINV2, {"window_size": 7.5}, r"window_size=7\.5 must hold whole numbers of at least 1"),
    (VIT, {"encoding": "rope_mixd"}, r"unknown encoding 'rope_mixd'; did you mean 'rope_mixed'\?"),
    (VIT, {"encoding": {"name": "tabel"}}, r"did you mean 'table'\?"),
    (VIT, {"encoding": {"theta": 2.0}}, "unknown encoding ''"),
    (VIT, {"encoding": ["table", "albi"]}, r"did you mean 'alibi'\?"),
    (VIT, {"encoding": {"name": "rope_axial", "thetta": 2.0}}, r"no option 'thetta'; did you mean 'theta'\?"),
    (VIT, {"encoding": 7}, "7 must be a name, a mapping with a name, or a list of these"),
    (VIT, {"encoding": "rope_axial", "embed_dim": 45}, "head_dim=15 must be a multiple of 4"),
    (VIT, {"mask_padding": True}, "mask_padding is for windows; a VisionTransformer has none"),
    (VIT, {"absolute": "removed"}, "absolute='removed' must be one of keep, fade, remove"),
    (SWIN, {"absolute": "fade"}, "absolute='fade', but a swin model has no absolute position embedding"),
    (SWINV2, {"absolute": "remove"}, "absolute='remove', but a swinv2 model has no absolute position embedding"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_bad_input_is_refused_at_the_door(name: str, options: dict[str, Any], message: str) -> None:
    sizes = {**SMALL[family(name)][1], **options}
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **sizes)


def test_importing_the_library_registers_the_models() -> None:
    assert set(relpos2d.backbones.registry.__all__) == {"SOURCES", "register_backbone", *NAMES}
