"""Checkpoints that are either complete or not there.

    folder/step_00000040/         as torch.distributed.checkpoint writes it
        .metadata  __0_0.distcp   the model, the optimizer, and each rank's own states
        complete.json             written last: the files, their digests, and the run they are of
    folder/.writing_00000045.*/   one that is being written, or whose writing was broken off

A checkpoint is written to a folder of its own, checked, and renamed. The one before is there until
then, so that at any time one of the two can be loaded. Jobs that share a folder do not meet: names
end in those of the run and the process until they are published. Loading runs no code: files are
read as weights only, and torch's pickled index may only have types that belong there.

    save_and_load.py     what users call
    saving.py            beginning of a save that goes on beside training: copies are taken
    planning.py          what each rank writes in such a save, and the copies
    writing.py           what ranks write, and what rank 0 makes of that
    pending.py           the thread that writes, and who waits for it
    reports.py           what the threads of ranks tell each other
    model_state.py       what is saved of the model and the optimizer, and room to read it into
    optimizer_state.py   likewise, of the optimizer: parameters without state stay so
    rank_state.py        each rank's own states: generators, buffers, and objects that users give
    folder.py            the disk
    manifest.py          complete.json: files and their digests
    reader.py            reading without running code
    objects.py           what is no tensor, as bytes
    on_ranks.py          errors, which all ranks raise
"""
