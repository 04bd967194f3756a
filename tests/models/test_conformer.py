"""The speech model: padding, transformers' block, what is saved and built without memory, what training adds, and refusals."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerEncoderLayer,
    Wav2Vec2ConformerRelPositionalEmbedding,
)

from relpos2d import Encoding, Grid, create_encoding
from relpos2d.models import ConformerCTC
from relpos2d.models.conformer import ConformerBlock
from relpos2d.models.context import Context
from tests.models.hearing import RATE, SMALL, SPECS, VOCAB_SIZE, batch, build, noise
from tests.oracles import gradients, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

DYNAMIC = {"name": "rope", "scaling": {"kind": "dynamic_ntk", "factor": 4.0, "original_length": 5}}
CONTEXTS: list[dict[str, Any]] = [
    {}, {"left_context": 3, "right_context": 2}, {"chunk_size": 3, "left_context": 4}, {"chunk_size": 4},
    {"conv_norm": "batch", "normalize": "fixed"},
]  # fmt: skip


def assert_alone_is_as_in_a_batch(model: ConformerCTC) -> None:
    clips = noise(1, 640, 65, 1000, 330)
    found = model(*batch(clips, longer=100))
    assert found.num_frames.tolist() == [1, 10, 2, 16, 6]
    assert found.log_probs.shape == (5, 18, VOCAB_SIZE)
    for row, frames, clip in zip(found.log_probs, found.num_frames, clips, strict=True):
        alone = model(clip[None], torch.tensor([len(clip)]))
        assert_close(row[:frames], alone.log_probs[0])
        assert alone.num_frames.tolist() == [frames]


@pytest.mark.parametrize("encoding", [*SPECS, DYNAMIC], ids=str)
def test_g7_a_batch_gives_what_each_clip_gives_alone(encoding: Any) -> None:
    """Padding of any content, also of lengths beyond max_length, changes nothing."""
    assert_alone_is_as_in_a_batch(build(encoding))


@pytest.mark.parametrize("options", CONTEXTS, ids=str)
def test_g7_in_every_context(options: dict[str, Any]) -> None:
    assert_alone_is_as_in_a_batch(build("transformer_xl", **options))


def test_g7_in_single_precision() -> None:
    """The model as it is by default, whole and in a stream."""
    model = ConformerCTC(30, 8000, encoding="transformer_xl", chunk_size=8, left_context=8, normalize="fixed").eval()
    clips = [clip.float() for clip in noise(1, 9000, 3333)]
    samples, num_samples = batch(clips)
    with torch.no_grad():
        found = model(samples.float(), num_samples)
        for row, frames, clip in zip(found.log_probs, found.num_frames, clips, strict=True):
            stream = model.stream()
            heard = torch.cat([stream.push(clip[None]), stream.finish()], dim=1)
            for alone in (heard, model(clip[None], torch.tensor([len(clip)])).log_probs):
                assert_close(row[:frames], alone[0])


def test_g7_statistics_of_the_batch_leave_padding_out() -> None:
    """In training, more padding changes neither output nor gradient nor what is remembered."""
    clips, found = noise(500, 300, 64), []
    for longer in (0, 640):
        model = build("rope", conv_norm="batch", normalize="fixed").train()
        out = model(*batch(clips, longer=longer))
        real = torch.cat([row[:n] for row, n in zip(out.log_probs, out.num_frames, strict=True)])
        real.sin().sum().backward()
        found.append([real, *(p.grad for p in model.parameters()), *(b.double() for b in model.buffers())])
    for less, more in zip(*found, strict=True):
        assert_close(more, less)
    frames: list[Tensor] = []
    model = build("rope", conv_norm="batch", normalize="fixed").train()
    conv = model.blocks[0].conv
    conv.depthwise.register_forward_hook(lambda *args: frames.append(args[2].transpose(1, 2)))
    before = conv.inner_norm.running_mean.clone()
    model(*batch(clips))
    heard = torch.cat([row[:n] for row, n in zip(frames[0], (8, 5, 1), strict=True)])
    assert_close(conv.inner_norm.running_mean, 0.9 * before + 0.1 * heard.mean(dim=0))


def test_one_frame_alone_trains_with_a_batch_norm() -> None:
    model = build(conv_norm="batch").train()
    expected = model.eval()(torch.ones(1, 1).double(), torch.tensor([1])).log_probs
    found = model.train()(torch.ones(1, 1).double(), torch.tensor([1])).log_probs
    assert_close(found, expected)
    assert model.blocks[0].conv.inner_norm.num_batches_tracked == 0


# transformers ---------------------------------------------------------------------------------------------------------


def theirs_and_ours(dtype: torch.dtype, kernel_size: int = 5) -> tuple[nn.Module, nn.Module, ConformerBlock]:
    config = Wav2Vec2ConformerConfig(
        hidden_size=12, num_attention_heads=3, intermediate_size=20, hidden_act="swish", attention_dropout=0.0,
        position_embeddings_type="relative", conv_depthwise_kernel_size=kernel_size, max_source_positions=50,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = Wav2Vec2ConformerEncoderLayer(config).to(dtype).eval()
    redraw(theirs)
    norm = theirs.conv_module.batch_norm
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    encoding = create_encoding("transformer_xl", 3, 4, Grid(11))
    ours = ConformerBlock(12, 3, encoding, ff_ratio=20 / 12, kernel_size=kernel_size, conv_norm="batch")
    ours = ours.to(dtype).eval()
    with torch.no_grad():  # they have no biases in the convolution module
        for linear in (ours.conv.fc1, ours.conv.fc2):
            linear.bias.zero_()
    copied = pairs(theirs, ours)
    for mine, other in copied:
        mine.data.copy_(other.data.view_as(mine))
    left_out = {id(p) for p in ours.parameters()} - {id(mine) for mine, _ in copied}
    assert left_out == {id(ours.conv.fc1.bias), id(ours.conv.fc2.bias)}
    assert len(copied) == len([*theirs.parameters()]) + 2
    return theirs, Wav2Vec2ConformerRelPositionalEmbedding(config).to(dtype), ours


def pairs(theirs: nn.Module, ours: ConformerBlock) -> list[tuple[Tensor, Tensor]]:
    """Our parameters and running statistics, and theirs."""
    attention, conv = theirs.self_attn, theirs.conv_module
    modules = [
        (ours.ff1.norm, theirs.ffn1_layer_norm), (ours.ff1.fc1, theirs.ffn1.intermediate_dense),
        (ours.ff1.fc2, theirs.ffn1.output_dense), (ours.attention_norm, theirs.self_attn_layer_norm),
        (ours.attention.q_proj, attention.linear_q), (ours.attention.k_proj, attention.linear_k),
        (ours.attention.v_proj, attention.linear_v), (ours.attention.out_proj, attention.linear_out),
        (ours.conv.norm, conv.layer_norm), (ours.conv.fc1, conv.pointwise_conv1),
        (ours.conv.depthwise, conv.depthwise_conv), (ours.conv.inner_norm, conv.batch_norm),
        (ours.conv.fc2, conv.pointwise_conv2), (ours.ff2.norm, theirs.ffn2_layer_norm),
        (ours.ff2.fc1, theirs.ffn2.intermediate_dense), (ours.ff2.fc2, theirs.ffn2.output_dense),
        (ours.norm, theirs.final_layer_norm),
    ]  # fmt: skip
    found = [
        (dict(mine.named_parameters())[name], value)
        for mine, other in modules
        for name, value in other.named_parameters()
    ]
    found += [
        (ours.attention.encoding.get_parameter(name), attention.get_parameter(name))
        for name in ("pos_bias_u", "pos_bias_v", "linear_pos.weight")
    ]
    norm, their_norm = ours.conv.inner_norm, conv.batch_norm
    return [*found, (norm.running_mean, their_norm.running_mean), (norm.running_var, their_norm.running_var)]


def heard(ours: ConformerBlock, x: Tensor, lengths: list[int]) -> Tensor:
    num_frames = torch.tensor(lengths)
    real = torch.arange(x.shape[1]) < num_frames[:, None]
    return ours(x, Context().sight("test", ours.attention.encoding, num_frames, real), real)


@pytest.mark.parametrize("length", [1, 11, 40])
def test_transformers(length: int) -> None:
    theirs, embedding, ours = theirs_and_ours(torch.float32)
    x = torch.randn(2, length, 12)
    expected = theirs(x, relative_position_embeddings=embedding(x))
    assert_close(heard(ours, x, [length, length]), expected)


def test_gradients_of_transformers() -> None:
    theirs, _, ours = theirs_and_ours(torch.float64)
    x = torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    # their own table is rounded to float32
    offsets = torch.arange(10, -11, -1, dtype=torch.float64)[:, None]
    angles = offsets / 10000 ** (torch.arange(0, 12, 2, dtype=torch.float64) / 12)
    rows = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[None]
    out, expected = heard(ours, x, [11, 11]), theirs(x, relative_position_embeddings=rows)
    assert_close(out, expected)
    learned = [(mine, other) for mine, other in pairs(theirs, ours) if mine.requires_grad]
    mine, other = (gradients(y, [x, *p]) for y, p in zip((out, expected), zip(*learned, strict=True), strict=True))
    for a, b in zip(mine, other, strict=True):
        assert_close(a, b.view_as(a))


def test_transformers_with_padding() -> None:
    """Their convolution hears padding, so a wide one is compared with each clip alone."""
    lengths = [9, 4, 1]
    x = torch.randn(3, 9, 12)
    real = torch.arange(9) < torch.tensor(lengths)[:, None]
    theirs, embedding, ours = theirs_and_ours(torch.float32, kernel_size=1)
    hidden = torch.zeros(3, 1, 9, 9).masked_fill(~real[:, None, None], torch.finfo(torch.float32).min)
    expected = theirs(x, attention_mask=hidden, relative_position_embeddings=embedding(x))
    assert_close(heard(ours, x, lengths)[real], expected[real])
    theirs, embedding, ours = theirs_and_ours(torch.float32, kernel_size=5)
    out = heard(ours, torch.where(real[..., None], x, 1e4), lengths)
    for row, clip, length in zip(out, x, lengths, strict=True):
        alone = clip[None, :length]
        assert_close(row[:length], theirs(alone, relative_position_embeddings=embedding(alone))[0])


# Frames and times -----------------------------------------------------------------------------------------------------


def test_which_features_a_frame_comes_from() -> None:
    """Its own four and the three before them, so that frames are known as soon as their features are."""
    model = build()
    for length in (16, 13):
        features = torch.randn(1, length, 9, dtype=torch.float64, requires_grad=True)
        x = model.subsampling(features, torch.tensor([length]))
        assert x.shape == (1, 4, 12)
        for i in range(4):
            (grad,) = torch.autograd.grad(x[0, i].sin().sum(), features, retain_graph=True)
            seen = grad[0].any(dim=1).nonzero().flatten().tolist()
            assert seen == [f for f in range(4 * i - 3, 4 * i + 4) if 0 <= f < length]
            # the middle of what it sees, where nothing is cut off
            assert model.frame_time(i) == pytest.approx((4 * i + 0.5) * 0.01)


def test_numbers_of_frames() -> None:
    model = build()
    assert (model.sample_rate, model.vocab_size, model.seconds_per_frame) == (RATE, VOCAB_SIZE, 0.04)
    num_samples = torch.tensor([1, 16, 64, 65, 128, 129, 1600])
    assert model.num_output_frames(num_samples).tolist() == [1, 1, 1, 2, 2, 3, 25]
    samples = torch.zeros(7, 1600, dtype=torch.float64)
    assert model(samples, num_samples).num_frames.tolist() == [1, 1, 1, 2, 2, 3, 25]


def test_a_chunk_does_not_hear_the_future() -> None:
    """Nor more of the past than its own context, and that of frames which convolutions hear."""
    model = build("alibi", chunk_size=4, left_context=2, depth=1)
    samples = torch.randn(1, 20 * 64, dtype=torch.float64, requires_grad=True)
    log_probs = model(samples, torch.tensor([20 * 64])).log_probs
    for chunk in range(5):
        (grad,) = torch.autograd.grad(log_probs[0, 4 * chunk].sin().sum(), samples, retain_graph=True)
        heard = grad[0].nonzero()
        # the last of the 16 features of a chunk sees 12 samples more, half of what a window is longer than a hop
        assert int(heard.max()) == min((4 * chunk + 4) * 64 + 12, 20 * 64) - 1
        # 4 frames that a convolution hears, 2 that the chunk of the first of them sees, 3 features before these
        first = 4 * max(0, 4 * chunk - 4 - 2) - 3
        # of a window the first sample has no weight
        assert int(heard.min()) == max(0, first * 16 - 12 + 1)


# What is saved, copied and built without memory -----------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["deberta", "fire", ["learned", "cpb"], ["sincos", "rope_axial"]], ids=str)
def test_built_without_memory_reset_or_loaded(encoding: Any, nan_memory: None) -> None:
    options = {"conv_norm": "batch", "normalize": "fixed", "intermediate_layers": (1,), "self_conditioning": True}
    model, inputs = build(encoding, **options), batch(noise(300, 100))
    expected = model(*inputs).log_probs
    with torch.device("meta"):
        empty = ConformerCTC(VOCAB_SIZE, RATE, encoding=encoding, **{**SMALL, **options}).double().eval()
    assert all(value.is_meta for value in empty.state_dict().values())
    filled = empty.to_empty(device="cpu")
    filled.reset_parameters()
    assert all(value.isfinite().all() for value in filled.state_dict().values())
    assert filled(*inputs).log_probs.isfinite().all()
    filled.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert_close(filled(*inputs).log_probs, expected)


def test_copies_and_pickles_say_the_same() -> None:
    model, inputs = build(["learned", "cpb", "rope_mixed"], shared_encoding=True), batch(noise(300))
    expected = model(*inputs).log_probs
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(*inputs).log_probs, expected)


def test_how_weights_start() -> None:
    model = ConformerCTC(50, 8000, embed_dim=96, depth=2, intermediate_layers=(1,), self_conditioning=True)
    for name, p in model.named_parameters():
        if ".encoding." in name:
            continue
        if p.ndim > 1:
            assert float(p.detach().std()) * p[0].numel() ** 0.5 == pytest.approx(1, rel=0.1), name
        else:
            assert (p == (1 if name.endswith("norm.weight") else 0)).all(), name


@pytest.mark.parametrize("encoding", ["learned", ["sincos", "transformer_xl", "table"]], ids=str)
def test_positions_do_not_decay_and_nothing_else(encoding: Any) -> None:
    model = build(encoding)
    inside = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Encoding) and path.rpartition(".")[2] in ("encoding", "absolute")
        for name, _ in module.named_parameters()
    }
    assert model.no_weight_decay() == inside != set()


@pytest.mark.parametrize("encoding", ["transformer_xl", ["learned", "t5"]], ids=str)
def test_one_encoding_for_all_blocks_equals_equal_encodings(encoding: Any) -> None:
    shared, own, inputs = build(encoding, shared_encoding=True), build(encoding), batch(noise(600, 100))
    state = shared.state_dict()
    for key in [key for key in state if key.startswith("encoding.")]:
        value = state.pop(key)
        for layer in range(2):
            state[f"blocks.{layer}.attention.{key}"] = value
    own.load_state_dict(state)
    assert_close(shared(*inputs).log_probs, own(*inputs).log_probs)


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CONTEXTS, ids=str)
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    """Case M10."""
    model = build(["learned", "table"], intermediate_layers=(1,), self_conditioning=True, **options).train()
    model(*batch(noise(800, 300))).log_probs.sin().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("self_conditioning", [False, True])
def test_probabilities_after_blocks_in_the_middle(self_conditioning: bool) -> None:
    model = build(depth=3, intermediate_layers=(2,), self_conditioning=self_conditioning).train()
    inputs, passed = batch(noise(400, 200)), []
    model.blocks[1].register_forward_hook(lambda *args: passed.append(args[2]))
    model.blocks[2].register_forward_pre_hook(lambda _, args: passed.append(args[0]))
    out = model(*inputs)
    before, after = passed
    (found,) = out.intermediate
    logits = before @ model.head.weight.T + model.head.bias
    assert_close(found, logits - logits.logsumexp(dim=-1, keepdim=True))
    if self_conditioning:
        before = before + found.exp() @ model.feedback.weight.T + model.feedback.bias
    assert_close(after, before)
    evaluated = model.eval()(*inputs)
    assert evaluated.intermediate == ()
    assert_close(evaluated.log_probs, out.log_probs)


@pytest.mark.parametrize("conv_norm", ["layer", "batch"])
def test_checkpointing_gives_the_same_gradients_and_statistics(conv_norm: Any) -> None:
    found = []
    for checkpointing in (False, True):
        model = build("cpb", checkpointing=checkpointing, conv_norm=conv_norm, dropout=0.3).train()
        torch.manual_seed(3)
        calls: list[int] = []
        model.blocks[1].attention.q_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(*batch(noise(400, 700))).log_probs.sin().sum().backward()
        assert len(calls) == (2 if checkpointing else 1)
        found.append([*(p.grad for p in model.parameters()), *(b.double() for b in model.buffers())])
    for plain, again in zip(*found, strict=True):
        assert_close(again, plain)


def test_training_hides_stretches_of_time_and_bands() -> None:
    model, seen = build(num_time_masks=1, time_mask=5, num_freq_masks=1, freq_mask=3).train(), []
    model.subsampling.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    clips = [x.repeat(2) for x in noise(16 * 25)]
    inputs = torch.stack(clips * 40), torch.full((40,), 800)
    for _ in range(2):
        torch.manual_seed(5)
        model(*inputs)
    assert torch.equal(*seen), "drawn from torch's generator alone"
    model.eval()(*inputs)
    features = seen[2]
    assert features.all(), "else nobody knows what was hidden"
    times, bands = (seen[0] == 0).all(dim=2), (seen[0] == 0).all(dim=1)
    assert torch.equal(seen[0], torch.where(times[..., None] | bands[:, None], 0, features))
    for hidden, most in ((times, 5), (bands, 3)):
        sizes = hidden.sum(dim=1)
        assert set(sizes.tolist()) == set(range(most)), "each from 0 to below the most, rounded down"
        begins = hidden[:, 0].long() + (hidden[:, 1:] & ~hidden[:, :-1]).sum(dim=1)
        assert begins.max() == 1, "in one piece"
        assert len(hidden.unique(dim=0)) > most, "and anywhere, in each recording"


def test_training_hides_less_than_half_of_a_recording() -> None:
    """Also of one that is shorter than a stretch may be, alone or beside a long one."""
    model, seen = build(num_time_masks=3, time_mask=40).train(), []
    model.subsampling.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for lengths in ((16 * 26, 16 * 4, 1), (16 * 300, 16 * 20, 16 * 9)):
        num_samples = torch.tensor(lengths).repeat(40)
        model(torch.randn(120, lengths[0], dtype=torch.float64), num_samples)
        features, num_features = seen.pop(), -(-num_samples // 16)
        assert features[num_features == max(lengths) // 16].any(dim=2).logical_not().any(), "something is hidden"
        for x, length in zip(features, num_features, strict=True):
            # a single frame is its own mean, and 0 in any case
            assert length == 1 or int((x[:length] == 0).all(dim=1).sum()) < length / 2


def test_dropout_is_felt_in_training_alone() -> None:
    model, inputs = build("alibi", dropout=0.4), batch(noise(300))
    assert torch.equal(model(*inputs).log_probs, model(*inputs).log_probs)
    model.train()
    assert not torch.allclose(model(*inputs).log_probs, model(*inputs).log_probs)


def test_half_precision() -> None:
    samples, num_samples = batch(noise(600, 100))
    model = build("transformer_xl").float()
    expected = model(samples.float(), num_samples).log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(samples.float(), num_samples).log_probs
    assert found.dtype == torch.float32
    assert_close(found, expected, torch.bfloat16)
    found = model.bfloat16()(samples.float(), num_samples).log_probs
    assert found.dtype == torch.float32
    assert_close(found.exp(), expected.exp(), torch.bfloat16)


def test_a_memory_limit_changes_nothing() -> None:
    for options in ({}, {"left_context": 3, "right_context": 2}):
        model, inputs = build("cpb", shared_encoding=True, **options), batch(noise(900, 300))
        assert_close(model(*inputs, memory_limit=2**16).log_probs, model(*inputs).log_probs)
        with refuses("memory_limit=5 bytes is less than each way needs"):
            model(*inputs, memory_limit=5)


@pytest.mark.traced
def test_compiled_equals_eager(fresh_compiler: None) -> None:
    model, inputs = build("alibi", depth=1, left_context=3, right_context=2), batch(noise(300, 200))
    assert_close(torch.compile(model, backend="eager")(*inputs).log_probs, model(*inputs).log_probs)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"vocab_size": 1}, "vocab_size=1 must be at least 2, the blank and a token"),
        ({"embed_dim": 13}, "embed_dim=13 must be a multiple of num_heads=3"),
        ({"depth": 0}, "depth=0 must be a whole number of at least 1"),
        ({"kernel_size": 4}, "kernel_size=4 must be odd"),
        ({"conv_norm": "bach"}, "conv_norm='bach' must be one of layer, batch; did you mean 'batch'"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"ff_ratio": 0.0}, "ff_ratio=0.0 must be positive"),
        ({"num_time_masks": -1}, "num_time_masks=-1 must be a whole number"),
        ({"time_mask": 1, "num_time_masks": 1}, "time_mask=1 must be at least 2, for what is hidden is shorter"),
        ({"freq_mask": 10, "num_freq_masks": 1}, "freq_mask=10 must be at most num_mels=9"),
        ({"left_context": -1}, "left_context=-1 must be a whole number of at least 0"),
        ({"chunk_size": 4}, "normalize='utterance' needs the whole recording.*chunk_size=4.*normalize='fixed' is allowed"),
        ({"chunk_size": 4, "normalize": "fixed", "right_context": 1}, "right_context=1 goes beyond a chunk"),
        ({"intermediate_layers": (2,)}, r"intermediate_layers=\(2,\) must be different blocks, from 1 to 1"),
        ({"intermediate_layers": 1}, r"intermediate_layers=1 must be blocks, such as \(1,\)"),
        ({"intermediate_layers": (1, 1)}, r"intermediate_layers=\(1, 1\) must be different"),
        ({"intermediate_layers": (0,)}, "intermediate_layers=0 must be a whole number"),
        ({"self_conditioning": True}, "self_conditioning needs intermediate_layers"),
        ({"encoding": "alibis"}, "unknown encoding 'alibis'; did you mean 'alibi'"),
        ({"encoding": {"name": "xlnet", "token_types": True}}, "encoding=.*has a term for token types"),
        ({"encoding": DYNAMIC, "left_context": 3, "right_context": 1}, "depends on the length of the whole recording"),
    ],
)  # fmt: skip
def test_refuses_what_makes_no_model(options: dict[str, Any], text: str) -> None:
    options = {"vocab_size": VOCAB_SIZE, **SMALL, **options}
    with refuses(text):
        ConformerCTC(options.pop("vocab_size"), RATE, **options)


def test_refuses_what_is_no_recording() -> None:
    model, samples = build(), torch.zeros(2, 100, dtype=torch.float64)
    broken = samples.clone()
    broken[1, 99] = float("inf")
    for given, num_samples, text in (
        (samples[0], [100], r"samples are torch.float64 of shape \(100,\)"),
        (samples, [100, 0], "row 1 has num_samples=0, allowed are 1 to 100"),
        (broken, [100, 100], "row 1 has a sample that is not finite"),
    ):
        with refuses(f"ConformerCTC: {text}"):
            model(given, torch.tensor(num_samples))
