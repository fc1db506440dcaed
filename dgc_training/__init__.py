"""What any trainer needs: configs, schedules, data, evaluation, checkpoints, logs. Knows no algorithm."""
