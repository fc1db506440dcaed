"""Methods of dgc.contrib: one file per method, stacked after an experiment."""
