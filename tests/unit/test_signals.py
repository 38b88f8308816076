"""SPEC 1.2 (visual dependency) and 2 (VGR, AEI), by hand."""

import math

import numpy as np
import pytest
import torch
from helpers import INF, NAN, close, fake_prompt, make_mask, same

from mtrl.algorithms.signals import (
    aei,
    bounded_dependency,
    layer_segments,
    low_var_kl,
    pool_sizes,
    segment,
    sequence_mass,
    vgr,
    visual_dependency,
)
from mtrl.types import SEGMENTS, Needs, Signals

LN2 = math.log(2)


def test_low_var_kl_by_hand():
    # x = ln 2: 2 - ln 2 - 1 = 1 - ln 2.   x = -ln 2: 1/2 + ln 2 - 1 = ln 2 - 1/2.   x = 0: 1 - 0 - 1 = 0.
    close(low_var_kl(torch.tensor([LN2, -LN2, 0.0])), [1 - LN2, LN2 - 0.5, 0.0])


def test_low_var_kl_holds_the_log_ratio_within_20():
    # x = 30 counts as 20: e^20 - 21.   x = -30 counts as -20: e^-20 + 20 - 1.
    close(low_var_kl(torch.tensor([30.0, -30.0])), [math.exp(20) - 21, math.exp(-20) + 19])


def test_low_var_kl_of_a_small_change_is_not_rounding_noise():
    # x = 2^-10: x²/2 + x³/6 + .. = 2^-21 * (1 + x/3 + ..). The float32 steps of exp(x) are 2^-23, a quarter of it.
    x = 2.0**-10
    close(low_var_kl(torch.tensor([x, -x])), [2**-21 * (1 + x / 3), 2**-21 * (1 - x / 3)], rtol=1e-3, atol=0)


def test_dependency_is_of_perturbed_minus_old():
    # The token had 1/2 and keeps 1/4 without the image: x = a - o = ln(1/4) - ln(1/2) = -ln 2, S = ln 2 - 1/2.
    # (o - a would give 1 - ln 2.)   From 1/4 to 1/2: x = ln 2, S = 1 - ln 2.
    old = torch.tensor([[0.5, 0.25]]).log()
    perturbed = torch.tensor([[0.25, 0.5]]).log()
    close(visual_dependency(old, perturbed, make_mask(2)), [[LN2 - 0.5, 1 - LN2]])


def test_dependency_is_held_within_10():
    # x = 3: e^3 - 4 = 16.09 -> 10.   x = -12: 12 - 1 + e^-12 = 11.00 -> 10.   x = -5: e^-5 + 4 = 4.0067 stays.
    change = torch.tensor([[3.0, -12.0, -5.0, 500.0, -500.0]])
    close(visual_dependency(torch.zeros(1, 5), change, make_mask(5)), [[10, 10, math.exp(-5) + 4, 10, 10]])


def test_dependency_is_zero_off_the_mask_for_any_value_there():
    old = torch.tensor([[-LN2, NAN, INF]])
    perturbed = torch.tensor([[0.0, 7.0, INF]])
    close(visual_dependency(old, perturbed, make_mask(1, width=3)), [[1 - LN2, 0, 0]])


def test_full_kl_is_held_within_0_and_10_too():
    kl = torch.tensor([[-1e-7, 0.5, 12.0, 3.0]])
    close(bounded_dependency(kl, make_mask(3, width=4)), [[0.0, 0.5, 10.0, 0.0]])


@pytest.mark.parametrize("layers", range(1, 41))
def test_thirds_are_those_of_array_split(layers):
    expected = [part.tolist() for part in np.array_split(np.arange(layers), 3)]
    assert [list(r) for r in layer_segments(layers)[:3]] == expected


def test_segments_of_28_layers():
    # 28 = 10 + 9 + 9; `all` is all layers or the last k; `weight` is `all`, or the last of its own k.
    assert layer_segments(28) == [range(10), range(10, 19), range(19, 28), range(28), range(28)]
    assert layer_segments(28, last_k=4, weight_last_k=2)[3:] == [range(24, 28), range(26, 28)]
    assert layer_segments(28, last_k=4)[3:] == [range(24, 28)] * 2
    assert layer_segments(28, weight_last_k=2)[3:] == [range(28), range(26, 28)]
    assert layer_segments(3, last_k=5)[3] == range(3)


def test_segment_picks_by_name():
    mass = torch.arange(10.0).reshape(1, 5, 2)
    assert SEGMENTS == ("early", "middle", "late", "all", "weight")
    same(segment(mass, "late"), torch.tensor([[4.0, 5.0]]))
    same(segment(mass, "all"), torch.tensor([[6.0, 7.0]]))


def test_pool_sizes_are_text_then_vision():
    prompts = (fake_prompt("a", text_tokens=3, vision_tokens=5), fake_prompt("b", visual=False, text_tokens=1))
    assert pool_sizes(prompts).tolist() == [[3, 5], [1, 0]]


