"""The layout of the control block, byte for byte as in `block.h`; a test compiles that header and compares.

This module knows nothing of files or of the meaning of rules. All figures have the byte order and alignment of this machine,
because both sides run on it.
"""

from ctypes import Structure, c_char, c_double, c_int32, c_int64, c_uint32, c_uint64

MAGIC = 0x54_4E_49_4F_50_43_46_4C  # "LFCPOINT" read as a little-endian number
LAYOUT_VERSION = 2
NUM_SLOTS = 4
MAX_RULES = 256  # one byte holds the number of a rule
PATTERN_POOL_BYTES = 65536
MAX_FUNCTIONS = 4096
MAX_NAME_BYTES = 512
MAX_PROBLEM_BYTES = 160

# bits of `RuleRecord.sets`
HAS_CAP, HAS_CTAS, HAS_CARVEOUT, HAS_PRIORITY, HAS_HOLD, IS_COLLECTIVE, NOT_COLLECTIVE, ONLY_COLLECTIVE = (
    1 << bit for bit in range(8)
)
# bits of `FunctionRecord.traits`
IS_COOPERATIVE, IS_COLLECTIVE_FUNCTION, IS_NAME_TRUNCATED = (1 << bit for bit in range(3))


class RuleRecord(Structure):
    """One rule; its pattern is in the slot's pool."""

    _fields_ = (
        ("pattern_offset", c_uint32),
        ("pattern_bytes", c_uint32),
        ("sets", c_uint32),
        ("dynamic_shared_bytes", c_uint32),
        ("ctas_per_sm", c_int32),
        ("carveout_percent", c_int32),
        ("priority", c_int32),
        ("reserved", c_uint32),
        ("hold_us", c_double),
    )


class CounterRecord(Structure):
    """Counters of one rule; the filter adds to them, and Python sets them to zero before a table is put in force."""

    _fields_ = (
        ("num_matched", c_uint64),
        ("num_capped", c_uint64),
        ("num_prioritized", c_uint64),
        ("num_held", c_uint64),
        ("num_refused", c_uint64),
        ("num_retried", c_uint64),
        ("residency_found", c_int64),  # the largest found for any kernel of the rule; -1 before the first
        ("refusal", c_uint64),  # the first refusal: code << 32 | value
    )


class SlotRecord(Structure):
    """One table. `checksum` is the CRC-32 of the rules in use and then of the pattern bytes in use."""

    _fields_ = (
        ("generation", c_uint64),
        ("checksum", c_uint32),
        ("num_rules", c_uint32),
        ("pool_bytes", c_uint32),
        ("reserved", c_uint32),
        ("rules", RuleRecord * MAX_RULES),
        ("counters", CounterRecord * MAX_RULES),
        ("pool", c_char * PATTERN_POOL_BYTES),
    )


class FunctionRecord(Structure):
    """One kernel that was launched; grid, block and shared memory are its last launch's."""

    _fields_ = (
        ("num_launches", c_uint64),  # all launches, by whichever entry point
        ("num_launches_ex", c_uint64),
        ("num_changed", c_uint64),
        ("grid_xy", c_uint64),  # x in the low half, y in the high one
        ("grid_z_block_x", c_uint64),
        ("block_yz", c_uint64),
        ("dynamic_shared_bytes", c_uint64),
        ("static_shared_bytes", c_uint32),
        ("registers_per_thread", c_uint32),
        ("ctas_per_cluster", c_uint32),
        ("traits", c_uint32),
        ("residency_found", c_int32),
        ("name_bytes", c_uint32),
        ("name", c_char * MAX_NAME_BYTES),
    )


class BlockRecord(Structure):
    """The whole file. Python writes `generation` and the slots; the filter writes everything else."""

    _fields_ = (
        ("magic", c_uint64),
        ("layout_version", c_uint32),
        ("block_bytes", c_uint32),
        ("generation", c_uint64),
        ("pid", c_int32),
        ("rank", c_int32),
        ("driver", c_uint32),  # 0 none yet, 1 CUDA, 2 HIP
        ("num_functions", c_uint32),
        ("num_untracked", c_uint64),  # launches of kernels that were not recorded because the census was full
        ("problem_bytes", c_uint32),
        ("reserved", c_uint32),
        ("problem", c_char * MAX_PROBLEM_BYTES),
        ("slots", SlotRecord * NUM_SLOTS),
        ("functions", FunctionRecord * MAX_FUNCTIONS),
    )
