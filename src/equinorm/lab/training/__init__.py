"""A run: from its description to its record, on one machine or many.

In reading order:

runs           what a run is: plain data with a key
schedules      learning rates and momentum as functions of the position in training
precision      in what a run computes, and where its random numbers come from
inputs         the images of a run, on the device or streamed to it
losses         what is trained
parts          model, optimizer and method of a run before its first step
recording      what is measured besides loss and accuracy
training       one run in progress: steps that can be replayed, a state that can be saved after any of them
store          where records are kept, and the locks that keep two processes from training the same run
trainer        many runs: side by side on a GPU, interrupted and resumed
together       one run on several GPUs
progress       what a terminal shows meanwhile
launchers      where runs are trained: in this process, on a Ray cluster, as Slurm jobs
"""
