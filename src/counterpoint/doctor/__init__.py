"""Before a run: which settings are known to defeat overlap on this machine, the fact behind each, and the remedy.

`environment.gather` looks, `rules.find` judges. Rules are pure functions of what was found.
"""
