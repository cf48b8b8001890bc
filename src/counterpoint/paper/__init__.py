"""The first paper's grid (arXiv 2606.09200): its workloads, and every control on them, simulated or measured."""
