"""The suites find the faults that they were written for: one broken component each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

#: Broken component, and a test that has to fail because of it.
FAULTS = {
    "TestVotesWithTheOtherSign": "test_a_positive_gradient_votes_a_trit_down",
    "TestVotesThatWrap": "test_votes_saturate_and_never_wrap",
    "TestSixteenBitSums": "test_largest_sum_needs_more_than_16_bits",
    "TestNegativeExponentsAsShifts": "test_negative_exponents_are_fractions",
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
    "TestStateThatIsNotPlain": "test_state_is_plain",
    "TestForgottenCursor": "test_killed_run_resumes_to_the_same_bits",
    "TestDeafPhase": "test_run_stopped_after_any_step_resumes_bitwise",
}

BROKEN = Path(__file__).with_name("broken_components.py")


@pytest.fixture(scope="module")
def failures() -> Mapping[str, set[str]]:
    """Which of the tests that have to fail did, by class; the others of a suite are left out, for
    they take minutes.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rf",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    options = ["-c", os.devnull, "--rootdir", str(BROKEN.parent), "--noconftest"]
    options += [f"{BROKEN.name}::{cls}::{test}" for cls, test in FAULTS.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BROKEN.parent)}
    done = subprocess.run(
        [*command, *options],
        cwd=BROKEN.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for cls, test in re.findall(r"^FAILED [^:]+::(\w+)::(\w+)", done.stdout, re.MULTILINE):
        found.setdefault(cls, set()).add(test)
    return found


@pytest.mark.parametrize(("component", "test"), FAULTS.items(), ids=FAULTS)
def test_a_fault_is_found(failures: Mapping[str, set[str]], component: str, test: str) -> None:
    assert failures.get(component) == {test}


def test_every_broken_component_is_listed() -> None:
    assert set(re.findall(r"^class (Test\w+)", BROKEN.read_text(), re.MULTILINE)) == set(FAULTS)
