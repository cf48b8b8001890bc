"""Ranks that hold the integrations against stock DDP, FSDP2 and tensor parallelism; rank 0 prints `NAME: ok` per section.

With GPUs over NCCL and copy engines, without over gloo: the sections are the same.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from integration_sections.bare_collectives import (
    bare_collectives_answer_as_the_librarys,
    bare_collectives_compiled,
    bare_collectives_give_the_librarys_results,
    bare_collectives_in_place,
    bare_collectives_leave_ddp_alone,
    bare_collectives_left_to_the_library,
    bare_collectives_repeated,
    bare_collectives_without_memory,
)
from integration_sections.comparing import DEVICE
from integration_sections.data_parallel import (
    ddp_among_ignored_parameters,
    ddp_compression,
    ddp_falls_back,
    ddp_gradients,
    ddp_refuses,
    ddp_types,
    memory_is_reported_and_given_back,
)
from integration_sections.data_parallel_in_place import (
    ddp_in_place,
    ddp_in_place_among_hooks_of_the_job,
    ddp_in_place_among_other_passes,
    ddp_in_place_among_passes_of_a_frozen_model,
    ddp_in_place_by_turns,
    ddp_in_place_of_several_types,
    ddp_in_place_refuses,
    ddp_in_place_that_leaves_out_parameters,
    ddp_in_place_with_checkpoints,
    ddp_in_place_without_memory,
    ddp_in_place_without_room,
    ddp_joins_buckets_in_place,
)
from integration_sections.data_parallel_switching import (
    ddp_checkpoints,
    ddp_compiled,
    ddp_copies_of_a_model,
    ddp_gives_way_to_a_hook_of_the_job,
    ddp_in_join,
    ddp_keeps_no_model,
    ddp_models_that_come_and_go,
    ddp_refuses_a_second_hook,
    ddp_sparse_gradients,
    ddp_switched_off_is_a_bare_job,
    ddp_switches_between_steps,
    ddp_without_memory,
)
from integration_sections.expert_parallel import (
    expert_parallel_checkpointed,
    expert_parallel_in_a_job,
    expert_parallel_in_bf16,
    expert_parallel_layers,
    expert_parallel_of_transformers,
    expert_parallel_refuses,
    expert_parallel_with_fsdp2,
    expert_parallel_with_tensor_parallel,
)
from integration_sections.lanes import all_reduces, reduce_scatters
from integration_sections.sharded_data_parallel import fsdp2_refuses_a_buffer_in_use, fsdp2_small_groups_stay, fsdp2_steps
from integration_sections.sharded_switching import (
    fsdp2_as_frameworks_use_it,
    fsdp2_checkpoints,
    fsdp2_divides_gradients_as_told,
    fsdp2_in_place,
    fsdp2_keeps_no_model,
    fsdp2_leaves_collectives_of_the_job,
    fsdp2_on_a_mesh_of_two_dimensions,
    fsdp2_refuses_a_second_call,
    fsdp2_switches_between_steps,
    fsdp2_switches_while_parameters_are_gathered,
    fsdp2_two_models,
    fsdp2_undoes_modules_that_share_a_group,
    fsdp2_without_memory,
)
from integration_sections.tensor_parallel_blocks import (
    tensor_parallel_annotated,
    tensor_parallel_blocks,
    tensor_parallel_frozen,
    tensor_parallel_trains,
)
from integration_sections.tensor_parallel_layouts import (
    tensor_parallel_hands_dtensors_on,
    tensor_parallel_keeps_other_formulas,
    tensor_parallel_lays_gradients_out_alike,
    tensor_parallel_leaves_local_inputs,
    tensor_parallel_left_to_dtensor,
    tensor_parallel_neighbors_part,
    tensor_parallel_neighbors_under_other_conditions,
    tensor_parallel_refuses,
    tensor_parallel_with_fsdp2,
)
from integration_sections.tensor_parallel_switched import (
    tensor_parallel_checkpointed,
    tensor_parallel_compiled,
    tensor_parallel_compiled_with_fsdp2,
    tensor_parallel_in_a_job,
    tensor_parallel_switches,
    tensor_parallel_without_memory,
)
from integration_sections.tensor_parallel_whole import (
    tensor_parallel_whole_activations,
    tensor_parallel_whole_and_distributed,
    tensor_parallel_whole_and_frozen,
    tensor_parallel_whole_and_left_to_dtensor,
    tensor_parallel_whole_and_packed,
    tensor_parallel_whole_and_unused,
    tensor_parallel_whole_lists_part,
    tensor_parallel_whole_neighbors_part,
    tensor_parallel_whole_on_two_meshes,
    tensor_parallel_whole_under_autocast,
    tensor_parallel_whole_with_fsdp2,
)
from integration_sections.two_levels import (
    two_levels_give_the_sequential_results,
    two_levels_left_to_the_library,
    two_levels_of_some_ranks,
    two_levels_under_ddp,
    two_levels_under_fsdp2,
    two_levels_where_the_estimate_says_so,
    two_levels_without_memory,
)

from counterpoint.cuda.ranks import wait_until_all_leave

SECTIONS: dict[str, Callable[[], None]] = {
    section.__name__: section
    for section in (
        all_reduces,
        reduce_scatters,
        bare_collectives_give_the_librarys_results,
        bare_collectives_repeated,
        bare_collectives_in_place,
        bare_collectives_answer_as_the_librarys,
        bare_collectives_left_to_the_library,
        bare_collectives_leave_ddp_alone,
        bare_collectives_compiled,
        bare_collectives_without_memory,
        ddp_gradients,
        ddp_types,
        ddp_among_ignored_parameters,
        ddp_compression,
        ddp_falls_back,
        ddp_refuses,
        ddp_switched_off_is_a_bare_job,
        ddp_switches_between_steps,
        ddp_compiled,
        ddp_refuses_a_second_hook,
        ddp_models_that_come_and_go,
        ddp_keeps_no_model,
        ddp_checkpoints,
        ddp_copies_of_a_model,
        ddp_gives_way_to_a_hook_of_the_job,
        ddp_in_join,
        ddp_sparse_gradients,
        ddp_without_memory,
        ddp_in_place,
        ddp_joins_buckets_in_place,
        ddp_in_place_of_several_types,
        ddp_in_place_refuses,
        ddp_in_place_that_leaves_out_parameters,
        ddp_in_place_by_turns,
        ddp_in_place_among_other_passes,
        ddp_in_place_among_passes_of_a_frozen_model,
        ddp_in_place_among_hooks_of_the_job,
        ddp_in_place_with_checkpoints,
        ddp_in_place_without_memory,
        ddp_in_place_without_room,
        fsdp2_steps,
        fsdp2_small_groups_stay,
        fsdp2_refuses_a_buffer_in_use,
        fsdp2_as_frameworks_use_it,
        fsdp2_divides_gradients_as_told,
        fsdp2_in_place,
        fsdp2_on_a_mesh_of_two_dimensions,
        fsdp2_switches_between_steps,
        fsdp2_switches_while_parameters_are_gathered,
        fsdp2_refuses_a_second_call,
        fsdp2_undoes_modules_that_share_a_group,
        fsdp2_leaves_collectives_of_the_job,
        fsdp2_keeps_no_model,
        fsdp2_two_models,
        fsdp2_checkpoints,
        fsdp2_without_memory,
        tensor_parallel_blocks,
        tensor_parallel_trains,
        tensor_parallel_annotated,
        tensor_parallel_hands_dtensors_on,
        tensor_parallel_leaves_local_inputs,
        tensor_parallel_lays_gradients_out_alike,
        tensor_parallel_frozen,
        tensor_parallel_refuses,
        tensor_parallel_keeps_other_formulas,
        tensor_parallel_left_to_dtensor,
        tensor_parallel_neighbors_part,
        tensor_parallel_neighbors_under_other_conditions,
        tensor_parallel_with_fsdp2,
        tensor_parallel_switches,
        tensor_parallel_without_memory,
        tensor_parallel_compiled,
        tensor_parallel_checkpointed,
        tensor_parallel_whole_activations,
        tensor_parallel_whole_and_frozen,
        tensor_parallel_whole_and_packed,
        tensor_parallel_whole_and_left_to_dtensor,
        tensor_parallel_whole_and_unused,
        tensor_parallel_whole_and_distributed,
        tensor_parallel_whole_neighbors_part,
        tensor_parallel_whole_lists_part,
        tensor_parallel_whole_on_two_meshes,
        tensor_parallel_whole_under_autocast,
        tensor_parallel_whole_with_fsdp2,
        tensor_parallel_in_a_job,
        tensor_parallel_compiled_with_fsdp2,
        expert_parallel_layers,
        expert_parallel_refuses,
        expert_parallel_of_transformers,
        expert_parallel_in_a_job,
        expert_parallel_checkpointed,
        expert_parallel_with_fsdp2,
        expert_parallel_with_tensor_parallel,
        expert_parallel_in_bf16,
        memory_is_reported_and_given_back,
        two_levels_give_the_sequential_results,
        two_levels_left_to_the_library,
        two_levels_of_some_ranks,
        two_levels_under_ddp,
        two_levels_under_fsdp2,
        two_levels_where_the_estimate_says_so,
        two_levels_without_memory,
    )
}


def main(names: list[str]) -> int:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", device_id=DEVICE)
    else:
        meeting = f"file://{os.environ['MEETING_FILE']}"
        dist.init_process_group("gloo", meeting, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for name in names or SECTIONS:
        try:
            began = time.monotonic()
            SECTIONS[name]()
            if dist.get_rank() == 0:
                print(f"{name} took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            outcome = "ok"
        except Exception:
            outcome = f"failed\n{traceback.format_exc()}"
        outcomes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if dist.get_rank() == 0:
            wrong = [f"rank {rank} {each}" for rank, each in enumerate(outcomes) if each != "ok"]
            print(f"{name}: {'ok' if not wrong else wrong[0]}", flush=True)
        if any(each != "ok" for each in outcomes):  # a rank that failed left the section early, and waits for no one
            return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    wait_until_all_leave()
    sys.stdout.flush()
    os._exit(code)
