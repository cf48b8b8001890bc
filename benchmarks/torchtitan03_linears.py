"""What `tensor_parallel.overlap` makes of a step of torchtitan 0.3.0's Llama 3, on the GPUs at hand; as JSON.

    pip install --no-deps --target DIR torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser typeguard
    torchrun --nproc-per-node 2 -m benchmarks.torchtitan03_linears --torchtitan DIR -o torchtitan03_tp_2x_h200.json
    torchrun --nproc-per-node 2 -m benchmarks.torchtitan03_linears --torchtitan DIR --cpu -o FILE

The model is the 8B flavor (dim 4,096, 32 heads, 8 of keys, hidden 14,336) with 4 layers and 32,768 words, tensor parallel
over all ranks with sequence parallelism, and `JOB` says how it is trained, on 1 x 8,192 random words in a step.
`benchmarks.torchtitan03_model` builds it, with stand-ins for what torch 2.11 lacks, and `benchmarks.torchtitan03_steps` says
what is compared and timed. torchtitan wraps the layers in FSDP2 of one rank for mixed precision, as its trainer does.
`--cpu` has small sizes, and shows only that the benchmark runs; torchtitan imports triton there, too.
"""

import sys

from benchmarks.torchtitan03_model import Built, Sizes, build_tensor_parallel
from benchmarks.torchtitan03_steps import Blocks, Job, join, measuring_conditions, parser_of, run
from counterpoint.cuda.ranks import run_and_leave
from counterpoint.integrations import tensor_parallel

JOB = (
    "Llama 3 of torchtitan, random words, tensor parallel over all ranks with sequence parallelism, spmd_backend "
    "{}, bf16 with fp32 parameters, {}, no activation checkpointing, PyTorch's attention, AdamW (fused), "
    "gradients clipped; blocks of {} steps off/on/on/off, each after {} of warm-up; ms of rank 0"
)
ON_GPUS = Sizes("8B", layers=4, words=32768, sequences=1, tokens=8192), Blocks(rounds=3, steps=10, warm_ups=5)
ON_CPUS = Sizes("debugmodel", layers=2, words=2048, sequences=1, tokens=128), Blocks(rounds=1, steps=2, warm_ups=1)


def kind_of(name: str) -> str:
    """The kind of a parameter."""
    return next((kind for kind in ("attention_norm", "attention", "feed_forward") if kind in name), "others")


def shapes_of(built: Built, sizes: Sizes) -> dict[str, int]:
    config, layer = built.config, built.config.layers[0]
    return {
        "layers": len(config.layers),
        "dim": config.dim,
        "words": config.vocab_size,
        "heads": layer.attention.n_heads,
        "heads_of_keys": layer.attention.n_kv_heads or layer.attention.n_heads,
        "hidden": layer.feed_forward.w1.out_features,
        "sequences": sizes.sequences,
        "tokens_per_sequence": sizes.tokens,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, help="of the model; 4 if not given, 2 with --cpu")
    parser.add_argument("--compile", action="store_true", help="compile each layer, both ways")
    parser.add_argument("--async-tp", action="store_true", help="compiled, with PyTorch's async tensor parallelism")
    options = parser.parse_args()
    sys.path[:0] = [str(folder.resolve()) for folder in options.torchtitan]
    device = join(has_gpus=not options.cpu)
    sizes, blocks = ON_CPUS if options.cpu else ON_GPUS
    sizes = sizes._replace(layers=options.layers or sizes.layers)
    is_compiled = options.compile or options.async_tp
    built = build_tensor_parallel(sizes, device, options.backend, is_compiled=is_compiled, is_async=options.async_tp)
    job = Job(built, sizes, device)
    how = "compiled with async tensor parallelism" if options.async_tp else "compiled" if is_compiled else "eager"
    words = JOB.format(options.backend, how, blocks.steps, blocks.warm_ups)
    stated = measuring_conditions(built, shapes_of(built, sizes), words, device)
    run(job, blocks, tensor_parallel.overlap, kind_of=kind_of, stated=stated, output=options.output)


if __name__ == "__main__":
    run_and_leave(main)
