"""The one judge: which order variants run in, what their times say, when to stop, and the sentence that reports it.

Captured steps, operators' schedules, live tuning and both guards measure in their own ways and are judged here, and no other
part holds a threshold. It knows nothing of plans, of GPUs or of ranks; whoever measures gives the slowest rank's time.

- `orders`: balanced orders of turns, drawn at random
- `values`: measurements, verdicts, thresholds, and the sentence
- `evidence`: what turns prove, however step times are disturbed
- `proof`, `tournament`: whether a candidate is faster, and which of several
- `guard`: whether a plan in force has become slower
"""
