"""The rivals of the benchmark: with the same parameters each computes what ours does, forward and gradients."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from relpos2d import Grid, attend, create_encoding
from relpos2d.tools.cases import Case, case_mask
from relpos2d.tools.rivals import RIVALS, Rival, rivals_of
from tests.oracles import gradients
from tests.tolerances import assert_close
from tests.tools.small_cases import CASES

CPU = torch.device("cpu")


def same_in_ours(
    rival: Rival, case: Case, parameters: list[torch.nn.Parameter]
) -> tuple[torch.nn.Module, list[Tensor]]:
    """An encoding of ours with the parameters of a rival, and its own, in the order of the rival's."""
    if rival.same_as == "t5":
        return _t5_as_table(case, parameters[0])
    encoding = create_encoding(rival.same_as, case.num_heads, case.head_dim, case.key_grid)
    with torch.no_grad():
        if rival.same_as == "table":
            rows = len(encoding.relative_position_bias_table)
            encoding.relative_position_bias_table.copy_(parameters[0][:rows])
            if encoding.prefix_bias is not None:
                encoding.prefix_bias.copy_(parameters[0][rows:])
                assert encoding.prefix_bias.abs().min() > 0
            assert len(parameters[0]) == rows + (0 if encoding.prefix_bias is None else 3)
        if rival.same_as == "rope_mixed":
            encoding.freqs.copy_(parameters[0][:, 0].flip(0))  # (x, y) -> (y, x)
    own = [p for p in encoding.parameters() if parameters]
    assert len(own) >= len(parameters)
    return encoding, own


def _t5_as_table(case: Case, weight: Tensor) -> tuple[torch.nn.Module, list[Tensor]]:
    """T5's numbers, one for each offset, by the formula of its paper: 32 buckets, a logarithm from 8 (16 if causal) to 128."""
    encoding = create_encoding("table", case.num_heads, case.head_dim, Grid(*case.key_grid.shape))
    length = case.key_grid.num_tokens
    with torch.no_grad():
        for row in range(2 * length - 1):
            behind = row - (length - 1)  # query minus key: positive where the key comes first
            if case.is_causal:
                bucket = max(behind, 0)
                assert bucket < 16
            else:
                far = abs(behind)
                bucket = far if far < 8 else 8 + int(math.log(far / 8) / math.log(128 / 8) * 8)
                bucket += 16 if behind < 0 else 0
            encoding.relative_position_bias_table[row] = weight[bucket]
    return encoding, []


@pytest.mark.parametrize(
    ("case", "rival"),
    [(case, rival) for case in CASES for rival in rivals_of(case)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_rival_computes_what_ours_does_with_the_same_parameters(case: Case, rival: Rival) -> None:
    mask = case_mask(case, CPU, torch.float32)
    attention, parameters = rival.build(case, mask, CPU, torch.float32)
    encoding, own = same_in_ours(rival, case, parameters)
    q = torch.randn(case.num_samples, 2, case.queries.num_tokens, 8, requires_grad=True)
    k, v = (torch.randn(case.num_samples, 2, case.key_grid.num_tokens, 8, requires_grad=True) for _ in range(2))
    options = {"mask": mask, "is_causal": case.is_causal, "backend": "explicit"}
    expected = attend(q, k, v, encoding, case.queries, case.keys, **options)
    for _ in range(2):  # the second call reads what the first may have kept
        out = attention(q, k, v)
        assert_close(out, expected)
    without = attend(q, k, v, create_encoding("none", 2, 8, case.key_grid), case.queries, case.keys, **options)
    assert (out - without).abs().max() > 1e-3
    for theirs, ours in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
        assert_close(theirs, ours)
    learned = [p for p in parameters if p.requires_grad]
    if learned and own:
        theirs = gradients(out, learned)[0]
        ours = gradients(expected, own)
        if rival.same_as == "rope_mixed":
            assert_close(theirs[:, 0].flip(0), ours[0])
        else:
            by_name = dict(zip([name for name, _ in encoding.named_parameters()], ours, strict=True))
            rows = [
                by_name["relative_position_bias_table"],
                *([by_name["prefix_bias"]] if "prefix_bias" in by_name else []),
            ]
            assert_close(theirs, torch.cat(rows))


def test_every_rival_is_held_to_ours() -> None:
    tested = {rival.name for case in CASES for rival in rivals_of(case)}
    assert tested == {rival.name for rival in RIVALS}


def test_rivals_stay_away_from_steps_they_do_not_know() -> None:
    assert rivals_of(Case("half", "image grid", Grid(4, 4), Grid(2, 2, step=Fraction(1, 2)))) == []
