"""Validation: a fixed set of cases that are never used for fitting, predicted and measured side by side."""
