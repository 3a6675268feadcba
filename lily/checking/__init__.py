"""The harness that holds any kernel variant against the float64 oracle of its op."""

from __future__ import annotations

from lily.checking.case import Case
from lily.checking.check import CaseResult, Harness, check_variant
from lily.checking.plugin import VariantReport, check_plugin

__all__ = ["Case", "CaseResult", "Harness", "VariantReport", "check_plugin", "check_variant"]
