"""The cases of the benchmark: which names choose which of them, and the mask that they hand to all contestants."""

import torch
from timm.models.swin_transformer import SwinTransformerBlock

from relpos2d.tools.cases import case_mask, cases_table, choose_cases, standard_cases
from tests.tools.small_cases import SHIFTED, WINDOWS


def test_the_mask_of_shifted_windows_is_that_of_swin() -> None:
    block = SwinTransformerBlock(8, (6, 15), num_heads=1, window_size=(3, 5), shift_size=(1, 2))
    expected = block.get_attn_mask()
    mask = case_mask(SHIFTED, "cpu", torch.float32)
    assert mask is not None
    assert mask.shape == (2 * 6, 1, 15, 15)
    assert torch.equal(mask[:6, 0], expected)
    assert torch.equal(mask[6:, 0], expected)
    assert case_mask(WINDOWS, "cpu", torch.float32) is None


def test_groups_choose_cases() -> None:
    everything = standard_cases()
    names = [case.name for case in everything]
    assert len(set(names)) == len(names)
    assert [case.name for case in choose_cases(["all"])] == [name for name in names if name != "1d-32768-training"]
    assert {case.kind for case in choose_cases()} == {case.kind for case in everything}
    assert choose_cases(["training", "windows-7x7-training"]) == choose_cases(["training"])
    assert {case.mode for case in choose_cases(["training"])} == {"training"}
    assert [case.name for case in choose_cases(["causal", "decode"])] == ["causal-1024", "causal-4096", "decode-8192"]
    assert {case.mode for case in choose_cases(["models"], mode="forward")} == {"forward"}
    assert choose_cases(["1d-32768-training"], batch=3)[0].batch == 3
    table = cases_table()
    assert all(name in table for name in names)
    groups = {group for case in everything for group in case.all_groups}
    assert groups == {"windows", "sequence", "image", "causal", "decode", "training", "models", "quick", "all"}
    assert not groups & set(names)
