"""Exposed communication in traces of torch.profiler, and its reasons: `autoshard explain`.

    reader -> lanes (device, host) -> exposure -> costs, reasons -> report -> command

Each module imports only those left of it; `intervals` and `names` are for all.
"""
