"""Adapters to trainers of other projects, one module for each: `dgc.integrations.transformers`, `.lightning`,
`.accelerate` and `.torchtitan`. Each but the last imports its library, and `import dgc.integrations` none. They
call `compress` of `dgc.ddp` or `dgc.fsdp` in the right place, and save what each rank has not sent yet with the
trainer's own checkpoints.
"""
