"""The laboratory: what the command line, the demo and the recipes need beyond the library (the extra `lab`).

Rooms, each of which uses those above it:

data           data sets: found, checked, read, augmented on the device
nets           the networks of the papers, each with any normalization, and the kernels that only they use
training       a run as plain data; how it is made, trained, resumed, kept, and spread over machines
experiments    recipes: the runs behind every table and figure of the papers, and the demo
report         every number next to the paper's
bench          speed, side by side

One thing goes the other way: `data` and `nets` are told by `training.runs.Data` what a run wants of its images.
"""
