"""The parts of a trainer: configs, schedules, data, evaluation, checkpoints, logs. No compression algorithm."""
