"""Commands read for `counterpoint check`: what they set, how they start the job, what they and their script show of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.doctor.command import ReadCommand, read_command, read_options
from counterpoint.doctor.script import read_script
from counterpoint.errors import JobContextError


def read(command: str, **environment: str) -> ReadCommand:
    return read_command(command.split(), environment)


def kinds(command: str) -> dict[str, str]:
    return {hint.kind: hint.where for hint in read(command).job.hints}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("A=1 B=x=y python train.py", {"KEPT": "1", "A": "1", "B": "x=y"}),
        ("env A=1 torchrun train.py", {"KEPT": "1", "A": "1"}),
        ("/usr/bin/env -u KEPT A=1 python train.py", {"A": "1"}),
        ("env --unset=KEPT python train.py", {}),
        ("env -i A=1 python train.py", {"A": "1"}),
        ("mpirun -np 16 -x A=1 -x PATH python train.py", {"KEPT": "1", "A": "1"}),
        ("srun --export=ALL,A=1,B=2 python train.py", {"KEPT": "1", "A": "1", "B": "2"}),
        ("nsys profile -o out env A=1 python train.py A=2", {"KEPT": "1", "A": "1"}),
    ],
)
def test_variables_that_a_command_sets_or_removes(command: str, expected: dict[str, str]) -> None:
    assert read(command, KEPT="1").environment == expected


@pytest.mark.parametrize(
    ("command", "programs", "script", "num_nodes", "num_processes"),
    [
        ("python train.py", ("python",), "train.py", None, None),
        ("python3.11 -u -X dev -W error train.py", ("python3.11",), "train.py", None, None),
        ("python -m pkg.train --x 1", ("python",), "pkg.train", None, None),
        ("torchrun train.py", ("torchrun",), "train.py", 1, None),
        ("/opt/bin/torchrun --standalone --nproc-per-node 4 train.py", ("torchrun",), "train.py", 1, 4),
        ("torchrun --nnodes=1:4 --nproc_per_node=gpu train.py --nnodes 9", ("torchrun",), "train.py", 4, None),
        ("torchrun --nnodes 2 -m pkg.train", ("torchrun",), "pkg.train", 2, None),
        ("python -m torch.distributed.run --nnodes 3 train.py", ("torchrun",), "train.py", 3, None),
        ("srun -N 4 --ntasks-per-node=8 python -u train.py", ("srun", "python"), "train.py", 4, 8),
        ("srun --nodes=2 torchrun --nproc-per-node 8 train.py", ("srun", "torchrun"), "train.py", 2, 8),
        ("accelerate launch --num_machines 2 --multi_gpu train.py", ("accelerate",), "train.py", 2, None),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed c.json", ("deepspeed",), "train.py", 2, 8),
        ("counterpoint run --plan p.toml -- torchrun train.py", ("counterpoint", "torchrun"), "train.py", 1, None),
        ("timeout 60 ncu --set full python train.py", ("timeout", "ncu", "python"), "train.py", None, None),
        ("./train.py --lr 1", ("train.py",), "./train.py", None, None),
        ("accelerate-launch --num_machines 2 train.py", ("accelerate-launch",), "train.py", 2, None),
        ("accelerate launch -m pkg.train --x 1", ("accelerate",), "pkg.train", None, None),
        ("fabric run --devices 2 --strategy fsdp kf/train.py a.py", ("fabric",), "kf/train.py", 1, None),
        ("/opt/bin/fabric run --num-nodes 4 train.py", ("fabric",), "train.py", 4, None),
        ("lightning run model --num_nodes=2 train.py", ("lightning",), "train.py", 2, None),
        ("tune run --nnodes 2 --nproc_per_node 4 full_finetune --config c", ("tune",), "full_finetune", 2, 4),
        ("tune run my/recipe.py --config c --nnodes 9", ("tune",), "my/recipe.py", 1, None),
        ("composer -n 8 train.py", ("composer",), "train.py", None, None),
        ("colossalai run --nproc_per_node 8 --hostfile h train.py", ("colossalai",), "train.py", None, 8),
        ("srun -N 2 fabric run --strategy ddp train.py", ("srun", "fabric"), "train.py", 2, None),
        ("nohup torchrun --nnodes 2 train.py", ("nohup", "torchrun"), "train.py", 2, None),
        ("docker run image/tune torchrun --nnodes 2 train.py", ("docker", "torchrun"), "train.py", 2, None),
        ("mylauncher --x=a.py -m 4 train.py other.py", ("mylauncher",), "train.py", None, None),
    ],
)
def test_how_a_job_is_started(
    command: str, programs: tuple[str, ...], script: str, num_nodes: int | None, num_processes: int | None
) -> None:
    job = read(command).job
    assert (job.programs, job.script) == (programs, script)
    assert (job.num_nodes, job.num_processes_per_node) == (num_nodes, num_processes)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun t.py --use-torch-fsdp2", {"fsdp2"}),
        ("torchrun t.py --use_megatron_fsdp", {"megatron_fsdp", "megatron"}),
        ("accelerate launch --use_fsdp t.py", {"fsdp"}),
        ("accelerate launch --parallelism_config_dp_shard_size 2 --parallelism_config_tp_size=1 t.py", {"fsdp"}),
        ("accelerate launch --parallelism_config_tp_size 2 --use_deepspeed t.py", {"tensor_parallel", "deepspeed"}),
        ("torchrun t.py --fsdp full_shard", {"fsdp"}),
        ("torchrun t.py --fsdp false", set()),
        ("fabric run --strategy fsdp t.py", {"fsdp"}),
        ("fabric run --strategy=deepspeed_stage_2 t.py", {"deepspeed"}),
        ("fabric run --strategy auto t.py", set()),
        ("python t.py fit --trainer.strategy lightning.pytorch.strategies.FSDPStrategy", {"fsdp1"}),
        ("python t.py --trainer.strategy ddp_find_unused_parameters_true", {"data_parallel"}),
        ("unknown-launcher --strategy fsdp t.py --use-torch-fsdp2", {"fsdp", "fsdp2"}),
        ("torchrun t.py --tensor-model-parallel-size 2", {"megatron", "megatron_tensor_parallel"}),
        ("torchrun t.py --tensor-model-parallel-size 1", {"megatron"}),
        ("torchrun t.py --context-parallel-size=4", {"megatron", "megatron_tensor_parallel"}),
        ("torchrun t.py --parallelism.enable_async_tensor_parallel", {"symmetric_memory"}),
        ("torchrun t.py --parallelism.enable_async_tensor_parallel=false", set()),
        ("torchrun t.py --cuda-graph-impl local", {"cuda_graph"}),
        ("torchrun t.py --cuda-graph-impl none", set()),
        ("torchrun --nproc-per-node 8 t.py", set()),
    ],
)
def test_parallelism_that_options_show(command: str, expected: set[str]) -> None:
    assert set(kinds(command)) == expected


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ('{"zero_optimization": {"stage": 2}}', "stage 2 in ds.json"),
        ('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1, "overlap_comm": false}}', "stage 1 in ds.json"),
        ('{"zero_optimization": {"stage": 2, "overlap_comm": true}}', None),
        ('{"zero_optimization": {"stage": 2, "overlap_comm": "auto"}}', None),
        ('{"zero_optimization": {"stage": "auto"}}', None),
        ('{"zero_optimization": {"stage": 3}}', None),
        ("{}", None),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "deepspeed t.py --deepspeed --deepspeed_config {}",
        "torchrun t.py --deepspeed={}",
        "accelerate launch --use_deepspeed --deepspeed_config_file {} t.py",
    ],
)
def test_reductions_without_overlap_in_deepspeeds_configuration(
    config: str, where: str | None, command: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(config)
    found = [hint.where for hint in read(command.format(path)).job.hints if hint.kind == "zero_without_overlap"]
    assert found == ([] if where is None else [where])


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file"), ("{", "does not hold DeepSpeed's configuration"), ('{"zero_optimization": 2}', "`object`")],
)
def test_a_configuration_of_deepspeed_that_cannot_be_read_is_unknown(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    (unknown,) = [line for line in read(f"torchrun t.py --deepspeed {path}").unknown if "--deepspeed" in line]
    assert reason in unknown


def test_options_after_the_script_are_the_jobs_and_those_before_are_not() -> None:
    assert read("torchrun --nnodes 2 t.py --lr 0.1 --bf16 --seed=3").job.options == {
        "--lr": "0.1",
        "--bf16": "",
        "--seed": "3",
    }


def test_signs_of_a_script_come_with_their_first_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.distributed.fsdp import fully_shard\n"
        "import torch.distributed._symmetric_memory as symm_mem\n"
        "model = torch.compile(model, mode='reduce-overhead')\n"
        "fully_shard(model)\n"
        "options = Options(is_high_priority_stream=True)\n"
        "torch._C._set_sm_carveout_experimental(8)\n"
        "options.config.cta_policy = 2\n"
        "# DistributedDataParallel is only spoken of here\n"
    )
    assert kinds(f"torchrun {script}") == {
        "fsdp2": "train.py:1",
        "symmetric_memory": "train.py:2",
        "cuda_graph": "train.py:3",
        "high_priority": "train.py:5",
        "sm_carveout": "train.py:6",
        "zero_cta": "train.py:7",
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Fabric(strategy='fsdp')", {"fsdp"}),
        ("L.Trainer(strategy='fsdp_cpu_offload')", {"fsdp"}),
        ("Trainer(strategy='deepspeed_stage_3' if large else 'ddp')", {"deepspeed", "data_parallel"}),
        ("strategy = 'ddp_spawn'", {"data_parallel"}),
        ("Trainer(**{'strategy': 'fsdp'})", {"fsdp"}),
        ("Trainer(strategy='auto')", set()),
        ("Trainer(strategy=FSDPStrategy(sharding_strategy='FULL_SHARD'))", {"fsdp1"}),
        ("from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy", {"data_parallel", "deepspeed"}),
        ("ModelParallelStrategy(parallelize)", {"tensor_parallel"}),
        ("strategies.ModelParallelStrategy(parallelize, data_parallel_size=2)", {"tensor_parallel", "fsdp2"}),
        ("LLM(data_parallel_size=2)", set()),
        ("from accelerate import FullyShardedDataParallelPlugin as Plugin", {"fsdp"}),
        ("ParallelismConfig(dp_shard_size=args.shards, tp_size=1, cp_size=None)", {"fsdp"}),
        ("ParallelismConfig(tp_size=2, cp_size=2)", {"tensor_parallel", "context_parallel"}),
        ("Accelerator(kwargs_handlers=[DistributedDataParallelKwargs()])", {"data_parallel"}),
        ("TrainingArguments(fsdp='full_shard auto_wrap')", {"fsdp"}),
        ("TrainingArguments(fsdp=True, deepspeed='ds.json')", {"fsdp", "deepspeed"}),
        ("TrainingArguments(fsdp='', deepspeed=None)", set()),
        ("TrainingArguments(fsdp=False, fsdp_config=None)", set()),
        ("Model.from_pretrained(name, tp_plan='auto')", {"tensor_parallel"}),
        ("DistributedConfig(fsdp_size=4)", {"fsdp2"}),
        ("fsdp: bool = True", {"fsdp"}),
        ("fsdp = args.fsdp", set()),
        ("training.shard_model(model=model)", {"fsdp2"}),
        ("inference.shard_model(model)", set()),
        ("deepspeed.initialize(model=model)", {"deepspeed"}),
        ("from torch.distributed.tensor.parallel import parallelize_module", {"tensor_parallel"}),
        ("from torch.distributed.pipelining import PipelineStage", {"pipeline_parallel"}),
        ("from torch.distributed.tensor.experimental import context_parallel", {"context_parallel"}),
    ],
)
def test_parallelism_that_a_script_shows_by_the_names_of_libraries(source: str, expected: set[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    found = read_script(str(script))
    assert not isinstance(found, str)
    assert {hint.kind for hint in found.hints} == expected


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import os, torch\nfrom torch.distributed import fsdp\nfrom pathlib import Path\n", None),
        (
            "import lightning as L\ndef f():\n    from model.layers import Block\nimport lightning.fabric\n",
            "lightning, model",
        ),
        ("from . import plan\nfrom .parallelism import parallelize\n", "., .parallelism"),
    ],
)
def test_imports_that_were_not_read_are_named(source: str, imported: str | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    line = f"what train.py imports: only the script itself was read, not {imported}"
    assert read(f"torchrun {script}").unknown == (() if imported is None else (line,))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"import torch\ndef broken(:\n", ", line 2)"),
        (b"\x00\xff", ""),
        (b"x = 'caf\xe9'\n", "codec can't decode byte 0xe9"),
    ],
)
def test_a_script_that_cannot_be_parsed_is_said_to_be_unread_with_the_reason(
    tmp_path: Path, content: bytes, why: str
) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    (line,) = read(f"python {script}").unknown
    assert f"the script {script} was not read: it" in line
    assert why in line


def test_a_module_of_the_current_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in ((tmp_path, "train.py"), (tmp_path / "pkg", "train.py"), (tmp_path / "whole", "__main__.py")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("from torch.distributed.fsdp import fully_shard")
    for module in ("train", "pkg.train", "whole"):
        assert {hint.kind for hint in read(f"torchrun -m {module}").job.hints} == {"fsdp2"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("bash train.sh", "shell scripts are not read"),
        ("python -m pkg.train", "module pkg.train was not read"),
        ("python -c pass", "code that python -c runs"),
        ("torchrun --no-python ./a.out", "torchrun --no-python"),
        ("srun ./a.out", "what srun starts"),
        ("python nowhere.py", "script nowhere.py was not read"),
        ("tune run full_finetune_distributed --config c", "script full_finetune_distributed was not read"),
        ("tune download model", "how tune starts a job is not known here, so what it starts was not read"),
        ("litgpt pretrain model", "how litgpt starts a job is not known here"),
        ("uv run torchrun train.py", "how uv starts a job is not known here, so train.py was taken for its script"),
        ("axolotl train config.yml", "the file config.yml was not read"),
        ("tune run r --config=c.yaml", "the file c.yaml was not read"),
        ("accelerate launch --config_file c.yaml t.py", "the file c.yaml was not read"),
        ("accelerate launch t.py", "what `accelerate config` saved"),
        ("accelerate launch -m pkg.train", "module pkg.train was not read"),
        ("composer -n 8 -c ./a.out", "what composer starts: none of its words ends in .py"),
    ],
)
def test_what_cannot_be_seen_of_a_command_is_said(command: str, expected: str) -> None:
    assert any(expected in line for line in read(command).unknown)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py", ("python", "/own")),
        ("A=1 ./bin/train.py", ("./bin/train.py", "/own")),
        ("PATH=/other torchrun train.py", ("torchrun", "/other")),
        ("env PATH=/other timeout 60 torchrun train.py", ("timeout", "/other")),
        ("srun --export=PATH=/other python train.py", ("srun", "/own")),
        ("mpirun -x PATH=/other python train.py", ("mpirun", "/own")),
        ("timeout 60 env PATH=/other python train.py", ("timeout", "/own")),
        ("/usr/bin/env -i python train.py", ("python", None)),
    ],
)
def test_the_first_program_comes_with_the_path_it_is_looked_for_in(command: str, expected: tuple[str, str | None]) -> None:
    found = read(command, PATH="/own")
    assert (found.first_word, found.first_path) == expected


@pytest.mark.parametrize("command", ["A=1", "env A=1", "env -i", ""])
def test_a_command_without_a_program_is_refused(command: str) -> None:
    with pytest.raises(JobContextError, match="names no program"):
        read(command)


@pytest.mark.parametrize("words", [[""], ["A=1", ""], ["env", ""], ["", "python", "train.py"]])
def test_an_empty_word_is_no_program(words: list[str]) -> None:
    with pytest.raises(JobContextError, match="names no program"):
        read_command(words, {})


def test_an_option_of_env_that_changes_the_meaning_is_refused() -> None:
    with pytest.raises(JobContextError, match="'-S' is not supported"):
        read("env -S python train.py")


WORDS = st.sampled_from(
    [
        "env",
        "-u",
        "A=1",
        "srun",
        "-N",
        "2",
        "torchrun",
        "--nnodes",
        "--nnodes=2",
        "-m",
        "python",
        "-c",
        "t.py",
        "--",
        "-x",
        "",
        "ncu",
        "=",
        "fabric",
        "tune",
        "run",
        "accelerate",
        "launch",
        "c.yaml",
    ]
)


@given(st.lists(WORDS | st.text(max_size=5), max_size=10))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    try:
        found = read_command(words, {"A": "0"})
    except JobContextError:
        return
    assert found.job.programs


@given(st.lists(WORDS, max_size=8))
def test_options_are_read_from_any_words(words: list[str]) -> None:
    assert all(name.startswith("--") for name in read_options(words))
