"""Vocabulary of the graphs: ops, groups of ranks, layouts of buckets, and reading all of these."""
