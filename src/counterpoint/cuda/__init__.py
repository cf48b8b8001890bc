"""Captures steps in CUDA graphs, rewrites them by a plan, verifies and times them on GPUs. Needs torch and cuda-bindings."""
