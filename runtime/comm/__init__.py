"""Collectives, and what they run over: meshes, streams, copies, transports."""
