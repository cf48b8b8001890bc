"""The sections of the job `integrations`, each held against stock PyTorch."""
