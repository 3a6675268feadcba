"""Tests of lily.checking: a package, so that its modules may be called as those of other folders."""
