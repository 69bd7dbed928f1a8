"""`minisgl bench offline --compare`: the engine and others on one model, taking turns.

Every system runs in a process of its own, once in each round, on the same grid of batches and
prompt lengths. What a system prints of a cell is a line of JSON; see `contender`.
"""
