"""Speed, side by side: every number is a median of measurements that alternate with those it is compared to.

equinorm bench                 everything this machine can measure
equinorm bench steps           training steps without a norm, with BN, GN, LN, ENorm, EquiNorm, MSR and WN
equinorm bench scaling         what ENorm and BN cost as width, depth and batch grow
equinorm bench balance         tracing and balancing networks of the zoo
equinorm bench lab             runs of the laboratory, several side by side

Only when asked for:

equinorm bench kernels         an ENorm step kernel by kernel, on a GPU
equinorm bench instruments     what `equinorm.diagnostics` shows on CIFAR-10, and what recording costs
equinorm bench checkpoint      an 8 GB folder of transformers, balanced, beside a copy of it: time and memory
equinorm bench sharded         what an ENorm cycle communicates beside its training step, over 2 and 4 processes

In reading order: `run` (the parts), `facts` and `output` (what goes with a measurement, how it is summed up and
written); `steps`, `scaling`, `balance`, `floors`, `throughput`, `kernels`, `instruments`, `checkpoint` and `sharded`
(one part each); `traffic` (counts collectives); `llama` (a net for `steps`, `floors` and `sharded`).
"""
