"""Normalization propagation."""
