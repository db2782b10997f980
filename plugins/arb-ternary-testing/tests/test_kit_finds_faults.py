"""Test that the suites find the faults they were written for: one per broken component."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

#: Broken components, each with a test that has to fail because of it.
FAULTS = {
    "TestVotesWithTheOtherSign": "test_a_positive_gradient_votes_a_trit_down",
    "TestVotesThatWrap": "test_votes_saturate_and_never_wrap",
    "TestSixteenBitSums": "test_largest_sum_needs_more_than_16_bits",
    "TestNegativeExponentsAsShifts": "test_negative_exponents_are_fractions",
    "TestShiftsOfThirtyTwoBits": "test_int8_products_are_exact_at_the_widest_spread",
    "TestSumsInFloat32": "test_small_exponents_count_beside_large_ones_that_cancel",
    "TestAnySpreadInSixtyFourBits": "test_wider_spread_is_an_error",
    "TestStaleWeights": "test_product_uses_a_weight_changed_in_place",
    "TestSharedWorkspace": "test_results_and_inputs_survive_the_next_call",
    "TestUnwrittenRows": "test_int8_gradients_of_the_input_are_exact",
    "TestPaddingThatFlips": "test_padding_never_flips",
    "TestTwoStepsAtOnce": "test_from_minus_one_to_plus_one_takes_two_crossings",
    "TestRoundingHalfUp": "test_quantize_rows_rounds_half_to_even",
    "TestScaledVotesWithOneHash": "test_rounding_is_independent_per_step_and_unbiased",
    "TestLookupsHashedByPosition": "test_lookup_votes_only_for_its_rows",
    "TestRailThatCarries": "test_scaled_crossings_flip_carry_and_decay",
    "TestNarrowVotesThatWrap": "test_narrow_sign_votes_follow_the_rule_and_saturate",
    "TestGlobalNoise": "test_global_random_generators_are_not_used",
    "TestNoiseByRow": "test_sample_is_masked_alike_in_any_row",
    "TestMaskingInPlace": "test_batch_is_left_unchanged",
    "TestReservedBeyondTheVocabulary": "test_reserved_ids_are_token_ids",
    "TestAscent": "test_loss_of_a_regression_falls",
    "TestForgottenMomentum": "test_restored_run_equals_an_uninterrupted_run",
    "TestOvercountedFlips": "test_reported_flips_are_the_trits_that_changed",
    "TestHalfOfAllTritsFlip": "test_few_trits_flip_in_a_step",
    "TestStateThatIsNotPlain": "test_state_is_plain",
    "TestForgottenCursor": "test_killed_run_resumes_to_the_same_bits",
    "TestDeafPhase": "test_run_stopped_after_any_step_resumes_bitwise",
}

BROKEN = Path(__file__).with_name("broken_components.py")


OPTIONS = ("-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest")


@pytest.fixture(scope="module")
def failures(forked: Callable[..., tuple[int, str]]) -> Mapping[str, set[str]]:
    """Return the tests that failed, by class.

    Only the tests that have to fail are run: the other tests of a suite take minutes.
    """

    def run() -> int:
        os.chdir(BROKEN.parent)
        sys.path.insert(0, str(BROKEN.parent))
        tests = [f"{BROKEN.name}::{cls}::{test}" for cls, test in FAULTS.items()]
        return pytest.main([*OPTIONS, "-c", os.devnull, "--rootdir", str(BROKEN.parent), *tests])

    code, output = forked(run)
    assert code == 1, output
    found: dict[str, set[str]] = {}
    for cls, test in re.findall(r"^FAILED [^:]+::(\w+)::(\w+)", output, re.MULTILINE):
        found.setdefault(cls, set()).add(test)
    return found


@pytest.mark.parametrize(("component", "test"), FAULTS.items(), ids=FAULTS)
def test_fault_is_found(failures: Mapping[str, set[str]], component: str, test: str) -> None:
    assert failures.get(component) == {test}


def test_every_broken_component_is_listed() -> None:
    assert set(re.findall(r"^class (Test\w+)", BROKEN.read_text(), re.MULTILINE)) == set(FAULTS)
