"""All rules, in the order of a report. A rule is a pure function from a context to one finding or None.

A rule needs a source or a measurement: docs/check.md lists both. If what it needs is unknown, it returns None or reports
that it does not know.
"""

from collections.abc import Callable

from counterpoint.doctor.job_context import SEVERITIES, Finding, JobContext
from counterpoint.doctor.rules import controls, frameworks, launchers, launches, nccl, process_groups, queues

Rule = Callable[[JobContext], Finding | None]
RULES: tuple[Rule, ...] = (
    launches.blocking_launches,
    launches.serializing_profiler,
    launches.uncached_memory,
    launches.preloaded_interceptor,
    launches.preloaded_but_missing,
    queues.one_queue_for_sharded_data_parallel,
    queues.several_queues_for_megatron,
    queues.one_queue_for_expert_overlap,
    queues.one_queue_on_blackwell,
    queues.one_queue_for_unknown_job,
    queues.queues_out_of_range,
    queues.one_hip_queue,
    controls.priority_of_waited_collectives,
    controls.priority_in_graphs,
    controls.priority_ignored_by_hip,
    controls.zero_cta_of_reductions,
    controls.zero_cta_not_understood,
    controls.symmetric_memory_without_peer_access,
    controls.symmetric_memory_without_multicast,
    controls.sm_carveout,
    nccl.peer_to_peer_off,
    nccl.no_peer_access,
    nccl.few_ctas,
    nccl.many_ctas,
    nccl.number_of_threads,
    nccl.nvlink_sharp_off,
    nccl.forced_algorithm,
    nccl.network_by_sockets,
    nccl.serialized_communicators,
    process_groups.blocking_wait,
    process_groups.timed_collectives,
    process_groups.checked_collectives,
    process_groups.record_streams,
    launchers.container_behind_run,
    launchers.hosts_behind_run,
    launchers.cleared_environment,
    launchers.filter_not_loadable,
    launchers.filter_on_shared_files,
    launchers.occupied_plugin_slot,
    frameworks.megatron_without_data_parallel_overlap,
    frameworks.megatron_tp_overlap_without_sequence_parallel,
    frameworks.megatron_experts_by_all_gather,
    frameworks.zero_without_overlap,
)


def find(context: JobContext) -> tuple[Finding, ...]:
    """Return the findings of all rules, the worst first."""
    found = [finding for rule in RULES if (finding := rule(context)) is not None]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
