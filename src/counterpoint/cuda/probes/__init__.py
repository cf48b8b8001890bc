"""The probes of `counterpoint calibrate`: short measurements on GPUs, from which the simulator's constants follow."""

# The names of all probes, in their order; what heats the GPU comes last.
PROBES = (
    "launches",
    "placement",
    "head start",
    "streaming",
    "rows",
    "sharing",
    "sums",
    "host copies",
    "copies",
    "collectives",
    "contention",
    "residency",
    "matmuls",
    "load",
)
