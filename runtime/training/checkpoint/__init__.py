"""Checkpoints: complete or not there, and read without running code."""
