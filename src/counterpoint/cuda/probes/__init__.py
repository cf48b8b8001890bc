"""The probes of `counterpoint calibrate`: short measurements on GPUs that give the simulator's constants."""

# The names of all probes, in the order in which they run; probes that heat the GPU come last.
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
