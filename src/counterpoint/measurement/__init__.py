"""The judge of measurements: the order in which variants run, what their times prove, when to stop, and the summary
sentence.

Captured steps, operators' schedules, live tuning and both guards measure in their own ways, but are all judged here; no
other part holds a threshold. The judge knows nothing of plans, GPUs or ranks: the measuring code passes the slowest
rank's time.

- `orders`: balanced orders of turns, drawn at random
- `values`: measurements, verdicts, thresholds, and the sentence
- `evidence`: what turns prove, however step times are disturbed
- `proof`, `tournament`: whether a candidate is faster, and which of several
- `guard`: whether a plan in force has become slower
"""
