"""Adapters to trainers of other projects, one module for each: `dgc.integrations.transformers`, `.lightning` and
`.accelerate`. Each imports its library, so `import dgc.integrations` imports none. They call `dgc.ddp.compress` in
the right place, and save what each rank has not sent yet beside the trainer's own checkpoints.
"""
