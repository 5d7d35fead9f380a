"""Decide buckets and their schedule by simulated time, under a memory budget.

    problem.py    input of a planner: compute in order, what it reads and makes
    costs.py      microseconds of a collective and of a copy
    simulate.py   time, exposed time and memory of one decision
    bound.py      time that no decision can beat
    programme.py  the best buckets of a forward, exactly, where memory is no limit
    search.py     seeds and local search: a decision, with its distance from the bound

No graph and no torch here: numbers in, numbers out, the same on every rank and in every process.
"""
