"""The first paper's grid (arXiv 2606.09200): its workloads under every control, simulated or measured."""
