"""Fused versions of the methods for CUDA, in Triton; each stands beside a plain twin and equals it."""
