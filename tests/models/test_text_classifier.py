"""The classifier: which tokens its answer comes from."""

import pytest
import torch

from relpos2d import Points
from relpos2d.models import TextClassifier
from tests.models.builders import batch, build, texts
from tests.refusals import refuses
from tests.tolerances import assert_close


@pytest.mark.parametrize("side", ["left", "right"])
def test_pools_the_real_tokens(side: str) -> None:
    token_ids, mask = batch(texts(4, 7), side)
    states: list[torch.Tensor] = []
    for pooling in ("mean", "first"):
        model = build(TextClassifier, "alibi", pooling=pooling)
        model.encoder.register_forward_hook(lambda *args: states.append(args[-1]))
        found = model(token_ids, mask)
        rows = [x[real] for x, real in zip(states[-1], mask, strict=True)]
        pooled = torch.stack([row.mean(0) if pooling == "mean" else row[0] for row in rows])
        assert_close(found, model.head(pooled))
    model = build(TextClassifier, "alibi", pooling="first")
    assert_close(model(token_ids), model(token_ids, torch.ones_like(mask)))


def test_sees_both_directions() -> None:
    model = build(TextClassifier, "none", pooling="first")
    (token_ids,) = texts(5)
    changed = token_ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 19
    assert not torch.allclose(model(token_ids), model(changed))


def test_token_types_reach_the_attention() -> None:
    model, seen = build(TextClassifier, "alibi"), []
    model.encoder.blocks[1].attention.register_forward_pre_hook(lambda _, args: seen.append(args[1].keys))
    token_ids, mask = batch(texts(4, 6), "right")
    types = torch.randint(2, token_ids.shape)
    assert_close(model(token_ids, mask, token_types=types), model(token_ids, mask))
    assert isinstance(seen[0], Points)
    assert seen[0].token_types is types


def test_refusals() -> None:
    with refuses("TextClassifier: num_classes=0 must be a whole number of at least 1"):
        TextClassifier(19, 0)
    with refuses("TextClassifier: pooling='means' must be one of mean, first; did you mean 'mean'?"):
        TextClassifier(19, 2, pooling="means")
    with refuses("TextClassifier: token_types has shape"):
        build(TextClassifier)(torch.ones(2, 4, dtype=torch.long), token_types=torch.ones(2, 3, dtype=torch.long))


def test_d7_the_mean_of_a_long_text_in_half_precision() -> None:
    model = build(TextClassifier)
    x, mask = torch.full((2, 16384, 3), 4.5, dtype=torch.float16), torch.ones(2, 16384, dtype=torch.bool)
    mask[1, 100:] = False
    assert torch.equal(model._pool(x, mask), torch.full((2, 3), 4.5, dtype=torch.float16))


def test_embeddings_start_as_far_from_0_as_asked() -> None:
    model = TextClassifier(500, 3, embed_dim=32, num_heads=2, embedding_std=0.01)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert float(model.encoder.blocks[0].attention.q_proj.weight.detach().std()) == pytest.approx(32**-0.5, rel=0.1)
    with refuses("TextClassifier: embedding_std=0.0 must be positive"):
        TextClassifier(5, 3, embedding_std=0.0)
