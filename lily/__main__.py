"""``python -m lily``."""

from lily.cli import main

main()
