import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.filtering import GroupRules
from dapo.algorithm.overlong import soft_overlong_penalty, target_length_penalty
from dapo.errors import RewardError
from tests import make


def verdict(values, **kwargs):
    return make.group(values, **kwargs).verdict


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, None]), min_size=2, max_size=8))
def test_a_group_is_kept_exactly_when_its_judged_scores_differ(values):
    judged = [value for value in values if value is not None]
    expected = "unjudged" if len(judged) < 2 else "kept" if len(set(judged)) > 1 else "no_variance"
    assert verdict(values) == expected


def test_accuracy_is_the_default_metric_where_every_judged_score_has_it():
    assert verdict([1.0, 0.5], accs=[True, True]) == "all_right"
    assert verdict([0.2, 0.1], accs=[False, False]) == "all_wrong"
    assert verdict([1.0, 1.0], accs=[True, False]) == "kept"
    assert verdict([1.0, 0.5], accs=[True, None]) == "kept"  # not all have it: the score decides


def test_responses_that_are_equally_right_in_part_are_neither_all_right_nor_all_wrong():
    assert verdict([1.0, 0.5], accs=[0.5, 0.5]) == "no_variance"
    assert verdict([1.0, 0.5], accs=[0.5, 1.0]) == "kept"


def test_the_filter_compares_exactly_and_not_by_floating_point_std():
    assert verdict([0.1] * 10) == "no_variance"
    assert verdict([0.3, 0.1 + 0.2]) == "kept"  # these differ in the last bit


def test_the_overlong_penalty_never_leaks_into_the_filter_unless_asked():
    shaped = {
        "max_response_length": 10,
        "shaping": lambda _, length, limit, __: soft_overlong_penalty(length, limit, 5, 1.0),
    }
    kwargs = {"values": [0.0, 0.0], "lengths": [3, 10]}
    assert make.group(**kwargs, rules=GroupRules(**shaped)).verdict == "no_variance"
    with_penalty = make.group(**kwargs, rules=GroupRules(**shaped, filter_metric="seq_reward"))
    assert with_penalty.verdict == "kept"
    assert with_penalty.rewards.tolist() == [0.0, -1.0]


def test_the_final_reward_includes_the_kl_term():
    rules = GroupRules(100, filter_metric="seq_final_reward", kl_reward_coef=0.5)
    reference = [np.full(3, -1.0, np.float32), np.full(3, -2.0, np.float32)]
    group = make.group([1.0, 1.0], rules=rules, ref_logprobs=reference)
    assert group.verdict == "kept"
    k3 = np.exp(-1.0) + 1.0 - 1.0  # the sampler's log-probabilities are all -1
    np.testing.assert_allclose(group.rewards, [1.0, 1.0 - 0.5 * 3 * k3])


def test_a_named_extra_can_be_the_metric_and_an_unknown_name_is_an_error_that_lists_the_known_ones():
    extras = [{"format": 1}, {"format": 0}]
    assert verdict([1.0, 1.0], extras=extras, rules=GroupRules(9, filter_metric="format")) == "kept"
    with pytest.raises(RewardError, match=r"'formt'.*use one of: score, seq_reward, seq_final_reward, format"):
        verdict([1.0, 1.0], extras=extras, rules=GroupRules(9, filter_metric="formt"))


def test_an_extra_that_is_nan_for_every_rollout_is_no_variance():
    extras = [{"x": float("nan")}, {"x": float("nan")}]
    assert verdict([1.0, 0.0], extras=extras, rules=GroupRules(9, filter_metric="x")) == "no_variance"


def test_with_the_filter_off_every_group_with_two_judged_rollouts_is_kept():
    off = GroupRules(9, filter_enabled=False)
    assert verdict([1.0, 1.0], rules=off) == "kept"
    assert verdict([1.0, None], rules=off) == "unjudged"


def test_cut_off_rollouts_are_left_out_of_the_loss_but_not_of_the_statistics():
    group = make.group([1.0, 0.0, 0.0], cut_off=[False, True, False], rules=GroupRules(9, overlong_filter=True))
    assert group.trains.tolist() == [True, False, True]
    np.testing.assert_array_equal(group.advantages, make.group([1.0, 0.0, 0.0]).advantages)
    assert group.trained_tokens == 6


def test_a_group_with_nothing_left_to_train_on_is_dropped():
    rules = GroupRules(9, overlong_filter=True)
    assert verdict([1.0, 0.0], cut_off=[True, True], rules=rules) == "nothing_to_train"


def test_a_target_length_lowers_the_reward_and_not_the_score():
    rules = GroupRules(
        100, lambda r, length, _, is_cut_off: target_length_penalty(r, length, 10, is_cut_off=is_cut_off)
    )
    made = make.group([1.0, 1.0, -1.0, -1.0], [10, 20, 20, 20], rules=rules, cut_off=[False, False, False, True])
    assert made.rewards.tolist() == pytest.approx([1.0, 0.5, -1.5, -1.7])
    assert [score.value for score in made.scores] == [1.0, 1.0, -1.0, -1.0]
