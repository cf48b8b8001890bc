"""One rank of a Hugging Face Llama that transformers itself spreads over the ranks (`tp_plan="auto"`); it does not know us.

    torchrun --nproc-per-node 2 -m benchmarks.transformers_job --steps 300
    torchrun --nproc-per-node 2 -m benchmarks.transformers_job --turns 8 --compile -o FILE

6 layers, hidden size 4,096, 32 heads, 8 key-value heads, 32,000 words, 2 sequences of 4,096 tokens, bf16, plain SGD.
Needs transformers, which the benchmarks do not install: pip install transformers. Weights are random: the configuration
is saved to a folder, and the model is made from there, because transformers shards what it loads.

With `--turns` it takes the two lines of `tensor_parallel.overlap`, and runs bare and overlapped in the order ABBA: two
steps, then ten that are timed together.

With `--serve` a step is a forward pass over the prompts and nothing is trained. With `--new-tokens N` it also generates N
tokens for each prompt. Each step is marked, as `counterpoint run` asks of a job without an optimizer.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.jobs.stock_jobs import print_last_half

STEPS_PER_TIME = 10
WARM_UPS = 5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--turns", type=int, help="turns of both ways in one process, instead of --steps")
    parser.add_argument("--compile", action="store_true", help="compile the whole model")
    parser.add_argument("--serve", action="store_true", help="run prompts through the model instead of training")
    parser.add_argument("--new-tokens", type=int, default=0, help="with --serve, tokens to generate for each prompt")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.steps < STEPS_PER_TIME:
        parser.error(f"--steps is {STEPS_PER_TIME} or more, since so many are timed together; found {options.steps}")
    if options.turns is not None and options.turns < 4:
        parser.error(f"--turns is 4 or more, so that each way is first as often as second; found {options.turns}")
    if options.new_tokens and not options.serve:
        parser.error("--new-tokens needs --serve, since training generates no tokens")
    return options


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    """A Llama with random weights, the same on all ranks, as transformers spreads it."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  not for --help

    kind = torch.bfloat16 if options.device == "cuda" else torch.float32
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=7 * options.width // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 128),
        num_key_value_heads=max(1, options.width // 512),
        vocab_size=32000,
        use_cache=False,
    )
    folder = [tempfile.mkdtemp(prefix="llama") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(kind).save_pretrained(folder[0])
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder[0], dtype=kind, tp_plan="auto")


def stepper(options: argparse.Namespace, model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    """What trains one step on one batch and returns its loss, or serves it and returns the mean of logits or tokens."""
    torch.manual_seed(1)
    batch = torch.randint(0, 32000, (options.batch, options.tokens), device=options.device)
    if options.compile:
        model.compile()
    if options.serve:
        return server(options, model, batch)
    # torch cannot update plain and distributed parameters, which tensor parallelism mixes, in one kernel
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def server(options: argparse.Namespace, model: torch.nn.Module, prompts: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What serves a batch of prompts."""
    import counterpoint  # noqa: PLC0415  a job that trains does not know Counterpoint

    lengths = {"min_new_tokens": options.new_tokens, "max_new_tokens": options.new_tokens}

    @torch.inference_mode()
    def step() -> torch.Tensor:
        if options.new_tokens:
            tokens = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), use_cache=True, pad_token_id=0, **lengths
            )
            shown = tokens[:, -options.new_tokens :].double().mean()
        else:
            shown = model(input_ids=prompts, logits_to_keep=1).logits.double().mean()
        counterpoint.step()
        return shown

    return step


def run_in_turns(options: argparse.Namespace) -> None:
    """Run bare and overlapped in turns; rank 0 prints and saves ms per step, and the loss or mean, of each turn."""
    from benchmarks.on_gpus import save  # noqa: PLC0415  the bare job does not know Counterpoint
    from counterpoint.integrations import tensor_parallel  # noqa: PLC0415

    model = make_model(options)
    overlapped = tensor_parallel.overlap(model)
    step = stepper(options, model)
    for is_on in (False, True):  # compiles, and records calls
        overlapped.use(is_on)
        for _ in range(WARM_UPS):
            step()
    ms: dict[str, list[float]] = {"bare": [], "overlap": []}
    shown: dict[str, list[float]] = {"bare": [], "overlap": []}
    for turn in range(options.turns):
        way = "overlap" if turn % 4 in (1, 2) else "bare"
        overlapped.use(way == "overlap")
        for _ in range(2):
            step().item()
        start = time.perf_counter()
        for _ in range(STEPS_PER_TIME):
            value = step()
        shown[way].append(value.item())  # waits for the GPU
        ms[way].append(round((time.perf_counter() - start) * 1000 / STEPS_PER_TIME, 3))
    if dist.get_rank() == 0:
        print(ms, shown, overlapped, sep="\n", flush=True)
    said = {"is_compiled": options.compile, "serves": options.serve, "new_tokens": options.new_tokens}
    save(options.output, [{**said, "ms": ms, "shown": shown, "counted": str(overlapped)}])


def run(options: argparse.Namespace) -> None:
    """Run one batch again and again; rank 0 prints losses or means, and the time of a step."""
    step = stepper(options, make_model(options))
    times_ms: list[float] = []
    start = time.perf_counter()
    for number in range(1, options.steps + 1):
        loss = step()
        if number % STEPS_PER_TIME == 0:
            shown = loss.item()
            now = time.perf_counter()
            times_ms.append((now - start) * 1000 / STEPS_PER_TIME)
            start = now
            if dist.get_rank() == 0:
                print(f"{'mean' if options.serve else 'loss'} {shown:.6f}", flush=True)
    if dist.get_rank() == 0:
        print_last_half(times_ms)


def main() -> None:
    options = parse()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    (run if options.turns is None else run_in_turns)(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
