"""Artefacts: compiled steps as files, made by one process and loaded by all ranks.

From below: what is read of a traced call, and compared before it runs (`guards.py`, `sources.py`,
`facts.py`); graphs and their call as data (`graphs.py`, `entry.py`); the folder, with a digest of
each file (`folder.py`); how they are made (`make.py`) and loaded (`load.py`).
"""
