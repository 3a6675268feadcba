"""The comparison: errors in units, exact outputs, NaN, and elements without a meaning."""

from __future__ import annotations

import numpy as np
import pytest

from lily.checking.expected import Expected, compare, exactly

WANT = np.array([[1.0, -2.0], [0.0, 1e-3]])
UNIT = np.array([[1.0, 4.0], [1.0, 1.0]])


def test_an_error_is_counted_in_units_of_its_element() -> None:
    off = WANT + np.array([[0.0, 4e-6], [0.0, 5e-7]])
    finding = compare(off, Expected("y", WANT, UNIT, 2e-6))
    assert finding.passed
    assert finding.error == pytest.approx(1e-6)
    assert finding.share == pytest.approx(0.5)
    assert finding.message == ""


def test_a_failure_names_the_worst_element_both_values_and_how_many() -> None:
    off = WANT + np.array([[3e-5, 4e-5], [0.0, 0.0]])
    finding = compare(off, Expected("y", WANT, UNIT, 2e-6))
    assert not finding.passed
    assert finding.message.startswith("y[0, 0] is 1.00003 but the oracle says 1;")
    assert finding.message.endswith("(2 of 4 elements are off)")


def test_rounding_is_allowed_on_top_and_relative_to_the_value() -> None:
    expected = Expected("y", np.array([100.0, 0.0]), np.ones(2), 1e-6, 2.0**-8)
    assert compare(np.array([100.39, 0.0]), expected).passed
    assert not compare(np.array([100.4, 0.0]), expected).passed
    assert not compare(np.array([100.0, 1e-5]), expected).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_fails(value: float) -> None:
    got = WANT.copy()
    got[1, 0] = value
    finding = compare(got, Expected("y", WANT, UNIT, 1e30))
    assert not finding.passed
    assert "y[1, 0] is " in finding.message


def test_exact_outputs_must_be_equal() -> None:
    want = np.array([3, 1, 2])
    assert compare(want.copy(), exactly("ids", want)).share == 0
    finding = compare(np.array([3, 2, 1]), exactly("ids", want))
    assert not finding.passed
    assert finding.share == float("inf")
    assert "ids[1] is 2 but the oracle says 1; it must be equal (2 of 3" in finding.message


def test_elements_without_a_meaning_may_be_anything() -> None:
    defined = np.array([[True, True], [False, True]])
    got = WANT.copy()
    got[1, 0] = np.nan
    assert compare(got, Expected("y", WANT, UNIT, 0.0, 0.0, defined)).passed
    got[1, 1] = 7.0
    assert not compare(got, Expected("y", WANT, UNIT, 0.0, 0.0, defined)).passed


def test_another_shape_is_a_mistake_of_the_harness() -> None:
    with pytest.raises(ValueError, match="shape"):
        compare(WANT[0], Expected("y", WANT, UNIT, 1.0))
