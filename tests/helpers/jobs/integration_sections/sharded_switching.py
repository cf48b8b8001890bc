"""FSDP2 in the ways that frameworks use it, and changing between copies and the library between steps."""

import functools
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from counterpoint import ops
from counterpoint.integrations import fsdp2
from integration_sections.comparing import DEVICE, assert_close, assert_equal, refused, said_of, without_memory_above
from integration_sections.layered import Deep, given_to, gradients
from integration_sections.sharded_data_parallel import sharded

Prepare = Callable[[Deep], object]
NUM_STEPS = 4


def trained(
    model: Deep, before_step: Callable[[int], object] = lambda _: None, num_micro_steps: int = 1
) -> list[torch.Tensor]:
    """The parameters after some steps, each of several micro-batches of which the last synchronizes gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(NUM_STEPS):
        before_step(step)
        for micro in range(num_micro_steps):
            model.set_requires_gradient_sync(micro == num_micro_steps - 1)
            given = given_to(dist.get_rank() + 10 * step + 1000 * micro, width=model.last.in_features)
            model(given).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


def everywhere(model: Deep, call: str, *arguments: object) -> None:
    """Call a setting on every FSDP module."""
    for module in (*model.layers, model):
        getattr(module, call)(*arguments)


def fsdp2_as_frameworks_use_it() -> None:
    """Every way within rounding of stock FSDP2, and nothing left to the library."""
    bf16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    fp16 = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
    ways: dict[str, tuple[dict[str, object], int, Prepare, float]] = {
        "fp32 reductions": (bf16, 1, lambda _: None, 1e-4),
        "fp16 reductions": (fp16, 1, lambda _: None, 2e-2),
        "accumulation": ({}, 3, lambda _: None, 1e-4),
        "always gathered": ({"reshard_after_forward": False}, 2, lambda _: None, 1e-4),
        "prefetches": ({}, 1, _prefetch_all, 1e-4),
        "async gathers": ({}, 1, lambda model: everywhere(model, "_set_unshard_async_op", True), 1e-4),
        "compiled": ({}, 1, _compile_layers, 1e-4),
    }
    torch._dynamo.reset()
    for name, (options, num_micro_steps, prepare, limit) in ways.items():
        results = []
        for is_ours in (False, True):
            model = sharded(**options)
            prepare(model)
            in_use = fsdp2.use_copy_engines(model, least_part_bytes=0) if is_ours else None
            results.append(trained(model, num_micro_steps=num_micro_steps))
        assert in_use is not None
        assert in_use.num_by_copies > 3 * NUM_STEPS, name
        assert in_use.num_by_library == 0, (name, str(in_use))
        assert ("(3 buffers)" in str(in_use)) == (name != "prefetches"), (name, str(in_use))
        assert_close(results[1], results[0], limit)


def fsdp2_in_place() -> None:
    """Parameters are gathered where they are, and gradients sent from where they are: within rounding of stock FSDP2, the
    same bits twice, and the same as through flat buffers.
    """
    bf16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    narrow = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    ways: dict[str, tuple[dict[str, object], Prepare, float]] = {
        "as it is": ({}, lambda _: None, 1e-4),
        "wider sums": (bf16, lambda _: None, 1e-4),
        "narrower sums": (narrow, lambda _: None, 2e-2),
        "always gathered": ({"reshard_after_forward": False}, lambda _: None, 1e-4),
        "fewer ranks after forward": ({"reshard_after_forward": 2}, lambda _: None, 1e-4),
        "prefetches": ({}, _prefetch_all, 1e-4),
        "async gathers": ({}, lambda model: everywhere(model, "_set_unshard_async_op", True), 1e-4),
    }
    num_ranks = dist.get_world_size()
    for name, (options, prepare, limit) in ways.items():
        if name == "fewer ranks after forward" and (num_ranks <= 2 or num_ranks % 2):
            continue
        results = []
        for least_piece_bytes in (None, 0, *((0, 1 << 40) if name in ("as it is", "wider sums") else ())):
            model = sharded(width=36, **options)
            prepare(model)
            if least_piece_bytes is not None:
                sizes = {"least_part_bytes": 0, "least_piece_bytes": least_piece_bytes}
                in_use = fsdp2.use_copy_engines(model, **sizes)
            results.append(trained(model, num_micro_steps=2))
            if least_piece_bytes == 0:
                assert in_use.num_by_library == 0, name
                assert all(each.num_in_place == each.num_by_copies > 0 for each in in_use.gather_tallies), in_use
                (reduces,) = in_use.reduce_tallies
                # the last layer has 7 outputs, which no number of ranks divides
                assert 4 * NUM_STEPS <= reduces.num_in_place <= reduces.num_by_copies - NUM_STEPS, (name, in_use)
        stock, ours, *alike = results
        assert_close(ours, stock, limit, name)
        for each in alike:
            assert_equal(each, ours)
    model = sharded(width=36)
    in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, least_piece_bytes=0)
    given = given_to(dist.get_rank(), width=36)
    wanted = gradients(sharded(width=36), given)
    assert_close(gradients(model, given), wanted, 1e-5)
    model.zero_grad()
    model.unshard()
    in_use.undo()  # while something is gathered
    assert_equal(gradients(model, given), wanted)
    with torch.inference_mode():  # of a model that only runs in it
        results = []
        for is_ours in (False, True):
            model = sharded(width=36)
            in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, least_piece_bytes=0) if is_ours else in_use
            results.append([model(given), model(given)])
    assert_equal(results[1], results[0])
    assert all(each.num_in_place == each.num_by_copies > 0 for each in in_use.gather_tallies), in_use
    refused(lambda: fsdp2.use_copy_engines(sharded(), least_piece_bytes=-1), "least_piece_bytes .* 0 or more; found -1")


def _prefetch_all(model: Deep) -> None:
    model.set_modules_to_forward_prefetch(list(model.layers))
    model.layers[3].set_modules_to_backward_prefetch([model.layers[2], model.layers[1]])


def _compile_layers(model: Deep) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def fsdp2_divides_gradients_as_told() -> None:
    """A factor of the user's, which torchtitan always sets: it is an opaque operation, and gloo cannot do it at all."""
    num_ranks = dist.get_world_size()
    given = given_to(dist.get_rank())
    for reduce_dtype in (torch.float32, torch.float16, torch.bfloat16):
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
        mean = gradients(sharded(**options), given)
        for factor in (3.0, float(num_ranks)):
            for is_sum in (False, True):
                model = sharded(**options)
                everywhere(model, "set_gradient_divide_factor", factor)
                everywhere(model, "set_force_sum_reduction_for_comms", is_sum)
                in_use = fsdp2.use_copy_engines(model, least_part_bytes=0)
                found = gradients(model, given)
                limit = 1e-5 if reduce_dtype is torch.float32 else 3e-2
                assert_close(found, [each * (num_ranks / factor) for each in mean], limit)
                assert in_use.num_by_library == 0


