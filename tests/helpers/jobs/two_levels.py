"""Ranks of pretended hosts that hold collectives in two levels against what they are by definition."""

from integration_sections.two_levels import SECTIONS

from helpers.gloo_sections import report, run_sections

if __name__ == "__main__":
    names = iter([section.__name__ for section in SECTIONS])
    run_sections({section.__name__: section for section in SECTIONS}, after_each=lambda: report(next(names)))
