"""Accepted length and its relatives on traces small enough to count by hand."""

from __future__ import annotations

import pytest

from draftsmith.eval.metrics import (
    accepted_length,
    macro_accepted_length,
    measure_repetition,
    summarise_rounds,
)
from draftsmith.inference.records import RoundRecord


def trace(*rounds: tuple[int, int, int]) -> list[RoundRecord]:
    """Rounds of chains: (proposed, accepted, emitted)."""
    return [
        RoundRecord(proposed, proposed, accepted, emitted, 0.0, 0.0, 0.0)
        for proposed, accepted, emitted in rounds
    ]


def test_drafts_per_round_and_tokens_per_round_are_both_shown() -> None:
    """E01: rounds that accept 2, 0 and 4 drafts."""
    summary = summarise_rounds(trace((4, 2, 3), (4, 0, 1), (4, 4, 5)))
    assert summary.accepted_draft_tokens == 2.0
    assert summary.accepted_length == 3.0
    assert summary.histogram == {1: 1, 3: 1, 5: 1}
    assert accepted_length(summary.histogram) == 3.0


def test_token_from_prefill_belongs_to_no_round() -> None:
    """E02: 7 tokens, the first from prefill, then two rounds of 3."""
    assert summarise_rounds(trace((2, 2, 3), (2, 2, 3))).accepted_length == 6 / 2


def test_joint_and_conditional_acceptance_are_told_apart() -> None:
    """E03: accepted 3, 1, 0, 2 of 3."""
    summary = summarise_rounds(trace((3, 3, 4), (3, 1, 2), (3, 0, 1), (3, 2, 3)))
    assert summary.joint_acceptance == [0.75, 0.5, 0.25]
    assert summary.conditional_acceptance == pytest.approx([0.75, 2 / 3, 0.5])


def test_positions_that_were_not_drafted_do_not_count_as_rejected() -> None:
    summary = summarise_rounds(trace((3, 3, 4), (1, 1, 2), (0, 0, 1)))
    assert summary.joint_acceptance == [1.0, 1.0, 1.0]
    assert summary.accepted_draft_tokens == pytest.approx(4 / 3)


def test_what_lies_after_the_end_of_the_text_is_left_out() -> None:
    """4 of 4 drafts agree, but the second one is the end-of-text token."""
    summary = summarise_rounds(trace((4, 4, 2)))
    assert summary.accepted_length == 2.0
    assert summary.accepted_draft_tokens == 2.0
    assert summary.joint_acceptance == [1.0, 1.0]


def test_a_tree_counts_depth_by_position_and_nodes_as_work() -> None:
    """16 nodes of depth 4, 16 of depth 3, and a tree cut by the end of the text at its second."""
    rounds = [
        RoundRecord(16, 4, 3, 4, 0.0, 0.0, 0.0),
        RoundRecord(16, 3, 0, 1, 0.0, 0.0, 0.0),
        RoundRecord(10, 4, 4, 2, 0.0, 0.0, 0.0),
    ]
    summary = summarise_rounds(rounds)
    assert summary.verified_nodes == pytest.approx(42 / 3)
    # Position 3 is reached by the first two rounds, position 4 by the first alone.
    assert summary.joint_acceptance == pytest.approx([2 / 3, 2 / 3, 1 / 2, 0.0])
    assert summary.conditional_acceptance == pytest.approx([2 / 3, 1.0, 1.0, 0.0])
    assert summary.joint_acceptance_vllm == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert summary.accepted_length == pytest.approx(7 / 3)


def test_a_block_whose_slots_are_all_right_counts_them_all() -> None:
    """E06: block of 4, its first slot the token after the anchor."""
    summary = summarise_rounds(trace((4, 4, 5)))
    assert summary.accepted_draft_tokens == 4.0
    assert summary.accepted_length == 5.0


def test_rounds_of_several_processes_are_pooled_and_not_averaged() -> None:
    """E07: 9 of 10 drafts kept on one, 1 of 90 on the other."""
    one = trace(*[(1, 1, 2)] * 9, (1, 0, 1))
    other = trace((1, 1, 2), *[(1, 0, 1)] * 89)
    assert summarise_rounds(one + other).joint_acceptance == [0.1]


def test_one_trace_in_three_conventions() -> None:
    rounds = trace((4, 2, 3), (4, 4, 2), (0, 0, 1))
    summary = summarise_rounds(rounds)
    assert summary.accepted_length == pytest.approx((3 + 2 + 1) / 3)
    assert summary.accepted_length_vllm == pytest.approx(1 + (2 + 4) / 2)
    assert summary.joint_acceptance_vllm == [1.0, 1.0, 0.5, 0.5]
    assert summary.accepted_length_spec_bench == pytest.approx(1 + (2 + 2 + 0) / 3)


def test_macro_mean_weighs_prompts_and_not_rounds() -> None:
    long = trace((4, 0, 1), (4, 0, 1), (4, 0, 1))
    short = trace((4, 2, 3))
    assert macro_accepted_length([long, short, []]) == 2.0
    assert summarise_rounds(long + short).accepted_length == 1.5


def test_no_rounds_give_no_means() -> None:
    summary = summarise_rounds([])
    assert summary.accepted_length is None
    assert summary.accepted_length_vllm is None
    assert summary.joint_acceptance == summary.joint_acceptance_vllm == []
    assert summary.verified_nodes is None
    assert macro_accepted_length([]) is None


def test_a_text_that_repeats_one_token_is_repetitive() -> None:
    """E11."""
    stuck = measure_repetition([5, 9, *[7] * 30])
    assert stuck.repetitive
    assert stuck.longest_loop == 30
    assert stuck.distinct_ratio == pytest.approx(3 / 32)


def test_a_repeated_phrase_is_found_and_plain_text_is_not_blamed() -> None:
    assert measure_repetition([1, 2, 3, 4] * 8).longest_loop == 32
    plain = measure_repetition(list(range(50)) + [3, 3, 3])
    assert not plain.repetitive
    assert plain.longest_loop == 3
    assert not measure_repetition([4, 4, 4]).repetitive
    assert not measure_repetition([]).repetitive