def fsdp2_on_a_mesh_of_two_dimensions() -> None:
    """HSDP: shards are gathered and reduced by copies, replicas stay the library's; also with fewer ranks after forward."""
    num_ranks = dist.get_world_size()
    if num_ranks % 2:
        return
    mesh = init_device_mesh(DEVICE.type, (num_ranks // 2, 2), mesh_dim_names=("replicas", "shards"))
    fewer = {"reshard_after_forward": 2} if num_ranks > 2 else {}
    for options in ({"mesh": mesh}, fewer):
        results = []
        for is_ours in (False, True):
            model = sharded(**options)
            in_use = fsdp2.use_copy_engines(model, least_part_bytes=0) if is_ours else None
            results.append(trained(model, num_micro_steps=2))
        assert in_use is not None
        assert in_use.num_by_copies > 3 * NUM_STEPS
        assert in_use.num_by_library == 0
        assert_close(results[1], results[0], 1e-4)


def fsdp2_switches_between_steps() -> None:
    """Off is a bare job to the bit; on and off by turns is one within rounding, whatever is gathered at that moment."""
    for options in (
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ):
        bare = trained(sharded(**options), num_micro_steps=2)
        model = sharded(**options)
        in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, is_on=False)
        assert_equal(trained(model, num_micro_steps=2), bare)
        assert not in_use.is_on
        assert in_use.num_by_copies == 0
        assert in_use.num_by_library > 0
        model = sharded(**options)
        in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, is_on=False)
        ways = ((True, False), (False, True), (False, False), (True, True))
        counts = []

        def switch(step: int) -> None:
            in_use.use(*ways[step])  # noqa: B023  called within this turn
            counts.append(in_use.num_by_copies)  # noqa: B023  as above
            if step == 2:  # between steps something may be gathered still
                model.unshard()  # noqa: B023  as above

        assert_close(trained(model, switch, 2), bare, 1e-4)
        assert counts[0] == 0
        assert counts[1] > 0
        assert counts[2] == counts[3] > counts[1]
        assert in_use.num_by_copies > counts[3]
        assert in_use.num_bytes > 0
        words = str(in_use)
        assert words.startswith("5 groups of parameters; by copies: gathers are on (3 buffers), reductions are on"), words
        assert "switched off" in words


