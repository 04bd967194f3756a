"""What holds for all models of text: batches, padding, what is saved, copied and built without memory, and refusals."""

import copy
import pickle
from typing import Any

import pytest
import torch

from relpos2d import Encoding
from relpos2d.models import EncoderDecoder, LanguageModel, TextClassifier
from relpos2d.models.token_model import TokenModel
from tests.models.builders import NAMES, SMALL, SPECS, VOCAB_SIZE, batch, build, draw, logits, texts
from tests.refusals import refuses
from tests.tolerances import assert_close

MODELS = [TextClassifier, LanguageModel, EncoderDecoder]
DYNAMIC = {"name": "rope", "scaling": {"kind": "dynamic_ntk", "factor": 4.0, "original_length": 5}}


@pytest.mark.parametrize("encoding", [*SPECS, DYNAMIC], ids=str)
@pytest.mark.parametrize("cls", MODELS)
def test_a_batch_gives_what_each_member_gives_alone(cls: type[TokenModel], encoding: Any) -> None:
    """Padding of any content, also of lengths beyond max_length, changes nothing."""
    model = build(cls, encoding)
    rows = texts(3, 14, 6)
    alone = [logits(model, row)[0] for row in rows]
    for side in ("left", "right"):
        token_ids, mask = batch(rows, side)
        token_ids[0, 0 if side == "left" else -1] = VOCAB_SIZE + 5  # nobody looks it up
        found = logits(model, token_ids, mask)
        for number, expected in enumerate(alone):
            assert_close(found[number, slice(None) if cls is TextClassifier else mask[number]], expected)


@pytest.mark.parametrize("cls", MODELS)
def test_a_memory_limit_changes_nothing(cls: type[TokenModel]) -> None:
    model = build(cls, "cpb", shared_encoding=True)
    (token_ids,) = texts(12)
    inputs = (token_ids, token_ids) if cls is EncoderDecoder else (token_ids,)
    limits: list[int | None] = []
    for block in model.decoder.blocks if cls is not TextClassifier else model.encoder.blocks:
        block.register_forward_pre_hook(lambda *args: limits.append(args[2]["memory_limit"]), with_kwargs=True)
    assert_close(model(*inputs, memory_limit=2**20), model(*inputs))
    assert limits == [2**20] * 2 + [None] * 2


@pytest.mark.parametrize("encoding", NAMES)
def test_one_encoding_for_all_blocks_equals_equal_encodings(encoding: str) -> None:
    shared = build(EncoderDecoder, encoding, shared_encoding=True)
    own = build(EncoderDecoder, encoding)
    state = shared.state_dict()
    for stack in ("encoder", "decoder"):
        for key in [key for key in state if key.startswith(f"{stack}.encoding.")]:
            value = state.pop(key)
            for layer in range(2):
                state[f"{stack}.blocks.{layer}.attention.{key.removeprefix(f'{stack}.')}"] = value
    own.load_state_dict(state)
    token_ids, mask = batch(texts(5, 8), "left")
    assert_close(logits(shared, token_ids, mask), logits(own, token_ids, mask))
    assert_close(logits(shared, token_ids), logits(own, token_ids))


def test_numbers_of_a_shared_encoding_are_computed_once_a_pass() -> None:
    model, calls = build(LanguageModel, "table", shared_encoding=True, depth=3).train(), []
    at = model.decoder.encoding.at
    model.decoder.encoding.at = lambda *args: calls.append(1) or at(*args)
    model(texts(5)[0])
    assert len(calls) == 1


@pytest.mark.parametrize("encoding", SPECS, ids=str)
def test_built_without_memory_reset_or_loaded(encoding: Any, nan_memory: None) -> None:
    model = build(EncoderDecoder, encoding, norm="layernorm", tied=False)
    (token_ids,) = texts(7)
    expected = logits(model, token_ids)
    with torch.device("meta"):
        empty = EncoderDecoder(VOCAB_SIZE, encoding=encoding, norm="layernorm", tied=False, **SMALL).double()
    assert all(value.is_meta for value in empty.state_dict().values())
    filled = empty.to_empty(device="cpu").eval()
    filled.reset_parameters()
    assert all(value.isfinite().all() for value in filled.state_dict().values())
    filled.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert_close(logits(filled, token_ids), expected)


