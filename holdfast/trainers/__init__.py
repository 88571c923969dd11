"""For scripts that do not own their training loop: one module for each trainer that people use.

Each module imports its library, so import the one that you need: `holdfast.trainers.huggingface`,
`holdfast.trainers.accelerate`, `holdfast.trainers.lightning`, `holdfast.trainers.deepspeed`,
`holdfast.trainers.torchtitan`, `holdfast.trainers.megatron`.
"""
