"""Steps on real GPUs: captured in CUDA graphs, rewritten by a plan, proven and timed. Needs torch and cuda-bindings."""