def fsdp2_switches_while_parameters_are_gathered() -> None:
    """A job of two models may step the other one between this one's forward pass and its backward pass. What copies gathered
    before, and what the library gathers after, is freed once it is no longer used.
    """
    results = []
    for is_ours in (False, True):
        model = sharded(width=36)
        for layer in model.layers[1::2]:
            layer.set_reshard_after_forward(False)
        in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, least_piece_bytes=0) if is_ours else None
        found = []
        for step in range(6):
            loss = model(given_to(dist.get_rank() + 10 * step, width=36)).pow(2).mean()
            if in_use is not None:
                in_use.use(gathers=step % 2 == 1, reduces=step % 3 == 1)
            loss.backward()
            found += [each.grad.full_tensor() for each in model.parameters()]
            model.zero_grad()
        results.append(found)
    assert_close(results[1], results[0], 1e-4)
    assert in_use is not None
    assert all(each.num_in_place > 0 for each in in_use.gather_tallies), in_use


def fsdp2_refuses_a_second_call() -> None:
    model = sharded()
    in_use = fsdp2.use_copy_engines(model, least_part_bytes=0)
    refused(
        lambda: fsdp2.use_copy_engines(model),
        r"was already called for modules of this model. Switch the object that it returned",
    )
    refused(lambda: in_use.use(gathers=1, reduces=True), "gathers must be True or False; found 1")
    in_use.undo()
    refused(lambda: in_use.use(gathers=True, reduces=True), "undo.. has restored the model's own collectives")
    assert fsdp2.use_copy_engines(model, least_part_bytes=0).is_on


def fsdp2_undoes_modules_that_share_a_group() -> None:
    """Modules that `fully_shard` takes as a list have one group of parameters, which is taken over and given back once."""
    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = Deep(36).to(DEVICE)
        fully_shard(list(model.layers))
        fully_shard(model)

        def turn(step: int) -> None:
            if step in (0, 2):
                in_use.append(fsdp2.use_copy_engines(model, least_part_bytes=0, least_piece_bytes=0))  # noqa: B023
                assert str(in_use[-1]).startswith("2 groups of parameters"), in_use[-1]  # noqa: B023
            elif step == 1:
                in_use[-1].undo()  # noqa: B023  called within this turn

        in_use: list[fsdp2.CopyEnginesInUse] = []
        results.append(trained(model, turn if is_ours else lambda _: None))
    assert_close(results[1], results[0], 1e-4)


class DoublingGather(DefaultAllGather):
    """A collective of the job's own, which changes what it gathers."""

    def __call__(self, output_tensor: torch.Tensor, *arguments: object, **named: object) -> dist.Work | None:
        work = super().__call__(output_tensor, *arguments, **named)
        if work is not None:
            work.wait()
        output_tensor *= 2
        return None


