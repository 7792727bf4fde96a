"""Unit filters."""
