"""ENorm's step by three backends behind one protocol. In reading order:

protocol.py    Problem, TrainingState, and Step: prepared once, a step, the same once more
plain.py       torch operations layer by layer, the twin that the others are compared with
backends.py    which of them takes the steps
fused.py       what the fused ones have in common
structure.py   how parameters lie in memory as rows and columns
foreach.py     few torch operations, for CPUs
tables.py      what the kernels have to do
triton.py      few launches of kernels, for GPUs; the only one that needs Triton
"""