def fsdp2_leaves_collectives_of_the_job() -> None:
    """A module whose collectives the job has set keeps them, whether it sets them before or afterwards."""
    results = []
    for is_ours in (False, True):
        model = sharded()
        model.layers[1].set_custom_all_gather(DoublingGather())
        in_use = fsdp2.use_copy_engines(model, least_part_bytes=0) if is_ours else None
        model.layers[2].set_custom_all_gather(DoublingGather())
        results.append(trained(model))
    assert_close(results[1], results[0], 1e-4)
    assert in_use is not None
    assert "layers.1 is left alone: the job has set a collective of its own, DoublingGather" in str(in_use)
    in_use.undo()
    assert isinstance(fsdp2._parameters_of(model.layers[2])[0]._all_gather_comm, DoublingGather)
    alone = fully_shard(nn.Linear(8, 8))
    alone.set_custom_all_gather(DoublingGather())
    refused(lambda: fsdp2.use_copy_engines(alone), "the root: the job has set a collective of its own, DoublingGather")


def fsdp2_keeps_no_model() -> None:
    """A model that the job drops is gone, with what was gathered of it, although what was returned is kept."""
    model = sharded(width=36)
    in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, least_piece_bytes=0)
    trained(model)
    (group,) = fsdp2._parameters_of(model.layers[0])
    gathered = group.fsdp_params[0].all_gather_outputs[0]
    assert gathered.untyped_storage().size() > 0, "of two groups it stays, for a while"
    parameters = [ref(each) for each in model.parameters()]
    del model, group
    gc.collect()
    assert not any(each() is not None for each in parameters)
    assert gathered.untyped_storage().size() == 0
    in_use.undo()


def fsdp2_two_models() -> None:
    """A second model in the process, called within the first one's steps, has buffers of its own."""
    bare = trained(sharded())
    student, teacher = sharded(), sharded()
    states = [fsdp2.use_copy_engines(each, least_part_bytes=0, num_buffers=2) for each in (student, teacher)]
    for layer in student.layers:  # while the student's layers are gathered
        layer.register_forward_pre_hook(lambda *_: _run_without_gradients(teacher))
    assert_close(trained(student), bare, 1e-4)
    assert all(state.num_by_copies > NUM_STEPS for state in states)
    assert all(state.num_by_library == 0 for state in states)


def _run_without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model(given_to(0))


def fsdp2_checkpoints() -> None:
    """Sharded and full states are those of the same parameters without us, and a bare job goes on from them alike."""
    model, other = sharded(), sharded()
    in_use = fsdp2.use_copy_engines(model, least_part_bytes=0)
    trained(model)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    saved = get_model_state_dict(model)
    assert list(saved) == list(get_model_state_dict(other))
    checkpoint.save({"model": saved}, checkpoint_id=Path(folder[0]) / "state")
    loaded = {"model": get_model_state_dict(other)}
    checkpoint.load(loaded, checkpoint_id=Path(folder[0]) / "state")
    set_model_state_dict(other, loaded["model"])
    assert_equal([each.full_tensor() for each in other.parameters()], [each.full_tensor() for each in model.parameters()])
    in_use.use(gathers=False, reduces=False)
    assert_equal(trained(model), trained(other))


def fsdp2_without_memory() -> None:
    """One rank has no memory in mid-job: all go on with the library, and say so once for gathers and once for reductions."""
    ops.release()
    bare, last = trained(sharded()), dist.get_world_size() - 1
    model = sharded()
    in_use = fsdp2.use_copy_engines(model, least_part_bytes=0)
    switch_on = functools.partial(in_use.use, gathers=True, reduces=True)
    with without_memory_above(2048, on_rank=last):
        said = said_of(lambda: assert_close(trained(model, lambda _: switch_on()), bare, 1e-4))
    assert len(said) == (2 if dist.get_rank() == 0 else 0), said
    assert all(f"Rank {last} of the group" in line for line in said)
    assert in_use.num_by_library > 3 * NUM_STEPS
    ops.release()