def test_copies_and_pickles_say_the_same() -> None:
    model = build(EncoderDecoder, ["learned", "cpb", "rope_mixed"], shared_encoding=True)
    (token_ids,) = texts(7)
    expected = logits(model, token_ids)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        draw(model, 2)
        assert_close(logits(again, token_ids), expected)


def test_how_weights_start() -> None:
    model = EncoderDecoder(VOCAB_SIZE, encoding="cpb", embed_dim=96, depth=8, num_heads=3)
    stds = {
        name: float(p.detach().std()) * p.shape[1] ** 0.5
        for name, p in model.named_parameters()
        if ".encoding." not in name and p.ndim == 2
    }
    for name, std in stds.items():
        writes = name.endswith(("out_proj.weight", "mlp.fc2.weight"))
        assert std == pytest.approx(1 / 4 if writes else 1, rel=0.06), name
    assert len([name for name in stds if name.endswith(("out_proj.weight", "fc2.weight"))]) == 8 * 5
    cpb = model.encoder.blocks[0].attention.encoding
    fresh = type(cpb)(3, 32, cpb.positions)
    for (name, mine), theirs in zip(cpb.named_parameters(), fresh.parameters(), strict=True):
        assert float(mine.detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.5), name


@pytest.mark.parametrize("encoding", SPECS, ids=str)
def test_positions_do_not_decay_and_nothing_else(encoding: Any) -> None:
    model = build(EncoderDecoder, encoding)
    inside = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Encoding) and path.rpartition(".")[2] in ("encoding", "absolute")
        for name, _ in module.named_parameters()
    }
    assert model.no_weight_decay() == inside


@pytest.mark.parametrize("encoding", [name for name in NAMES if name not in ("learned", "table")])
def test_the_number_of_parameters_does_not_depend_on_the_length(encoding: str) -> None:
    sizes = {"embed_dim": 24, "depth": 1, "num_heads": 3}
    short, long = (LanguageModel(VOCAB_SIZE, encoding=encoding, max_length=length, **sizes) for length in (5, 200))
    assert sum(p.numel() for p in short.parameters()) == sum(p.numel() for p in long.parameters())


@pytest.mark.parametrize("cls", MODELS)
def test_checkpointing_gives_the_same_gradients(cls: type[TokenModel]) -> None:
    found = []
    for checkpointing in (False, True):
        model = build(cls, "cpb", checkpointing=checkpointing, shared_encoding=True, dropout=0.3).train()
        torch.manual_seed(3)
        token_ids, mask = batch(texts(4, 7), "right")
        calls: list[int] = []
        stack = model.encoder if cls is TextClassifier else model.decoder
        stack.blocks[1].attention.q_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        logits(model, token_ids, mask).square().sum().backward()
        assert len(calls) == (2 if checkpointing else 1)
        found.append([p.grad for p in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert_close(again, plain)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_every_parameter_learns(mlp: Any, norm: Any) -> None:
    for cls in MODELS:
        model = build(cls, ["learned", "table"], mlp=mlp, norm=norm)
        token_ids, mask = batch(texts(12, 9), "right")
        logits(model, token_ids, mask).sin().sum().backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert unused == []


def test_hidden_channels_of_the_mlp() -> None:
    found = {}
    for mlp, ratio in (("swiglu", None), ("gelu", None), ("swiglu", 1.5)):
        block = build(LanguageModel, mlp=mlp, mlp_ratio=ratio).decoder.blocks[0]
        found[mlp, ratio] = block.mlp.fc2.in_features
    assert found == {("swiglu", None): 64, ("gelu", None): 96, ("swiglu", 1.5): 36}


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_each_real_token_gets_the_vector_of_its_own_place(side: str) -> None:
    """Case E7, its neighbours: no row of the table is skipped, the first real token has the first."""
    model, seen = build(LanguageModel, "learned"), []
    model.dropout.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rows = texts(12, 5)
    if side == "none":
        model(rows[0])
        assert_close(seen[0], model.embedding(rows[0]) + model.absolute.pos_embed)
        return
    token_ids, mask = batch(rows, side)
    model(token_ids, mask)
    for row, x, real in zip(rows, seen[0], mask, strict=True):
        assert_close(x[real], model.embedding(row[0]) + model.absolute.pos_embed[0, : row.shape[1]])


def test_compiled_equals_eager(fresh_compiler: None) -> None:
    model = build(TextClassifier, "alibi", depth=1)
    compiled = torch.compile(model, backend="eager")
    token_ids, mask = batch(texts(4, 7), "right")
    assert_close(compiled(token_ids, mask), model(token_ids, mask))
    with refuses("row 0 of mask has no real token"):
        compiled(token_ids, mask & torch.tensor([[False], [True]]))


def test_dropout_is_felt_in_training_alone() -> None:
    for cls in MODELS:
        model = build(cls, "alibi", dropout=0.4)
        (token_ids,) = texts(6)
        assert torch.equal(logits(model, token_ids), logits(model, token_ids))
        model.train()
        assert not torch.allclose(logits(model, token_ids), logits(model, token_ids))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"embed_dim": 25}, "embed_dim=25 must be a multiple of num_heads=3"),
        ({"depth": 0}, "depth=0 must be a whole number of at least 1"),
        ({"num_heads": True}, "num_heads=True must be a whole number"),
        ({"max_length": 0}, "max_length=0 must be a whole number"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"mlp_ratio": 0.0}, "mlp_ratio=0.0 must be positive"),
        ({"padding_id": 19}, "padding_id=19 must be between 0 and 18"),
        ({"mlp": "swigl"}, "mlp='swigl' must be one of swiglu, gelu; did you mean 'swiglu'?"),
        ({"norm": "batch"}, "norm='batch' must be one of rmsnorm, layernorm"),
        ({"encoding": "alibis"}, "unknown encoding 'alibis'; did you mean 'alibi'?"),
        ({"encoding": "rope", "embed_dim": 27}, "Rope: head_dim=9 must be a multiple of 2"),
        ({"encoding": []}, "an empty list is no encoding"),
    ],
)
def test_refuses_what_makes_no_model(options: dict[str, Any], text: str) -> None:
    with refuses(text.replace("[", r"\[").replace("?", r"\?")):
        LanguageModel(19, **{**SMALL, **options})


