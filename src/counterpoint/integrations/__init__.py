"""Copy engines and operators for existing models: DDP's gradient buckets (`ddp`), FSDP2's parameters and gradients
(`fsdp2`), sequence-parallel linears of DTensor models (`tensor_parallel`). A training script changes by one call.

Each module needs torch and is imported by name: `from counterpoint.integrations import ddp`.
"""