def test_vgr_and_aei_by_hand():
    # A_T = 0.6 on 10 tokens, A_O = 0.3 on 20 tokens. VGR = 0.06 / 0.015 = 4.
    # AEI_text = (0.6/0.9) / (10/30) = 2;  AEI_vision = (0.3/0.9) / (20/30) = 1/2.
    mass, sizes = torch.tensor([0.6, 0.3]), torch.tensor([10, 20])
    close(vgr(mass, sizes), 4.0)
    close(aei(mass, sizes), [2.0, 0.5])


def test_pools_of_one_token():
    # VGR = 0.3/0.1 = 3; shares 3/4 and 1/4 over fair shares of 1/2.
    mass, sizes = torch.tensor([0.3, 0.1]), torch.tensor([1, 1])
    close(vgr(mass, sizes), 3.0)
    close(aei(mass, sizes), [1.5, 0.5])


def test_balance_is_one():
    # 3/4 of the attention on 3/4 of the tokens.
    mass, sizes = torch.tensor([0.3, 0.1]), torch.tensor([30, 10])
    close(vgr(mass, sizes), 1.0)
    close(aei(mass, sizes), [1.0, 1.0])


def test_vgr_is_aei_text_over_aei_vision():
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(50, 2, generator=generator)
    sizes = torch.randint(1, 300, (50, 2), generator=generator)
    text, vision = aei(mass, sizes).unbind(-1)
    close(vgr(mass, sizes), text / vision, rtol=1e-5)


def test_masses_are_floored():
    # A_O = 0 counts as 1e-8: VGR = (0.5/5) / (1e-8/10) = 1e8.   Both 0: (1e-8/5) / (1e-8/10) = 2.
    sizes = torch.tensor([5, 10])
    close(vgr(torch.tensor([[0.5, 0.0], [0.0, 0.0]]), sizes), [1e8, 2.0])
    # AEI_vision = [1e-8/0.5] / [10/15] = 3e-8;  AEI_text = 1 / [5/15] = 3.   Both floored: 1/2 over 1/3 and 2/3.
    close(aei(torch.tensor([[0.5, 0.0], [0.0, 0.0]]), sizes), [[3.0, 3e-8], [1.5, 0.75]], atol=1e-13)


def test_an_empty_pool_is_not_applicable():
    mass = torch.tensor([[0.5, 0.0], [0.0, 0.5], [0.5, 0.5]])
    sizes = torch.tensor([[5, 0], [0, 5], [5, 5]])
    close(vgr(mass, sizes), [NAN, NAN, 1.0])
    close(aei(mass, sizes), [[NAN, NAN], [NAN, NAN], [1.0, 1.0]])


def test_a_sequence_has_the_ratio_of_means():
    # Tokens (0.4, 0.1) and (0.2, 0.7): means (0.3, 0.4), VGR 3/4. The mean of the ratios would be (4 + 2/7)/2 = 2.14.
    # The second response has only one token; its padding is not read.
    mass = torch.tensor([[[0.4, 0.1], [0.2, 0.7]], [[0.1, 0.2], [NAN, INF]]])[:, :, None, :]
    means = sequence_mass(mass, make_mask(2, 1))
    close(means, [[[0.3, 0.4]], [[0.1, 0.2]]])
    close(vgr(means[:, 0], torch.tensor([1, 1])), [0.75, 0.5])


def test_a_row_without_tokens_has_no_ratio():
    mass = torch.full((2, 1, 1, 2), 0.25)
    means = sequence_mass(mass, make_mask(1, 0))
    close(vgr(means[:, 0], torch.tensor([1, 1])), [1.0, NAN])


# ---- needs, and the signals of several probes ----


def test_needs_are_combined():
    both = Needs("old_logprobs") | Needs("old_logprobs", "entropy") | Needs()
    assert both == Needs("entropy", "old_logprobs") and both.names == {"old_logprobs", "entropy"}
    assert "entropy" in both and "attention_mass" not in both and "no signal at all" not in both
    assert both.without("entropy", "attention_mass") == Needs("old_logprobs") and both == Needs(
        "old_logprobs", "entropy"
    )
    assert not Needs() and both and not both.without("old_logprobs", "entropy")


def test_needs_determine_the_number_of_views():
    assert Needs().views == Needs("old_logprobs", "entropy", "attention_mass", "ref_logprobs", "values").views == 1
    for name in ("dependency", "perturbed_logprobs", "entropy_change"):
        assert (Needs("old_logprobs") | Needs(name)).views == Needs(name).views == 2


def test_an_unknown_signal_is_known_as_such():
    assert Needs("old_logprobs", "entropie", "attention").unknown == ["attention", "entropie"]


def test_probes_bring_their_own_signals():
    one, two = torch.zeros(1, 2), torch.ones(1, 2)
    merged = Signals(old_logprobs=one).merge(Signals(ref_logprobs=two)).merge(Signals())
    assert merged.old_logprobs is one and merged.ref_logprobs is two and merged.entropy is None
    with pytest.raises(AssertionError, match="two probes measured old_logprobs"):
        merged.merge(Signals(old_logprobs=two))