TYPED = {"name": "xlnet", "token_types": True}


@pytest.mark.parametrize("encoding", [TYPED, ["learned", "t5", TYPED]], ids=["alone", "in a sum"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_term_that_could_not_learn_is_refused(encoding: Any, shared: bool) -> None:
    """Case M10: only the classifier gives tokens types."""
    for cls, options, name in (
        (LanguageModel, {"encoding": encoding}, "encoding"),
        (EncoderDecoder, {"encoding": encoding}, "encoding"),
        (EncoderDecoder, {"decoder_encoding": encoding[-1:] if encoding is not TYPED else TYPED}, "decoder_encoding"),
    ):
        with refuses(
            f"^{cls.__name__}: {name}=.*'token_types': True.* has a term for token types, .*token_types=False"
        ):
            cls(VOCAB_SIZE, **{**SMALL, **options}, shared_encoding=shared)
    model = build(TextClassifier, encoding, shared_encoding=shared)
    token_ids = torch.cat(texts(12, 12))
    model(token_ids, token_types=torch.arange(12).expand(2, -1) // 5).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("cls", MODELS)
def test_refuses_what_is_no_text(cls: type[TokenModel]) -> None:
    model, name = build(cls), "source" if cls is EncoderDecoder else "token_ids"
    good = torch.ones(2, 3, dtype=torch.long)
    real = torch.ones(2, 3, dtype=torch.bool)
    for token_ids, mask, text in (
        (good[0], None, rf"{name} is torch.int64 of shape \(3,\), allowed is int64 of shape \(B, N\)"),
        (good.float(), None, f"{name} is torch.float32"),
        (good[:, :0], None, "an empty text has nothing to read"),
        (good, real[:, :2], r"mask has shape \(2, 2\), the token ids allow \(2, 3\)"),
        (good, real.long(), "is torch.int64, allowed is bool"),
        (good, real & False, "row 0 of mask has no real token"),
        (good * 19, None, f"{name} holds the id 19, the vocabulary has the ids 0 to 18; does the tokenizer"),
        (-good, None, f"{name} holds the id -1"),
    ):
        with refuses(f"{cls.__name__}.*{text}"):
            logits(model, token_ids, mask)
