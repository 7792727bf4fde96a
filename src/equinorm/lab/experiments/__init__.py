"""One module per paper; each has `artifacts()`, which lists its tables and figures (see docs/laboratory.md)."""
