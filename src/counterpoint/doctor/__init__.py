"""Checks before a run: settings that are known to defeat overlap on this machine, the fact behind each, and the remedy.

`environment.gather` collects facts, and `rules.find` judges them. Rules are pure functions of what was found.
"""
