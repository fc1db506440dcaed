"""Quality with compression: runs of one task, all methods compared with the first, same steps and learning rate.

    python -m benchmarks.convergence --task digits --ranks 4 --folds 5 --methods dense dgc
    python -m benchmarks.convergence --simulate --task pysource --methods dense dgc --figure quality.svg

digits has folds: the test images of a fold are not used to train its model, and over all folds every image is
tested once. The language tasks have one test set, and a run for each seed. The differences to the first method are
paired by fold or seed. The quality is that of the last epoch, so no epoch is selected by its test data: accuracy
or exact match in percent, or bits per character, of which fewer are better.

The output has each run, the paired difference to the first method with its standard error, the wire bytes of one
rank compared with a dense fp32 all-reduce (docs/bytes.md), the seconds of training, and a last line of JSON.
--figure draws quality against bytes, in the format that the file's extension names. --keep FOLDER keeps the runs:
the same command, started again, trains only those that are missing.

With --simulate the ranks are threads of one process, which exchange the same messages without Horovod and MPI. One
run at a time uses each core. Many runs on few cores then take a third of the time, and the seconds of a run are
those of all its ranks one after the other. AD-PSGD cannot be simulated.
"""
